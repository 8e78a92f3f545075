"""Opponents of a run: which agent the frozen policy plays in a game, and with which weights.

The ratings are Elo's: a difference of 400 points means expected scores of 10 to 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

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
_TRAINED = "trained"  # key of the trained policy among the ratings


class Opponents:
    """Opponents of a run.

    A member is the number of steps after which the weights that an opponent plays with were kept; 0
    is the opponent's own model. The members of a step are a function of its number, so that a run
    that continues from a checkpoint chooses among the same ones.

    Attributes:
        ratings: ratings of the trained policy and of the members.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: TrainedEngine | None,
        ratings: Mapping[str, float] | None = None,
    ) -> None:
        """Begin with the ratings of a checkpoint.

        Args:
            config: config of a run with opponents.
            engine: engine of the opponent's policy; None for a remote model.
            ratings: `ratings` of the checkpoint; None: the run starts.
        """
        assert config.opponents is not None
        self.ratings = dict(ratings or {_TRAINED: _FIRST_RATING, "0": _FIRST_RATING})
        self._config = config
        self._settings = config.opponents
        self._engine = engine
        self._member = 0  # of the present step
        self._loaded: int | None = None  # member whose weights the engine has
        self._folder = config.folder / "train" / "opponents"

    @property
    def has_past(self) -> bool:
        """True if the opponent plays with earlier weights of the trained policy."""
        return self._settings.past is not None

    def policies_of(self, step: int, task_id: str) -> dict[str, str]:
        """Return the policy of each agent that does not play its own one in a task's games; {} if all do."""
        random = Random(derive_seed(self._config.seed, "opponent", step, task_id))
        if random.random() >= self._settings.share:
            return {}
        trained = [name for name, agent in self._config.agents.items() if agent.loss_weight]
        return {random.choice(trained): self._settings.policy}

    def members(self, step: int) -> list[int]:
        """Return the members among which a step chooses, the oldest first."""
        past = self._settings.past
        if past is None:
            return [0]
        return list(range(0, step + 1, past.every))[-past.size :]

    def choose(self, step: int) -> int:
        """Return the member that plays in a step."""
        members = self.members(step)
        past = self._settings.past
        if past is None or past.choose == "newest":
            return members[-1]
        random = Random(derive_seed(self._config.seed, "member", step))
        if past.choose == "uniform":
            return random.choice(members)
        trained = self.ratings[_TRAINED]
        weights = [expected_score(self.ratings[str(member)], trained) for member in members]
        return random.choices(members, weights)[0]

    async def prepare(self, step: int) -> None:
        """Choose the member of a step, and give its weights to the opponent's engine.

        Raises:
            EngineError: the engine did not take the weights.
        """
        self._member = self.choose(step)
        if self._settings.past is not None and self._loaded != self._member:
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
        """Keep the trained policy's weights after `step` steps, if they become a member.

        Args:
            step: number of steps taken.
            group: trainer of the policy.
            oldest_restart: step from which a restart would continue; its members are not removed.
        """
        past = self._settings.past
        if past is None or step % past.every:
            return
        folder = self._folder / str(step)
        await retry_while_full(partial(group.write_model, folder), folder)
        self.ratings[str(step)] = self.ratings[_TRAINED]
        oldest = min(self.members(min(step, oldest_restart)))
        for other in self._folder.iterdir():
            if int(other.name) < oldest:
                remove_path(other)

    def record(self, step: int, groups: Iterable[Group]) -> StepMetrics:
        """Update the ratings by the games of a step against the opponent; return metrics.

        Returns:
            `opponent/score`, the mean score of the trained policy against the opponent;
            `opponent/member`; and `opponent/rating`, the rating of the trained policy. Empty if there
            were no such games.
        """
        scores = []
        for group in groups:
            policies = self.policies_of(step, group.task.id)
            for trajectory in group.trajectories:
                # A trajectory's score is that of `first`.
                if policies and trajectory.score is not None:
                    score = trajectory.score
                    scores.append(1 - score if FIRST in policies else score)
        if not scores:
            return {}

        member = str(self._member)
        expected = expected_score(self.ratings[_TRAINED], self.ratings[member])
        change = _RATING_STEP * (fmean(scores) - expected)
        self.ratings[_TRAINED] += change
        self.ratings[member] -= change
        return {
            "opponent/score": fmean(scores),
            "opponent/member": float(self._member),
            "opponent/rating": self.ratings[_TRAINED],
        }

    async def _load(self) -> None:
        assert self._engine is not None, "a remote model has no earlier weights"
        folder = Path(self._config.policies[self._settings.policy].model)
        if self._member:
            folder = self._folder / str(self._member)
        await self._engine.load_weights(read_tensors(folder), version=self._member)
        self._loaded = self._member


def expected_score(rating: float, other: float) -> float:
    """Return the score that Elo's ratings expect of a player against another one; a draw counts one half."""
    return 1 / (1 + 10 ** ((other - rating) / 400))
