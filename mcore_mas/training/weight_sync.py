"""Weight sync and colocation: a policy's trained weights into its engine, and who has the GPU's memory when."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)

from mcore_mas.runtime.trainer_group import TrainerGroup
from rollout.base.async_tasks import cancel_tasks
from rollout.base.errors import EngineError
from rollout.engines.protocol import Tag, TrainedEngine
from rollout.sync.transport import WeightUpdate


class WeightSync:
    """One policy's way from trainer to engine: which version the engine serves, and one update at a time."""

    def __init__(
        self,
        trainer: TrainerGroup,
        engine: TrainedEngine,
        *,
        versions: Sequence[int] = (0,),
        sleeps: bool = False,
    ) -> None:
        """The engine serves the last of `versions`, or will before anything is sampled.

        Args:
            versions: that engines were given so far; of those before a start, as many as turns may be behind.
            sleeps: whether the engine gives its weights' memory away before an update.
        """
        self._trainer, self._engine, self._sleeps = trainer, engine, sleeps
        self._lock = asyncio.Lock()  # held while weights are on their way
        self.versions = list(versions)  # that the engine was given, in order

    def age(self, version: int) -> int:
        """By how many updates `version` is behind. Versions are numbered by step, and a step may be without one."""
        return len(self.versions) - bisect_right(self.versions, version)

    async def push(self, version: int, *, changed: bool = True) -> dict[str, float]:
        """Have the engine serve the trainer's present weights as `version`; returns what that took.

        Weights that are not `changed` are not sent, unless the engine has slept and has none.

        Raises:
            EngineError: they did not arrive, or not bit for bit.
        """
        if self._sleeps:
            await self._engine.wake(("weights",))
        elif not changed:
            return {}
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


class Memory:
    """Colocation: engines and trainers that share GPUs take turns in their memory."""

    def __init__(
        self,
        engines: Mapping[str, TrainedEngine],
        offloaded: Sequence[TrainerGroup],
        *,
        sleeps: bool = False,
        one_by_one: bool = False,
    ) -> None:
        """Engines by policy give memory away if they are to (`sleeps`), and so do trainers that are `offloaded`.

        Trainers that have it `one_by_one` take it themselves, when they are asked something (`TrainerTurns`).
        """
        self._engines, self._offloaded, self._sleeps = engines, offloaded, sleeps
        self._one = asyncio.Lock() if one_by_one else None
        for engine in engines.values() if sleeps else ():
            engine.room = self.room

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Inside the block no offloaded trainer has its memory, and what is asked of one waits.

        An engine's process that died beside trainers is started again here: it sizes its memory by what is free.
        """
        async with AsyncExitStack() as away:
            for group in self._offloaded:
                await away.enter_async_context(group.away())
            yield

    def learning(self) -> AbstractAsyncContextManager[object]:
        """Around all that a policy does in a step: none comes between where trainers have memory one by one."""
        return self._one or nullcontext()

    @asynccontextmanager
    async def rollout(self, trained: Sequence[str] = ()) -> AsyncIterator[None]:
        """Inside the block engines have all their memory, and after it no more than they must.

        Offloaded trainers have theirs the other way round. Who takes memory waits until the others have given it
        away: on the same GPUs there is room for one of them. Engines of policies `trained` after the block keep no
        weights, because new ones will come.
        """
        try:
            await asyncio.gather(*(group.sleep() for group in self._offloaded))
            if self._sleeps:
                await asyncio.gather(
                    *(engine.wake(("kv_cache",)) for engine in self._engines.values())
                )
            yield
        except BaseException:
            with suppress(EngineError):  # what was abandoned may still be running
                await self._sleep(())
            raise
        else:
            await self._sleep(trained)
        finally:
            if not self._one:
                await asyncio.gather(*(group.wake() for group in self._offloaded))

    async def _sleep(self, trained: Sequence[str]) -> None:
        if self._sleeps:
            tags: dict[bool, tuple[Tag, ...]] = {
                True: ("weights", "kv_cache"),
                False: ("kv_cache",),
            }
            await asyncio.gather(
                *(engine.sleep(tags[name in trained]) for name, engine in self._engines.items())
            )


@asynccontextmanager
async def watched(syncs: Iterable[WeightSync]) -> AsyncIterator[None]:
    """Inside the block engines that lose their weights get them again."""
    watching = [asyncio.create_task(sync.watch()) for sync in syncs]
    try:
        yield
    finally:
        await cancel_tasks(watching)
