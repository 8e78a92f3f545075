"""The SGLang servers of one engine: started, called, and started again after a death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

from rollout.base.async_tasks import set_outcome
from rollout.base.errors import EngineError
from rollout.base.event_loop import per_loop
from rollout.base.http import Unanswered
from rollout.base.restarts import Restarts
from rollout.engines.build import RestartGuard
from rollout.engines.protocol import Tag
from rollout.engines.sglang.client import StreamedReply
from rollout.engines.sglang.replica import NoNodeFree, Replica, owned_replica
from rollout.engines.sglang.settings import SGLangSettings

# Seconds that Ray may look for another node for a server whose node is lost, if the engine has further
# servers. Without any, there is no limit.
_NODE_TIMEOUT_S = 120.0


class ServerLeft(EngineError):
    """A server is gone for good, and other servers of the engine continue."""


class Fleet:
    """Servers of one engine, which are started again after a death, up to `restarts` times an hour in all.

    A server that was started again and could not get the present weights stays paused: it holds its
    requests until the next update.

    Attributes:
        replicas: servers that get requests.
        tell: called with one line when a server is started again, joins or leaves.
        starts_of_departed: starts of the servers that have left, plus 1 for each of them, so that
            `SGLangEngine.starts` grows when a server leaves.
    """

    def __init__(
        self,
        settings: SGLangSettings,
        *,
        tell: Callable[[str], None],
        load_weights: Callable[[Replica], Awaitable[bool]],
        request_weights: Callable[[], Awaitable[None]],
        restart_guard: RestartGuard,
    ) -> None:
        """Create a `Replica` for each server; each server is started when it is first called.

        Args:
            tell: called with one line when a server is started again, joins or leaves.
            load_weights: loads the present weights into a server that was started again; returns
                False if there are no files to load them from.
            request_weights: waits until a paused server has got weights by an update.
            restart_guard: context manager around the restart of a server.
        """
        self._settings = settings
        self.tell = tell
        self._load_weights = load_weights
        self._request_weights = request_weights
        self._restart_guard = restart_guard
        self._restarts = Restarts("engine", settings.restarts)
        self._members: dict[str, Replica] = {}  # servers that have joined, by URL
        self.starts_of_departed = 0
        if settings.urls:
            self.replicas = [Replica(settings, url=url) for url in settings.urls]
        else:
            self.replicas = [owned_replica(settings, number) for number in range(settings.replicas)]

    async def update_members(self) -> list[Replica]:
        """Remove servers that the file of members no longer names, and return new ones that answer.

        The new servers are paused, and get no request before they have weights and `join` is called.
        Their order is the reverse of the file's, because `commit_update` takes them from the end.
        """
        if not self._settings.members:
            return []
        urls = await asyncio.to_thread(self._settings.read_members)
        for url in list(self._members):
            if url not in urls:
                self.leave(self._members[url], f"{url} is not among the members any more")
        new_replicas = []
        for url in reversed(urls):
            if url in self._members:
                continue
            replica = Replica(self._settings, url=url)
            if await replica.client.up():
                with suppress(Unanswered):
                    await replica.client.call("/pause_generation", {"mode": "retract"})
                    new_replicas.append(replica)
        return new_replicas

    def join(self, replica: Replica) -> None:
        """Add a server that has the present weights to those that get requests."""
        replica.ready = True
        self._members[replica.client.url] = replica
        self.replicas.append(replica)
        self.tell(f"SGLang: {replica.client.url} joined; {len(self.replicas)} servers")

    def leave(self, replica: Replica, reason: str) -> bool:
        """Remove a server from those that get requests; return False if it is the last one, which stays."""
        if len(self.replicas) == 1:
            return False
        self.replicas.remove(replica)
        self.starts_of_departed += 1 + replica.starts
        self._members.pop(replica.client.url, None)
        self.tell(f"SGLang: {reason}; {len(self.replicas)} servers")
        return True

    async def call(
        self,
        replica: Replica,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        needs_weights: bool = False,
        stream: StreamedReply | None = None,
    ) -> Any:
        """Return a server's answer. A server that dies is started again, and called again.

        Args:
            needs_weights: request an update first if the server is paused without weights.
            stream: collects an answer that comes as events; its result is then returned.

        Raises:
            ServerLeft: the server is gone for good, and others continue.
            EngineError: the server refuses, or the last server is gone for good.
        """
        while True:
            await self._wait_until_ready(replica)
            if needs_weights and replica.stale:
                await self._request_weights()
            # The loop repeats the call if the server died and was started again.
            async with self._restarting(replica):
                return await replica.client.call(path, body, stream=stream)

    async def call_all(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Call every server; see `call`."""
        await self._each(lambda replica: self.call(replica, path, body))

    async def _each(self, act: Callable[[Replica], Awaitable[Any]]) -> None:
        """Await `act` for all servers at once; ignore servers that leave meanwhile."""

        async def act_unless_left(replica: Replica) -> None:
            with suppress(ServerLeft):
                await act(replica)

        await asyncio.gather(*(act_unless_left(replica) for replica in self.replicas))

    @asynccontextmanager
    async def _restarting(self, replica: Replica) -> AsyncIterator[None]:
        """Suppress the error of a lost server in the block, and start the server again.

        The caller then repeats the block.
        """
        starts = replica.starts
        try:
            yield
        except Unanswered as error:
            await self.restart(replica, starts, error)

    async def restart(self, replica: Replica, starts: int, error: Unanswered) -> None:
        """Start a lost server again and load the present weights, or pause it if they cannot be loaded yet.

        Args:
            starts: number of the server's starts before the call that failed. If the number is larger
                now, another call has started the server again already.
            error: error of that call.

        Raises:
            ServerLeft: the server is gone for good, and others continue.
            EngineError: the server runs but does not answer; the server was not started here; no
                restart is left; or, after its restart, the server is not ready in time or does not take
                the weights.
        """
        # The caller may be cancelled meanwhile, and a server that was left without its weights
        # would answer other calls with old ones.
        await asyncio.shield(asyncio.ensure_future(self._restart(replica, starts, error)))

    async def _restart(self, replica: Replica, starts: int, error: Unanswered) -> None:
        async with _start_lock(replica):
            # Another call may have started the server while this one waited for the lock.
            while replica.starts == starts:
                try:
                    await self._start_again(replica, error)
                    if "weights" in replica.asleep:
                        replica.stale = True  # it has no memory for weights before `take_memory`
                    else:
                        replica.stale = not await self._load_weights(replica)
                    if replica.stale:
                        await replica.client.call("/pause_generation", {"mode": "retract"})
                except Unanswered as another_error:
                    # The server was lost again, so the loop starts it once more.
                    starts = replica.starts
                    error = another_error

    @property
    def stale(self) -> bool:
        """True if a server is paused without the present weights."""
        return any(replica.stale for replica in self.replicas)

    async def free_memory(self, tags: Sequence[Tag]) -> None:
        """Have all servers free the memory with these tags, except memory that they have freed already."""
        await self._free_or_take(tags, free=True)

    async def take_memory(self, tags: Sequence[Tag]) -> None:
        """Have all servers allocate the memory with these tags again, if they have freed it."""
        await self._free_or_take(tags, free=False)

    async def _free_or_take(self, tags: Sequence[Tag], *, free: bool) -> None:
        """Have all servers free memory, or allocate it again.

        Each server gets only the tags whose memory is not yet freed or allocated, because SGLang's
        memory saver crashes a server that is told to free or to allocate the same memory twice. For
        example, if a rollout fails before it has woken the servers, they are told to sleep again.
        """
        wanted: list[str] = [*tags]
        if "kv_cache" in tags:
            # With SGLANG_MEMORY_SAVER_CUDA_GRAPH, a server frees its CUDA graphs of decoding together
            # with the KV cache, under a tag of their own.
            wanted.append("cuda_graph")

        async def free_or_take(replica: Replica) -> None:
            await self._wait_until_ready(replica)
            while True:
                if free:
                    remaining = [tag for tag in wanted if tag not in replica.asleep]
                else:
                    remaining = [tag for tag in wanted if tag in replica.asleep]
                if not remaining:
                    return
                # The loop repeats the call if the server died and was started again.
                async with self._restarting(replica):
                    await _call_memory_saver(replica, remaining, free=free)

        await self._each(free_or_take)

    def close(self) -> None:
        """Stop the servers that were started here."""
        for replica in self.replicas:
            replica.close()

    async def _start_again(self, replica: Replica, error: Unanswered) -> None:
        """Start a server whose process has ended, and free the memory that it had freed before.

        After that the server has only the weights of the model's folder, and is `stale`.

        Args:
            error: error of the call that the server did not answer.

        Raises:
            Unanswered: the server was lost again.
            ServerLeft, EngineError: as `restart`.
        """
        reason = await replica.end_reason()
        if not reason:
            raise EngineError(
                f"SGLang at {replica.client.url}: {error}; its process runs but does not answer"
            )
        if not replica.owned:
            self._give_up(replica, reason)
        if not self._restarts.take():
            raise EngineError(f"SGLang: {reason}; no restart is left")
        self.tell(f"SGLang: {reason}; starting it again, {self._restarts.remaining} restarts left")

        asleep = sorted(replica.asleep)
        node_timeout_s = _NODE_TIMEOUT_S if len(self.replicas) > 1 else None
        async with self._restart_guard():
            try:
                await replica.start_again(self._settings.start_s, node_timeout_s)
            except NoNodeFree as no_node:
                if not self.leave(replica, f"{reason}; {no_node}"):
                    raise
                await asyncio.to_thread(replica.close)
                raise ServerLeft from None
            if asleep:
                try:
                    await _call_memory_saver(replica, asleep, free=True)
                except Unanswered:
                    # The server was lost again; its next start must free the memory too.
                    replica.asleep.update(asleep)
                    raise

    def _give_up(self, replica: Replica, reason: str) -> NoReturn:
        """Raise the error of a dead server that was not started here, or that has left.

        A server that has joined (see `update_members`) leaves now, unless it is the last one.

        Args:
            reason: reason why the server has ended.

        Raises:
            ServerLeft: the server leaves, or has left already.
            EngineError: the server has not joined, or is the last one.
        """
        if replica not in self.replicas:
            raise ServerLeft
        if replica.client.url in self._members:
            has_left = self.leave(replica, reason)
            if has_left:
                raise ServerLeft
        raise EngineError(f"SGLang: {reason}")

    async def _wait_until_ready(self, replica: Replica) -> None:
        """Wait until a server is ready; start it if it has not been started.

        If the server is being started again, wait until it also has the present weights or is paused.
        """
        async with _start_lock(replica):
            if not replica.ready:
                await replica.wait(self._settings.start_s)


