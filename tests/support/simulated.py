"""A training whose engines and trainers only take time: everything between them is real."""

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
from mcore_mas.training.weight_sync import WeightSync
from rollout.base.digests import Digest
from rollout.config.agents import build_player, build_team
from rollout.config.environment import build_env
from rollout.engines import TokenCallback
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Completion, Group, Sampling, Task, VersionSpan
from rollout.sync.transport import SyncRoute, WeightUpdate

TOKEN_S = 0.1  # of decoding one token


def share(*place: int | str) -> float:
    """A number in (0, 1), by place."""
    return (derive_seed(*place) % 10**9 + 0.5) / 10**9


def long_tailed(seed: int, *, median: int = 24, sigma: float = 0.8, longest: int = 240) -> int:
    """Tokens of a reply: log-normal, so that the mean of a few dozen is far from the longest."""
    return min(
        longest, math.ceil(median * math.exp(sigma * NormalDist().inv_cdf(share(seed, "tokens"))))
    )


class Text:
    """A renderer whose tokens are UTF-8 bytes; 0 ends a reply and 1 is silence."""

    stop = (0,)

    def render(self, messages):
        return tuple("\n".join(m.content for m in messages).encode())

    def decode(self, token_ids):
        return bytes(token for token in token_ids if token > 1).decode()


class SimulatedEngine:
    """Replies take `TOKEN_S` a token, whatever else runs; weights that arrive meanwhile sample the rest.

    A reply is a guess at one of two answers, by the call's seed, in as many tokens as `tokens` says of the seed.
    """

    def __init__(self, tokens: Callable[[int], int], *, hand_over_s: float = 0.0) -> None:
        self.version = 0
        self.pause_s = 0.0
        self.starts = 1
        self.running = 0
        self._tokens = tokens
        self._hand_over_s = hand_over_s
        self._handed: list[tuple[float, int]] = [(0.0, 0)]  # time, version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await self.stream(prompt_ids, sampling, None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, hear: TokenCallback | None
    ) -> Completion:
        reply = b"\\boxed{%d}\0" % (sampling.seed % 2)
        size = max(len(reply), self._tokens(sampling.seed))
        tokens = (1,) * (size - len(reply)) + tuple(reply)
        began = asyncio.get_running_loop().time()
        starts = {0: self.version}  # version by the first token that it samples

        self.running += 1
        try:
            await asyncio.sleep(size * TOKEN_S)
        finally:
            self.running -= 1

        for at, version in self._handed:
            if began < at < began + size * TOKEN_S:
                starts[math.ceil((at - began) / TOKEN_S)] = version
        ends = [*list(starts)[1:], size]
        return Completion(
            token_ids=tokens,
            logprobs=(-0.5,) * size,
            finish_reason="stop",
            versions=tuple(
                VersionSpan(version=version, start=start, end=end)
                for (start, version), end in zip(starts.items(), ends, strict=True)
            ),
        )

    async def begin_update(self) -> SyncRoute:
        return SyncRoute(transport="simulated", target="", model="")

    async def commit_update(self, update: WeightUpdate) -> None:
        await asyncio.sleep(self._hand_over_s)
        self.version = update.version
        self._handed.append((asyncio.get_running_loop().time(), update.version))

    def abort_update(self, error: Exception) -> None:
        pass

    async def weights_lost(self) -> None:
        await asyncio.Event().wait()


def handed_over(version: int) -> WeightUpdate:
    """Weights without bytes."""
    return WeightUpdate(version=version, transport="simulated", location="", checksums={}, bytes=0)


class SimulatedGang:
    """A trainer that takes `seconds` of the number of its updates so far."""

    cost_model = CostModel()

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.updates: list[list] = []  # micro-batches of each update
        self.schedule_positions: list[int | None] = []  # of each update
        self._seconds = seconds

    async def update(self, microbatches, schedule_position=None):
        await asyncio.sleep(self._seconds(len(self.updates)))
        self.updates.append(list(microbatches))
        self.schedule_positions.append(schedule_position)
        return {"grad_norm": 1.0, "skipped_updates": 0.0}

    async def export(self, route: SyncRoute, version: int) -> WeightUpdate:
        return handed_over(version)

    async def save(self, folder: Path) -> None:
        folder.mkdir()

    async def written(self) -> dict[str, Digest]:
        return {}


class Log:
    """A logbook that keeps what it is told, or tells `report`."""

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
) -> TrainingSession:
    """A run of the math team in which `solver` and `verifier` have an engine and a trainer each."""
    settings = [
        f"results={folder}",
        "trainer.checkpoint_every=1000",
        "orchestra.options.max_loops=2",
        *overrides,
    ]
    config = RunConfig.check(resolve(["experiment=demo_math", *settings]), "simulated")
    tasks = [
        Task(
            id=str(n),
            prompt=f"task {n}",
            answers=(str(n % 2),),
            env="math",
            source="s",
            split="train",
        )
        for n in range(4 * config.trainer.tasks_per_step)
    ]
    engines = {name: SimulatedEngine(tokens, hand_over_s=hand_over_s) for name in config.policies}
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
    """A session whose trainers' ranks are `groups`."""
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
        memory=Colocation(engines, []),
        checkpoints=Checkpoints(
            folder / "checkpoints", Identity(run=config.run, models={}), keep=2
        ),
        logbook=log,  # type: ignore[arg-type]
    )


def players_of(config: RunConfig, engines: Mapping[str, Any], renderer: Any) -> dict[str, Any]:
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
    """The engines that the team plays on."""
    return {name: player.engine for name, player in session.rollouts.team.policies.items()}  # type: ignore[attr-defined]


def with_engines(
    session: TrainingSession, engines: Mapping[str, Any], renderer: Any
) -> TrainingSession:
    """The same run with other engines, before it begins."""
    team = build_team(session.config.agents, players_of(session.config, engines, renderer))
    return replace(
        session,
        rollouts=replace(session.rollouts, team=team),
        weight_sync={
            name: WeightSync(group, engines[name]) for name, group in session.groups.items()
        },
        memory=Colocation(engines, []),
    )
