"""Pool of ranks that train one policy, or several policies with adapters on one model."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol

import ray

from mcore_mas.megatron.rank_watch import RankMonitor
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.planning.gpus import peak_flops
from mcore_mas.runtime.errors import ClusterError
from mcore_mas.runtime.trainer_rank import LOOPBACK, TrainerRankActor
from rollout.base.async_tasks import cancel_tasks
from rollout.base.digests import Digest
from rollout.base.restarts import ProcessLost

# Seconds that Ray may take to start the processes of all ranks.
_START_S = 600.0

# Seconds within which Ray reports that a rank has died.
_DEATH_REPORT_S = 10.0


class Sleeper(Protocol):
    """Object that can give its GPU memory away, and take it back."""

    async def sleep(self) -> int:
        """Give the memory away; return its bytes."""

    async def wake(self) -> None:
        """Take the memory back."""


class MemoryRotation:
    """Trainers that take turns on the same devices, while the others are offloaded to the host.

    Attributes:
        members: all trainers; each begins offloaded.
    """

    def __init__(self) -> None:
        self.members: list[Sleeper] = []
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def take(self, member: Sleeper) -> AsyncIterator[None]:
        """Load a trainer to the devices for this block, and keep it there until another one is loaded."""
        async with self._lock:
            for other in self.members:
                if other is not member:
                    await other.sleep()
            await member.wake()
            yield


class RankPool:
    """Ranks as Ray actors. All of them make the same calls, in the same order.

    Attributes:
        specs: specs of the trainers on these ranks, by policy; complete before `start`.
        is_on_cpu: True if no rank has a GPU.
        peak_flops: largest FLOP/s of a rank's GPU; None if it is not known or before `start`.
    """

    def __init__(
        self,
        policy: str,
        spec: TrainerSpec,
        *,
        threads: int,
        actor_options: Sequence[Mapping[str, Any]],
        monitor: RankMonitor | None,
        rotation: MemoryRotation | None,
    ) -> None:
        """Start the processes; `start` waits for them and loads the models.

        Args:
            policy: name of the first policy on these ranks, for errors.
            spec: spec of the policy's trainer.
            threads: number of torch's threads in each process.
            actor_options: Ray's options of each rank's actor.
            monitor: detects ranks that hang; None waits for them forever.
            rotation: rotation of the trainers on the same devices; None if no other trainer uses them.
        """
        self.specs = {policy: spec}
        self.is_on_cpu = not any(options.get("num_gpus") for options in actor_options)
        self.peak_flops: float | None = None
        self._policy = policy
        self._monitor = monitor
        self._rotation = rotation
        if rotation is not None:
            rotation.members.append(self)
        self._is_asleep = rotation is not None
        self._has_joined = False
        self._call_lock = asyncio.Lock()  # keeps the order of calls equal on all ranks
        self._awake_lock = asyncio.Lock()
        # By rank once `start` has returned.
        self._actors = [
            TrainerRankActor.options(**options).remote(threads, monitor)
            for options in actor_options
        ]

    def __len__(self) -> int:
        return len(self._actors)

    async def start(self) -> None:
        """Number the ranks, and wait until each has loaded its shard.

        Ranks of a node have consecutive numbers, in the order of their actor options. The ranks of
        an engine that shares their GPUs are numbered in the same way.

        Raises:
            ClusterError: Ray does not start the processes.
            ProcessLost: a rank has died, or hangs.
        """
        try:
            async with asyncio.timeout(_START_S):
                calls = [actor.node_address.remote() for actor in self._actors]
                nodes = await self._gather(calls, self._policy)
        except TimeoutError:
            raise ClusterError(
                f"policy {self._policy}: Ray has not started its {len(self)} processes within "
                f"{_START_S:.0f} s; its logs say why: in train/ray of the run's folder, or on the "
                "nodes of a joined Ray in /tmp/ray"
            ) from None

        order = sorted(range(len(self)), key=lambda index: (nodes[index], index))
        self._actors = [self._actors[index] for index in order]
        async with self._turn():
            self._has_joined = True
            address = meeting_address(sorted(nodes))
            store_address = await self._actors[0].open_store.remote(address)
            calls = [
                actor.join.remote(rank, store_address, self.specs)
                for rank, actor in enumerate(self._actors)
            ]
            gpu_names = await self._gather(calls, self._policy)
            self.peak_flops = peak_flops(gpu_names[0])

    def close(self) -> None:
        """Kill all ranks, also those that wait for one that is lost."""
        for actor in self._actors:
            ray.kill(actor)

    async def call(self, policy: str, method: str, *arguments: object) -> list[Any]:
        """Call a method of all ranks for a policy, in its turn; return the results by rank.

        Raises:
            ProcessLost: a rank has died, or hangs.
        """
        async with self._turn():
            async with self._call_lock:
                calls = [
                    getattr(actor, method).remote(policy, *arguments) for actor in self._actors
                ]
            return await self._gather(calls, policy)

    async def wait_written(self, policy: str) -> dict[str, Digest]:
        """Wait until the state that the ranks have copied is on disk; return digests by file.

        Raises:
            OSError: a rank could not write its files.
            ProcessLost: a rank has died.
        """
        calls = [actor.wait_written.remote(policy) for actor in self._actors]
        # Wait for all ranks and read their errors, because Ray logs a traceback of each unread error.
        futures = [asyncio.wrap_future(call.future()) for call in calls]
        results = await asyncio.gather(*futures, return_exceptions=True)
        digests: dict[str, Digest] = {}
        for rank, result in enumerate(results):
            if isinstance(result, ray.exceptions.RayActorError):
                raise _lost_error(policy, [rank]) from result
            if isinstance(result, ray.exceptions.RayError):
                cause = getattr(result, "cause", result)
                message = str(cause).strip() or type(cause).__name__
                reason = message.splitlines()[-1]
                raise OSError(f"rank {rank} of {policy}: {reason}") from result
            if isinstance(result, BaseException):
                raise result
            digests |= result
        return digests

    async def sleep(self) -> int:
        """Offload the trainers; return the bytes that become free on all ranks."""
        async with self._call_lock:
            return await self._set_asleep(True)

    async def wake(self) -> None:
        """Load the trainers back to their devices."""
        async with self._call_lock:
            await self._set_asleep(False)

    @asynccontextmanager
    async def offloaded(self) -> AsyncIterator[None]:
        """Offload the trainers for this block; calls wait until it ends."""
        async with self._call_lock:
            was_asleep = self._is_asleep
            await self._set_asleep(True)
            try:
                yield
            finally:
                await self._set_asleep(was_asleep)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Load the trainers for this block, and offload them afterwards if they were offloaded."""
        async with self._awake_lock:  # several policies on these ranks may enter such a block
            was_asleep = self._is_asleep
            await self.wake()
            try:
                yield
            finally:
                if was_asleep:
                    await self.sleep()

    async def _set_asleep(self, asleep: bool) -> int:
        """Offload or load the trainers, unless they are already; return the bytes that become free.

        Before `start` has loaded the trainers, waking them does nothing.
        """
        freed_bytes = 0
        if asleep and not self._is_asleep:
            calls = [actor.sleep.remote() for actor in self._actors]
            freed_bytes = sum(await self._gather(calls, self._policy))
        elif not asleep and self._is_asleep and self._has_joined:
            calls = [actor.wake.remote() for actor in self._actors]
            await self._gather(calls, self._policy)
        self._is_asleep = asleep
        return freed_bytes

    def _turn(self) -> AbstractAsyncContextManager[None]:
        return self._rotation.take(self) if self._rotation else nullcontext()

    async def _gather(self, calls: Iterable[Any], policy: str) -> list[Any]:
        """Return the results of one call per rank.

        If a rank fails, raise its error within seconds, instead of waiting for ranks that are blocked
        in a collective.

        Args:
            calls: Ray's references to the results, by rank.
            policy: policy that the calls are for, named in errors.

        Raises:
            ProcessLost: a rank has died, or hangs.
        """
        results = [asyncio.wrap_future(call.future()) for call in calls]
        gathered = asyncio.gather(*results)
        monitor = self._monitor if self._has_joined else None
        watching: asyncio.Future[Any] = asyncio.ensure_future(
            monitor.wait_for_hang(results) if monitor else asyncio.Event().wait()
        )
        try:
            await asyncio.wait({gathered, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not gathered.done():
                await watching
            if gathered.exception():
                # If a rank has died, the collectives of other ranks often fail before Ray reports its
                # death. Wait for this report, so that the error names the rank that has died.
                await asyncio.wait(results, timeout=_DEATH_REPORT_S)
                lost = [rank for rank, result in enumerate(results) if _has_died(result)]
                if lost:
                    raise _lost_error(policy, lost) from gathered.exception()
            return list(gathered.result())
        finally:
            await cancel_tasks([gathered, *results, watching])


def meeting_address(nodes: Sequence[str]) -> str:
    """Return the address of the store at which ranks meet.

    Args:
        nodes: addresses of the ranks' nodes, by rank. If all are on one node, loopback suffices.
    """
    return LOOPBACK if len(set(nodes)) == 1 else nodes[0]


def _has_died(result: asyncio.Future[Any]) -> bool:
    """Return True if a rank's result is that its process has died."""
    return result.done() and isinstance(result.exception(), ray.exceptions.RayActorError)


def _lost_error(policy: str, ranks: Sequence[int]) -> ProcessLost:
    return ProcessLost(f"policy {policy}: rank {', '.join(map(str, ranks))} died")
