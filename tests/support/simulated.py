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
from mcore_mas.training.checkpoint import Checkpoints, Identity
from mcore_mas.training.schedule import Schedule
from mcore_mas.training.session import Run
from mcore_mas.training.weight_sync import WeightSync
from rollout.base.files import Digest
from rollout.base.seeds import derive_seed
from rollout.config.build import build_env, build_orchestra, build_player, build_team
from rollout.records.completion import Completion, Sampling, VersionSpan
from rollout.records.trajectory import Task
from rollout.sync.protocol import SyncRoute, WeightUpdate

TOKEN_S = 0.1  # of decoding one token


def share(*place: int | str) -> float:
    """A number in (0, 1), by place."""
    return (derive_seed(*place) % 10**9 + 0.5) / 10**9


def long_tailed(seed: int, *, median: int = 24, sigma: float = 0.8, longest: int = 240) -> int:
    """Tokens of a reply: log-normal, so that the mean of a few dozen is far from the longest."""
    return min(longest, math.ceil(median * math.exp(sigma * NormalDist().inv_cdf(share(seed, "tokens")))))


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
        loop = asyncio.get_running_loop()
        reply = b"\\boxed{%d}\0" % (sampling.seed % 2)
        size = max(len(reply), self._tokens(sampling.seed))
        began, first = loop.time(), self.version
        self.running += 1
        try:
            await asyncio.sleep(size * TOKEN_S)
        finally:
            self.running -= 1
        starts = {0: first}
        for at, version in self._handed:
            if began < at < loop.time():
                starts[math.ceil((at - began) / TOKEN_S)] = version
        ends = [*list(starts)[1:], size]
        return Completion(
            token_ids=(1,) * (size - len(reply)) + tuple(reply),
            logprobs=(-0.5,) * size,
            finish_reason="stop",
            versions=tuple(
                VersionSpan(version=version, start=start, end=end)
                for (start, version), end in zip(starts.items(), ends, strict=True)
            ),
        )

    async def begin_update(self) -> SyncRoute:
        return SyncRoute(transport="simulated", place="", model="")

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
    return WeightUpdate(version=version, transport="simulated", place="", checksums={}, bytes=0)


class SimulatedGang:
    """A trainer that takes `seconds` of the number of its updates so far."""

    cost_model = None

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.updates: list[list] = []  # micro-batches of each
        self._seconds = seconds

    async def update(self, microbatches):
        await asyncio.sleep(self._seconds(len(self.updates)))
        self.updates.append(list(microbatches))
        return {"grad_norm": 1.0, "skipped_updates": 0.0}

    async def export(self, route: SyncRoute, version: int) -> WeightUpdate:
        return handed_over(version)

    async def save(self, folder: Path) -> None:
        folder.mkdir()

    async def written(self) -> dict[str, Digest]:
        return {}


def simulated_run(
    folder: Path,
    *overrides: str,
    tokens: Callable[[int], int] = long_tailed,
    seconds: Callable[[int], float] = lambda _: 0.0,
    hand_over_s: float = 0.0,
    report: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None,
) -> Run:
    """A run of the math team in which `solver` and `verifier` have an engine and a trainer each."""
    settings = [f"results={folder}", "trainer.checkpoint_every=1000", "orchestra.options.max_loops=2", *overrides]
    config = RunConfig.check(resolve(["experiment=demo_math", *settings]), "simulated")
    tasks = [
        Task(id=str(n), prompt=f"task {n}", answers=(str(n % 2),), env="math", source="s", split="train")
        for n in range(4 * config.trainer.tasks_per_step)
    ]
    engines = {name: SimulatedEngine(tokens, hand_over_s=hand_over_s) for name in config.policies}
    players = {
        name: build_player(
            engines[name], Text(), deadline_s=config.collection.call_s, max_in_flight=policy.max_in_flight
        )
        for name, policy in config.policies.items()
    }
    gangs: Any = {name: SimulatedGang(seconds) for name in config.policies}
    return Run(
        config=config,
        team=build_team(config.agents, players),
        orchestra=build_orchestra(config.orchestra),
        make_env=build_env(config.env),
        schedule=Schedule(tasks, config.trainer.tasks_per_step, config.seed),
        validation=(),
        trainers=gangs,
        critics={},
        engines=engines,
        remotes={},
        coach=None,
        kl={},
        checkpoints=Checkpoints(folder / "checkpoints", Identity(run=config.run, models={}), keep=2),
        trajectories=folder / "trajectories",
        models=folder / "models",
        report=report,
        tracking_run="",
        weight_sync={name: WeightSync(gangs[name], engines[name]) for name in config.policies},
    )


def with_engines(run: Run, engines: Mapping[str, Any]) -> Run:
    """The same run with other engines, before it begins."""
    return replace(
        run,
        engines=engines,
        weight_sync={name: WeightSync(group, engines[name]) for name, group in run.trainers.items()},
    )
