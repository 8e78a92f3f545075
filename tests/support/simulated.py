"""Training with simulated engines and trainers, which only take time; everything else is real."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.batch import CostModel
from mcore_mas.runtime.checkpoint import Checkpoints
from mcore_mas.runtime.recipe import Identity
from mcore_mas.training.async_rollout import AsyncRollouts
from mcore_mas.training.collected_steps import CollectedSteps
from mcore_mas.training.colocation import Colocation
from mcore_mas.training.policy_trainer import PolicyTrainer
from mcore_mas.training.step import TrainingSession
from mcore_mas.training.task_schedule import TaskSchedule
from mcore_mas.training.teachers import Teachers
from mcore_mas.training.weight_sync import WeightSync
from rollout.base.digests import Digest
from rollout.config.agents import build_player, build_team
from rollout.config.environment import build_env
from rollout.engines import TokenCallback
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Completion, Group, Sampling, Task, VersionSpan
from rollout.sync.transport import SyncRoute, WeightUpdate

TOKEN_S = 0.1  # seconds to decode one token


def pseudo_uniform(*keys: int | str) -> float:
    """Return a number in (0, 1) that is derived from the keys."""
    return (derive_seed(*keys) % 10**9 + 0.5) / 10**9


def long_tailed(seed: int, *, median: int = 24, sigma: float = 0.8, longest: int = 240) -> int:
    """Return a number of tokens of a reply from a log-normal distribution.

    The longest of a few dozen replies is far longer than their mean.
    """
    quantile = NormalDist().inv_cdf(pseudo_uniform(seed, "tokens"))
    return min(longest, math.ceil(median * math.exp(sigma * quantile)))


class Text:
    """Renderer whose tokens are UTF-8 bytes; 0 ends a reply, and 1 is padding without text."""

    stop = (0,)

    def render(self, messages):
        return tuple("\n".join(m.content for m in messages).encode())

    def decode(self, token_ids):
        return bytes(token for token in token_ids if token > 1).decode()


class SimulatedEngine:
    """Engine whose replies take `TOKEN_S` seconds a token, however many run at once.

    Weights that arrive during a reply sample the rest of it. The seed of the call decides which of
    two answers a reply guesses.
    """

    def __init__(self, tokens: Callable[[int], int], *, hand_over_s: float = 0.0) -> None:
        """Initialize an engine.

        Args:
            tokens: returns the number of tokens of a reply, by the seed of the call.
            hand_over_s: seconds that an update of the weights takes.
        """
        self.version = 0
        self.pause_s = 0.0
        self.starts = 1
        self.running = 0
        self._tokens = tokens
        self._hand_over_s = hand_over_s
        self._updates: list[tuple[float, int]] = [(0.0, 0)]  # time and version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await self.stream(prompt_ids, sampling, None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback | None
    ) -> Completion:
        reply = b"\\boxed{%d}\0" % (sampling.seed % 2)
        size = max(len(reply), self._tokens(sampling.seed))
        tokens = (1,) * (size - len(reply)) + tuple(reply)
        start_s = asyncio.get_running_loop().time()
        version_starts = {0: self.version}  # version by the first token that it sampled

        self.running += 1
        try:
            await asyncio.sleep(size * TOKEN_S)
        finally:
            self.running -= 1

        for update_s, version in self._updates:
            if start_s < update_s < start_s + size * TOKEN_S:
                version_starts[math.ceil((update_s - start_s) / TOKEN_S)] = version
        version_ends = [*list(version_starts)[1:], size]
        return Completion(
            token_ids=tokens,
            logprobs=(-0.5,) * size,
            finish_reason="stop",
            versions=tuple(
                VersionSpan(version=version, start=start, end=end)
                for (start, version), end in zip(version_starts.items(), version_ends, strict=True)
            ),
        )

    async def begin_update(self) -> SyncRoute:
        return SyncRoute(transport="simulated", target="", model="")

    async def commit_update(self, update: WeightUpdate) -> None:
        await asyncio.sleep(self._hand_over_s)
        self.version = update.version
        self._updates.append((asyncio.get_running_loop().time(), update.version))

    def abort_update(self, error: Exception) -> None:
        pass

    async def weights_lost(self) -> None:
        await asyncio.Event().wait()


def handed_over(version: int) -> WeightUpdate:
    """Return an update of the weights without tensors."""
    return WeightUpdate(version=version, transport="simulated", location="", checksums={}, bytes=0)


class SimulatedGang:
    """Trainer group whose updates only take time.

    Attributes:
        updates: micro-batches of each update.
        schedule_positions: position in the learning rate schedule of each update.
    """

    cost_model = CostModel()

    def __init__(self, seconds: Callable[[int], float]) -> None:
        """Initialize a group; `seconds` returns the duration of an update, by its number."""
        self.updates: list[list] = []
        self.schedule_positions: list[int | None] = []
        self._seconds = seconds

    async def update(self, microbatches, schedule_position=None):
        await asyncio.sleep(self._seconds(len(self.updates)))
        self.updates.append(list(microbatches))
        self.schedule_positions.append(schedule_position)
        return {"grad_norm": 1.0, "skipped_updates": 0.0}

    async def send_weights(self, route: SyncRoute, version: int) -> WeightUpdate:
        return handed_over(version)

    async def save(self, folder: Path) -> None:
        folder.mkdir()

    async def wait_written(self) -> dict[str, Digest]:
        return {}


class Log:
    """Logbook that keeps notes in memory and passes metrics to `report`."""

    tracking_run = ""

    def __init__(
        self, report: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None
    ) -> None:
        self.report = report
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def trace(self, groups: Sequence[Group], samples: Sequence[Sample]) -> None:
        pass


def simulated_run(
    folder: Path,
    *overrides: str,
    tokens: Callable[[int], int] = long_tailed,
    seconds: Callable[[int], float] = lambda _: 0.0,
    hand_over_s: float = 0.0,
    report: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None,
    engine_class: type[SimulatedEngine] = SimulatedEngine,
) -> TrainingSession:
    """Return a run of the math team; policies `solver` and `verifier` have simulated engines."""
    settings = [
        f"results={folder}",
        "trainer.checkpoint_every=1000",
        "orchestra.options.max_loops=2",
        *overrides,
    ]
    config = RunConfig.from_values(resolve(["experiment=demo_math", *settings]), "simulated")
    tasks = [
        Task(
            id=str(number),
            prompt=f"task {number}",
            answers=(str(number % 2),),
            env="math",
            source="s",
            split="train",
        )
        for number in range(4 * config.trainer.tasks_per_step)
    ]
    engines = {name: engine_class(tokens, hand_over_s=hand_over_s) for name in config.policies}
    return make_session(
        config,
        folder,
        tasks,
        engines,
        {name: SimulatedGang(seconds) for name in engines},
        Log(report),
    )


def make_session(
    config: RunConfig,
    folder: Path,
    tasks: Sequence[Task],
    engines: Mapping[str, Any],
    groups: Mapping[str, Any],
    log: Log,
    first_step: int = 0,
) -> TrainingSession:
    """Return a session with these engines and trainer groups, by policy."""
    rollouts = AsyncRollouts(
        config=config,
        team=build_team(config.agents, players_of(config, engines, Text())),
        make_env=build_env(config.env),
        schedule=TaskSchedule(tasks, config.trainer.tasks_per_step, config.seed),
        validation=(),
        collected=CollectedSteps(folder, first_step=first_step),
    )
    return TrainingSession(
        config=config,
        rollouts=rollouts,
        trainers={name: PolicyTrainer(name, config, group) for name, group in groups.items()},
        weight_sync={name: WeightSync(group, engines[name]) for name, group in groups.items()},
        teachers=Teachers(config, engines, {}, log.note),
        memory=Colocation(engines, []),
        checkpoints=Checkpoints(
            folder / "checkpoints", Identity(run=config.run, models={}), keep=2
        ),
        logbook=log,  # type: ignore[arg-type]
    )


def players_of(config: RunConfig, engines: Mapping[str, Any], renderer: Any) -> dict[str, Any]:
    """Return a client of each engine, by policy."""
    return {
        name: build_player(
            engine,
            renderer,
            deadline_s=config.collection.call_s,
            max_in_flight=config.policies[name].max_in_flight,
        )
        for name, engine in engines.items()
    }


def engines_of(session: TrainingSession) -> dict[str, Any]:
    """Return the engines of a session's team, by policy."""
    return {name: player.engine for name, player in session.rollouts.team.policies.items()}  # type: ignore[attr-defined]


def with_engines(
    session: TrainingSession, engines: Mapping[str, Any], renderer: Any
) -> TrainingSession:
    """Return the session with other engines, before its first step."""
    team = build_team(session.config.agents, players_of(session.config, engines, renderer))
    return replace(
        session,
        rollouts=replace(session.rollouts, team=team),
        weight_sync={
            name: WeightSync(group, engines[name]) for name, group in session.groups.items()
        },
        memory=Colocation(engines, []),
    )
