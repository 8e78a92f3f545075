"""Opponents of a run: whose part a frozen policy takes in a game, and with which weights.

The ratings are Elo's: a difference of 400 points means expected scores of 10 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

from mcore_mas.config.opponents import OpponentConfig
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.full_disk import retry_while_full
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.training.metrics import StepMetrics
from rollout.base.ownership import remove_path
from rollout.engines.protocol import TrainedEngine
from rollout.environments.games.zero_sum import FIRST
from rollout.models.tensors import read_tensors
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Group

_FIRST_RATING = 1000.0
_RATING_STEP = 32.0  # points by which a rating changes if a score is 1 above the expected one
_TRAINED = "trained"  # key of the trained policies in `Opponents.ratings`


class Opponents:
    """Opponents of a run, each with members that differ in their weights (see `Opponent`).

    Attributes:
        ratings: rating of the trained policies, by `_TRAINED`, and of each member, by
            `<policy>/<member>`.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: Mapping[str, TrainedEngine],
        ratings: Mapping[str, float] | None = None,
    ) -> None:
        """Begin with the ratings of a checkpoint.

        Args:
            config: config of a run with opponents.
            engines: engines by policy; remote models have none.
            ratings: `ratings` of the checkpoint; None: the run starts.
        """
        self.ratings = dict(ratings or {})
        self._config = config
        self._opponents = {
            policy: Opponent(config, policy, settings, engines.get(policy))
            for policy, settings in (config.opponents or {}).items()
        }

    @property
    def with_past(self) -> list[Opponent]:
        """Opponents that play with earlier weights of a trained policy."""
        return [opponent for opponent in self._opponents.values() if opponent.past is not None]

    def policies_of(self, step: int, task_id: str) -> dict[str, str]:
        """Return the opponent that plays in a task's games, by the agent whose part it takes; {} in self-play."""
        random = Random(derive_seed(self._config.seed, "opponent", step, task_id))
        draw = random.random()
        for policy, opponent in self._opponents.items():
            if draw < opponent.share:
                return {random.choice(opponent.agents): policy}
            draw -= opponent.share
        return {}

    def members(self, step: int) -> dict[str, int]:
        """Return the member that plays in a step, for each opponent."""
        return {
            policy: opponent.choose(step, self.rating)
            for policy, opponent in self._opponents.items()
        }

    def rating(self, key: str) -> float:
        """Return a rating by its key in `ratings`; _FIRST_RATING if there is none yet."""
        return self.ratings.get(key, _FIRST_RATING)

    async def prepare(self, step: int) -> None:
        """Choose the members of a step, and give their weights to the opponents' engines.

        Raises:
            EngineError: an engine did not take the weights.
        """
        for policy, member in self.members(step).items():
            await self._opponents[policy].prepare(member)

    async def keep(
        self, step: int, groups: Mapping[str, TrainerGroup], *, oldest_restart: int
    ) -> None:
        """Keep the trained policies' weights after `step` steps, if they become members.

        Args:
            step: number of steps taken.
            groups: trainers by policy.
            oldest_restart: earliest step that a restart may continue with; its members are not removed.
        """
        for opponent in self.with_past:
            assert opponent.past is not None
            if step % opponent.past.every == 0:
                await opponent.keep(step, groups[opponent.past.of], oldest_restart=oldest_restart)
                self.ratings[opponent.key(step)] = self.rating(_TRAINED)

    def record(self, step: int, groups: Iterable[Group]) -> StepMetrics:
        """Update the ratings by the games of a step against the opponents; return metrics.

        Returns:
            `opponent/<policy>/score`, the mean score of the trained policies against the opponent, and
            `opponent/<policy>/member`, for opponents that played; and `opponent/rating`, the rating of
            the trained policies. Empty if there were no such games.
        """
        scores: dict[str, list[float]] = {policy: [] for policy in self._opponents}
        for group in groups:
            for agent, policy in self.policies_of(step, group.task.id).items():
                for trajectory in group.trajectories:
                    # A trajectory's score is that of `first`. The opponent takes the part of `agent`.
                    if trajectory.score is not None:
                        score = trajectory.score
                        scores[policy].append(1 - score if agent == FIRST else score)

        metrics: StepMetrics = {}
        for policy, opponent in self._opponents.items():
            if not scores[policy]:
                continue
            member = opponent.key(opponent.member)
            score = fmean(scores[policy])
            expected = expected_score(self.rating(_TRAINED), self.rating(member))
            change = _RATING_STEP * (score - expected)
            self.ratings[_TRAINED] = self.rating(_TRAINED) + change
            self.ratings[member] = self.rating(member) - change
            metrics[f"opponent/{policy}/score"] = score
            metrics[f"opponent/{policy}/member"] = float(opponent.member)
        if metrics:
            metrics["opponent/rating"] = self.rating(_TRAINED)
        return metrics


