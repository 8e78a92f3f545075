"""Weight sync: send each new version of a policy's weights to its engine."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from mcore_mas.runtime.trainer_group import TrainerGroup
from rollout.base.async_tasks import cancel_tasks
from rollout.base.errors import EngineError
from rollout.engines.protocol import TrainedEngine
from rollout.sync.transport import WeightUpdate


class Resender(Protocol):
    """Sender of weights that an engine has lost."""

    async def resend_when_lost(self) -> None:
        """Send the present weights again whenever the engine has lost them; never return."""


class WeightSync:
    """Weight sync of one policy, with one update at a time.

    Attributes:
        versions: versions that the engine was given, in order. It serves the last one, or will
            before anything is sampled.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        engine: TrainedEngine,
        *,
        versions: Sequence[int] = (0,),
        sleeps: bool = False,
    ) -> None:
        """Connect a trainer and an engine.

        Args:
            versions: versions that the engine has had, the oldest first. After a restart, they
                begin with the oldest version whose turns may still be trained on.
            sleeps: True if the engine frees its weights before an update.
        """
        self.versions = list(versions)
        self._trainer = trainer
        self._engine = engine
        self._sleeps = sleeps
        self._lock = asyncio.Lock()  # held while weights are sent

    def age(self, version: int) -> int:
        """Return the number of updates after `version`.

        Versions are numbered by step, and a step may be without an update.
        """
        return len(self.versions) - bisect_right(self.versions, version)

    def forget_versions(self, max_age: int) -> None:
        """Forget all versions but the latest one and the `max_age` before it.

        Args:
            max_age: largest age, as `age` counts it, of a turn that a later step may train on.
        """
        self.versions = self.versions[-1 - max_age :]

    async def push(self, version: int, *, changed: bool = True) -> dict[str, float]:
        """Have the engine serve the trainer's present weights as `version`; return metrics.

        Args:
            changed: False if the weights are those of the last version. They are then sent only to
                an engine that sleeps between rollouts, because it has freed its weights.

        Returns:
            `hand_over_s`, `hand_over_mb` (10^6 bytes) and `engine_pause_s`; {} if nothing is sent.

        Raises:
            EngineError: the weights did not arrive, or the engine received other bits.
        """
        if self._sleeps:
            await self._engine.wake(("weights",))
        elif not changed:
            return {}
        began = time.perf_counter()
        async with self._lock:  # an engine that lost its weights may ask for them at any time
            update = await self._send(version)
        if version != self.versions[-1]:
            self.versions.append(version)
        return {
            "hand_over_s": time.perf_counter() - began,
            "hand_over_mb": update.bytes / 1e6,
            "engine_pause_s": self._engine.pause_s,
        }

    async def resend_when_lost(self) -> None:
        """Push the present version again whenever the engine has lost its weights; never return."""
        while True:
            await self._engine.weights_lost()
            try:
                async with self._trainer.awake():
                    await self.push(self._engine.version)
            except Exception as error:  # isolated: waiting calls fail, and a later one asks again
                self._engine.abort_update(error)

    async def _send(self, version: int) -> WeightUpdate:
        """Send the weights; send them again if an engine process died meanwhile and was restarted."""
        route = await self._engine.begin_update()
        while True:
            starts = self._engine.starts
            try:
                update = await self._trainer.send_weights(route, version)
                await self._engine.commit_update(update)
            except EngineError:
                route = await self._engine.begin_update()  # restarts processes that died
                if self._engine.starts == starts:
                    raise
            else:
                return update


@asynccontextmanager
async def resend_lost_weights(resenders: Iterable[Resender]) -> AsyncIterator[None]:
    """Send weights again, during this block, to engines that have lost them."""
    tasks = [asyncio.create_task(resender.resend_when_lost()) for resender in resenders]
    try:
        yield
    finally:
        await cancel_tasks(tasks)
