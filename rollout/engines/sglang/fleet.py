"""The SGLang servers of one policy: started, called, and started again after a death."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from rollout.base.async_tasks import set_outcome
from rollout.base.errors import EngineError
from rollout.base.event_loop import per_loop
from rollout.base.http import Unanswered
from rollout.base.processes import Restarts
from rollout.engines.protocol import Tag
from rollout.engines.sglang.client import StreamedReply
from rollout.engines.sglang.server import NoRoom, Replica, owned_replica
from rollout.engines.sglang.settings import SGLangSettings

_ROOM_S = (
    120.0  # that Ray may look for another node for a server whose own is lost, while others go on
)


class Left(EngineError):
    """A server is gone; others go on."""


@dataclass(eq=False, repr=False)  # its settings have a key
class Fleet:
    """Calls servers, and starts those again that died, `restarts` times an hour.

    A server that was started again and could not be given the present weights is left paused: it holds what it is
    asked until the next update.
    """

    settings: SGLangSettings
    tell: Callable[[str], None]  # called with one line when a server is started again
    weigh: Callable[
        [Replica], Awaitable[bool]
    ]  # gives a new server the present weights, or says that it cannot
    restore: Callable[[], Awaitable[None]]  # has an update come, for a server that was left paused
    room: Callable[[], AbstractAsyncContextManager[object]] = (
        nullcontext  # inside, a server finds memory to start in
    )

    def __post_init__(self) -> None:
        """Name the servers; each is started when it is first asked."""
        self._restarts = Restarts("engine", self.settings.restarts)
        self.replicas = [Replica(self.settings, url=url) for url in self.settings.urls]
        if not self.replicas:
            self.replicas = [
                owned_replica(self.settings, number) for number in range(self.settings.replicas)
            ]
        self._members = dict[str, Replica]()  # that have joined or are about to, by URL
        self.left = 0  # members so far

    async def meet(self) -> list[Replica]:
        """Let servers go that the file of members names no more; those that it names newly, and that answer, the last
        first. They pause, and are asked for nothing before they have been given weights and are told to `join`.
        """
        named = await asyncio.to_thread(self.settings.named) if self.settings.members else []
        for url in [url for url in self._members if url not in named]:
            self.leave(self._members[url], f"{url} is not among the members any more")
        found = []
        for replica in [
            Replica(self.settings, url=url) for url in reversed(named) if url not in self._members
        ]:
            if await replica.client.up():
                with suppress(Unanswered):
                    await replica.client.call("/pause_generation", {"mode": "retract"})
                    found.append(replica)
        return found

    def join(self, replica: Replica) -> None:
        """Ask this server too, which has the present weights."""
        replica.ready = True
        self._members[replica.client.url] = replica
        self.replicas.append(replica)
        self.tell(f"SGLang: {replica.client.url} joined; {len(self.replicas)} servers")

    def leave(self, replica: Replica, why: str) -> bool:
        """Ask a server no more; False if it is the last one, which stays."""
        if len(self.replicas) == 1:
            return False
        self.replicas.remove(replica)
        self.left += 1 + replica.starts
        self._members.pop(replica.client.url, None)
        self.tell(f"SGLang: {why}; {len(self.replicas)} servers")
        return True

    async def call(
        self,
        replica: Replica,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        weighed: bool = False,
        stream: StreamedReply | None = None,
    ) -> Any:
        """A server's answer; one that dies of the question is started again and asked again.

        Args:
            weighed: ask for an update first if the server waits for one.
            stream: what takes an answer in events.

        Raises:
            EngineError: it refuses, or is gone for good.
        """
        while True:
            await self._ready(replica)
            if weighed and replica.stale:
                await self.restore()
            async with self.reviving(replica):
                return await replica.client.call(path, body, stream=stream)

    async def all(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """`call` every server."""
        await self._each(lambda replica: self.call(replica, path, body))

    async def _each(self, act: Callable[[Replica], Awaitable[Any]]) -> None:
        async def one(replica: Replica) -> None:
            with suppress(Left):
                await act(replica)

        await asyncio.gather(*map(one, list(self.replicas)))

    @asynccontextmanager
    async def reviving(self, replica: Replica) -> AsyncIterator[None]:
        """A block that ends early where the server is lost, which is then revived."""
        starts = replica.starts
        try:
            yield
        except Unanswered as error:
            await self.revive(replica, starts, error)

    async def revive(self, replica: Replica, starts: int, error: Unanswered) -> None:
        """Start again a server that was started `starts` times and is lost, with the present weights or paused.

        Raises:
            EngineError: it is not ours, has died once too often, or does not take the weights.
        """
        # whoever asked may be cancelled meanwhile, and a server without its weights would answer the others
        await asyncio.shield(asyncio.ensure_future(self._revived(replica, starts, error)))

    async def _revived(self, replica: Replica, starts: int, error: Unanswered) -> None:
        async with _gate(replica):
            while replica.starts == starts:  # else another call was faster
                try:
                    await self._start_again(replica, error)
                    replica.stale = "weights" in replica.asleep or not await self.weigh(replica)
                    if replica.stale:
                        await replica.client.call("/pause_generation", {"mode": "retract"})
                except Unanswered as again:
                    starts, error = replica.starts, again

    @property
    def stale(self) -> bool:
        """Whether a server waits without the present weights."""
        return any(replica.stale for replica in self.replicas)

    async def move(self, tags: Sequence[Tag], *, asleep: bool) -> None:
        """Have the servers give memory away (`asleep`) or take it again, of each only what is not so already.

        SGLang's memory saver ends a server over a tag that sleeps already, as after a rollout that never began, and
        over one to wake that does not sleep.
        """
        # CUDA graphs go with keys and values, where a server can do without them (SGLANG_MEMORY_SAVER_CUDA_GRAPH)
        wanted = [*tags, "cuda_graph"] if "kv_cache" in tags else [*tags]

        async def one(replica: Replica) -> None:
            await self._ready(replica)
            while left := [tag for tag in wanted if (tag in replica.asleep) is not asleep]:
                async with self.reviving(replica):
                    await _move(replica, left, asleep=asleep)

        await self._each(one)

    def close(self) -> None:
        """End the servers that are ours."""
        for replica in self.replicas:
            replica.close()

    async def _start_again(self, replica: Replica, error: Unanswered) -> None:
        ended = await replica.ended()
        if not ended:
            raise EngineError(
                f"SGLang at {replica.client.url}: {error}; its process runs but does not answer"
            )
        if replica not in self.replicas or (
            replica.client.url in self._members and self.leave(replica, ended)
        ):
            raise Left
        if not replica.ours or not self._restarts.take():
            raise EngineError(f"SGLang: {ended}{'; no restart is left' if replica.ours else ''}")
        self.tell(f"SGLang: {ended}; started again, {self._restarts.remaining} restarts left")
        asleep = set(replica.asleep)
        async with self.room():
            try:
                await replica.start(_ROOM_S if len(self.replicas) > 1 else None)
            except NoRoom as error:
                if not self.leave(replica, f"{ended}; {error}"):
                    raise
                await asyncio.to_thread(replica.close)
                raise Left from None
            replica.stale = True
            await replica.wait(self.settings.start_s)
            if asleep:
                await _move(replica, sorted(asleep), asleep=True)

    async def _ready(self, replica: Replica) -> None:
        """Wait for the first answer of a server, and for the weights of one that was started again."""
        async with _gate(replica):
            if not replica.ready:
                await replica.wait(self.settings.start_s)


async def _move(replica: Replica, tags: Sequence[str], *, asleep: bool) -> None:
    await replica.client.call(
        f"/{'release' if asleep else 'resume'}_memory_occupation", {"tags": tags}
    )
    (replica.asleep.update if asleep else replica.asleep.difference_update)(tags)


def _gate(replica: Replica) -> asyncio.Lock:
    """Who starts or revives a server has it."""
    return per_loop(("gate", replica), asyncio.Lock)


class LostWeights:
    """Calls that wait for weights which a server lost in a death, until the trainer has sent them again."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._needed: asyncio.Event | None = None  # None: nobody would send them
        self._waiting: list[asyncio.Future[None]] = []

    async def needed(self) -> None:
        """Wait until some call needs them."""
        self._needed = asyncio.Event()
        while not (self._waiting and self._fleet.stale):
            await self._needed.wait()
            self._needed.clear()

    async def restored(self, transport: str) -> None:
        """Wait until they are there.

        Raises:
            EngineError: nobody sends them; or what `settle` was told.
        """
        if self._needed is None:
            raise EngineError(
                f"SGLang: restarted, but transport '{transport}' keeps no weights to resend"
            )
        self._needed.set()
        back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(back)
        await back

    def settle(self, error: EngineError | None = None) -> None:
        """End the wait of all calls."""
        waiting, self._waiting = self._waiting, []
        for back in waiting:
            set_outcome(back, error)