class Opponent:
    """A frozen policy that the trained agents play against, with its own model or earlier weights of theirs.

    It plays as one of its *members*: member 0 has the opponent's own model, and member N the weights
    that the policy `past.of` had after N steps. The members of a step are a function of the step's
    number, so that a run that continues from a checkpoint chooses among the same ones.

    Attributes:
        share: probability that it plays in the games of a task.
        agents: trained agents whose part it may take in a game.
        past: earlier weights that it plays with; None: it only plays with its own model.
        member: member that plays in the present step.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: str,
        settings: OpponentConfig,
        engine: TrainedEngine | None,
    ) -> None:
        trained_agents = [name for name, agent in config.agents.items() if agent.loss_weight]
        self.share = settings.share
        self.agents = settings.agents or trained_agents
        self.past = settings.past
        self.member = 0
        self._policy = policy
        self._seed = config.seed
        self._model = Path(config.policies[policy].model)
        self._engine = engine
        self._loaded: int | None = None  # member whose weights the engine has
        self._folder = config.folder / "train" / "opponents" / policy

    def key(self, member: int) -> str:
        """Return the key of a member in `Opponents.ratings`."""
        return f"{self._policy}/{member}"

    def members(self, step: int) -> list[int]:
        """Return the members that can play in a step, the oldest first."""
        if self.past is None:
            return [0]
        return list(range(0, step + 1, self.past.every))[-self.past.size :]

    def choose(self, step: int, rating: Callable[[str], float]) -> int:
        """Return the member that plays in a step.

        Args:
            step: number of the step.
            rating: returns the rating of a key in `Opponents.ratings`.
        """
        members = self.members(step)
        if self.past is None or self.past.choose == "newest":
            return members[-1]
        random = Random(derive_seed(self._seed, "member", step, self._policy))
        if self.past.choose == "uniform":
            return random.choice(members)
        trained = rating(_TRAINED)
        weights = [expected_score(rating(self.key(member)), trained) for member in members]
        return random.choices(members, weights)[0]

    async def prepare(self, member: int) -> None:
        """Make a member the one that plays; load its weights into the engine unless they are there.

        Raises:
            EngineError: the engine did not take the weights.
        """
        self.member = member
        if self.past is not None and self._loaded != member:
            await self._load()

    async def resend_when_lost(self) -> None:
        """Load the weights again whenever the engine has lost them; never return."""
        assert self._engine is not None
        while True:
            await self._engine.weights_lost()
            try:
                await self._load()
            except Exception as error:  # isolated: waiting calls fail, and a later one asks again
                self._engine.abort_update(error)

    async def keep(self, step: int, group: TrainerGroup, *, oldest_restart: int) -> None:
        """Save the weights of a trainer after `step` steps; remove those that no later step can choose.

        Args:
            step: number of steps taken.
            group: trainer of the policy `past.of`.
            oldest_restart: earliest step that a restart may continue with; its members are not removed.
        """
        folder = self._folder / str(step)
        await retry_while_full(partial(group.write_model, folder), folder)
        oldest = min(self.members(min(step, oldest_restart)))
        for other in self._folder.glob("[0-9]*"):  # a killed rank may have left a hidden folder
            if int(other.name) < oldest:
                remove_path(other)

    async def _load(self) -> None:
        assert self._engine is not None, "a remote model has no earlier weights"
        folder = self._folder / str(self.member) if self.member else self._model
        await self._engine.load_weights(read_tensors(folder), version=self.member)
        self._loaded = self.member


def expected_score(rating: float, other: float) -> float:
    """Return the score that Elo's ratings expect of a player against another one; a draw counts one half."""
    return 1 / (1 + 10 ** ((other - rating) / 400))