async def _call_memory_saver(replica: Replica, tags: Sequence[str], *, free: bool) -> None:
    """Have a server free the memory with these tags, or allocate it again; record it in `asleep`."""
    if free:
        await replica.client.call("/release_memory_occupation", {"tags": tags})
        replica.asleep.update(tags)
    else:
        await replica.client.call("/resume_memory_occupation", {"tags": tags})
        replica.asleep.difference_update(tags)


def _start_lock(replica: Replica) -> asyncio.Lock:
    """Return the lock that is held while a server is started or restarted."""
    return per_loop(("start", replica), asyncio.Lock)


class LostWeights:
    """Calls that wait for weights which a server lost, until the trainer has sent them again."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # Event that is set when a call needs the weights; None until a trainer first waits for it.
        self._needed: asyncio.Event | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def wait_until_needed(self) -> None:
        """Wait until a call needs the weights. The trainer calls this."""
        self._needed = asyncio.Event()
        while not (self._waiting and self._fleet.stale):
            await self._needed.wait()
            self._needed.clear()

    async def wait_until_restored(self, transport: str) -> None:
        """Wait until the weights have been sent again.

        Raises:
            EngineError: no trainer has called `wait_until_needed` yet, so none will send them; or they
                were not sent, with the error that was given to `settle`.
        """
        if self._needed is None:
            raise EngineError(
                f"SGLang: restarted, but transport '{transport}' keeps no weights to resend"
            )
        self._needed.set()
        restored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(restored)
        await restored

    def settle(self, error: EngineError | None = None) -> None:
        """End the wait of all calls, with an error if the weights were not sent."""
        waiting, self._waiting = self._waiting, []
        for restored in waiting:
            set_outcome(restored, error)
