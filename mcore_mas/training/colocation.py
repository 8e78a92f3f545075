"""Colocation: engines and trainers on the same GPUs take turns in their memory."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)

from mcore_mas.runtime.trainer_group import TrainerGroup
from rollout.base.errors import EngineError
from rollout.engines.protocol import Tag, TrainedEngine


class Colocation:
    """Memory of engines and trainers on the same GPUs.

    Memory is freed before it is taken, because the GPUs have room for one side only.
    """

    def __init__(
        self,
        engines: Mapping[str, TrainedEngine],
        offloaded: Sequence[TrainerGroup],
        *,
        sleeps: bool = False,
        one_by_one: bool = False,
    ) -> None:
        """Name the engines by policy, and the trainers that are offloaded during rollouts.

        Args:
            sleeps: True if engines free their memory while policies are trained.
            one_by_one: True if only one trainer has its memory at a time. Trainers then take it
                themselves when they are called (`MemoryRotation`).
        """
        self._engines = engines
        self._offloaded = offloaded
        self._sleeps = sleeps
        self._update_lock = asyncio.Lock() if one_by_one else None

    def learning(self) -> AbstractAsyncContextManager[object]:
        """Return a context manager for a policy's update and weight sync.

        With `one_by_one`, it is a lock, so that only one policy is updated at a time.
        """
        return self._update_lock or nullcontext()

    @asynccontextmanager
    async def rollout(self, trained: Sequence[str] = ()) -> AsyncIterator[None]:
        """Give engines all their memory for this block, while trainers are offloaded.

        Args:
            trained: policies that are trained after the block. Their engines free the weights too,
                because new ones will come.
        """
        try:
            await asyncio.gather(*(group.sleep() for group in self._offloaded))
            if self._sleeps:
                engines = self._engines.values()
                await asyncio.gather(*(engine.wake(("kv_cache",)) for engine in engines))
            yield
        except BaseException:
            with suppress(EngineError):  # abandoned requests may still be running
                await self._free_engine_memory(())
            raise
        else:
            await self._free_engine_memory(trained)
        finally:
            # Trainers that take turns load themselves when they are called.
            takes_turns = self._update_lock is not None
            if not takes_turns:
                await asyncio.gather(*(group.wake() for group in self._offloaded))

    async def _free_engine_memory(self, trained: Sequence[str]) -> None:
        if not self._sleeps:
            return

        async def sleep(policy: str, engine: TrainedEngine) -> None:
            tags: tuple[Tag, ...] = ("kv_cache",)
            if policy in trained:
                tags = ("weights", "kv_cache")
            await engine.sleep(tags)

        await asyncio.gather(*(sleep(policy, engine) for policy, engine in self._engines.items()))


@asynccontextmanager
async def offload_trainers(groups: Sequence[TrainerGroup]) -> AsyncIterator[None]:
    """Offload trainers for this block; calls to them wait.

    An engine process that died on the GPUs of trainers is restarted in such a block, because it chooses the
    size of its KV cache by the memory that is free.
    """
    async with AsyncExitStack() as stack:
        for group in groups:
            await stack.enter_async_context(group.offloaded())
        yield
