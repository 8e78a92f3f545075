"""Weight sync: a policy's trained weights into its engine, version by version, and again where the engine lost them."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rollout.base.errors import EngineError
from rollout.base.task_group import cancel_tasks

if TYPE_CHECKING:
    from mcore_mas.megatron.step.trainer_group import TrainerGroup
    from rollout.engines.protocol import TrainedEngine
    from rollout.sync.protocol import WeightUpdate


class WeightSync:
    """One policy's way from trainer to engine: which version the engine serves, and one update at a time."""

    def __init__(self, trainer: TrainerGroup, engine: TrainedEngine, *, first: int = 0) -> None:
        """The engine serves version `first`, or will before anything is sampled."""
        self._trainer, self._engine = trainer, engine
        self._lock = asyncio.Lock()  # held while weights are on their way
        self.versions = [first]  # that the engine was given, in order

    def age(self, version: int) -> int:
        """By how many updates `version` is behind. Versions are numbered by step, and a step may be without one."""
        return len(self.versions) - bisect_right(self.versions, version)

    async def push(self, version: int) -> dict[str, float]:
        """Have the engine serve the trainer's present weights as `version`; returns what that took.

        Raises:
            EngineError: they did not arrive, or not bit for bit.
        """
        began = time.perf_counter()
        async with self._lock:  # an engine that lost its weights may get them again at any time
            update = await self._send(version)
        if version != self.versions[-1]:
            self.versions.append(version)
        return {
            "hand_over_s": time.perf_counter() - began,
            "hand_over_mb": update.bytes / 1e6,
            "engine_pause_s": self._engine.pause_s,
        }

    async def watch(self) -> None:
        """Push the present version again whenever the engine has lost its weights, until this is cancelled."""
        while True:
            await self._engine.weights_lost()
            try:
                async with self._trainer.awake():
                    await self.push(self._engine.version)
            except Exception as error:  # isolated: calls that wait for the weights fail, and the next one asks again
                self._engine.abort_update(error)

    async def _send(self, version: int) -> WeightUpdate:
        """Once, or again whenever a death of the engine's that it survives was in the way."""
        route = await self._engine.begin_update()
        while True:
            starts = self._engine.starts
            try:
                update = await self._trainer.export(route, version)
                await self._engine.commit_update(update)
            except EngineError:
                route = await self._engine.begin_update()  # starts again what has died
                if self._engine.starts == starts:
                    raise
            else:
                return update


@asynccontextmanager
async def watched(syncs: Iterable[WeightSync]) -> AsyncIterator[None]:
    """Inside the block engines that lose their weights get them again."""
    watching = [asyncio.create_task(sync.watch()) for sync in syncs]
    try:
        yield
    finally:
        await cancel_tasks(watching)
