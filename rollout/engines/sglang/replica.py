"""One server of an SGLang engine, as the engine sees it: its start, its end, and its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from rollout.base.errors import EngineError
from rollout.base.event_loop import per_loop
from rollout.engines.sglang.client import SGLangClient
from rollout.engines.sglang.server import Server, server_arguments
from rollout.engines.sglang.settings import SGLangSettings

_POLL_S = 0.25  # pause between two checks of a server that starts
_STOP_S = 30.0  # seconds that a server in an actor may take to stop
_SPARE_CONNECTIONS = 8  # connections to a server, in addition to one for each request


class NoNodeFree(EngineError):
    """Ray has no devices for a server whose node is lost."""


class Replica:
    """One server of an engine; it may not be started yet, be starting, answer, or have died.

    Attributes:
        starts: number of starts so far.
        busy: number of open requests for completions and scores.
        ready: True once the server has answered, until it is started again.
        stale: True if the server does not have the present weights; it is then paused, or is being
            started again.
        asleep: tags of the memory that the server has freed, or had freed before it was lost.
        gpus: GPUs that the server sees, if it is not in an actor; empty: all that this process sees.
        shared_gpus: names of the server's GPUs if other servers start on them too, else empty. In
            actors they are the positions of the GPUs among those of the engine.
        make_actors: function that starts the Ray actors of the server; None without actors. The first
            actor runs the server, and the others reserve its further GPUs.
        host: the `Server` or its actor; None for a server that was not started here, or was closed.
    """

    def __init__(
        self,
        settings: SGLangSettings,
        *,
        url: str = "",
        server: Server | None = None,
        make_actors: Callable[[], Sequence[Any]] | None = None,
        gpus: Sequence[str] = (),
        shared_gpus: Sequence[Any] = (),
    ) -> None:
        """Prepare the server, and start its Ray actors if it has some; `wait` starts the server itself.

        Args:
            url: URL of a server that runs already; "" with `server` or `make_actors`.
            server: server whose process this process starts.
            make_actors: function that starts the Ray actors of the server.
            gpus: GPUs that `server` sees; empty: all that this process sees.
            shared_gpus: GPUs that other servers start on too.
        """
        self._settings = settings
        self.make_actors = make_actors
        self.gpus = gpus
        self.shared_gpus = shared_gpus
        self.host: Any = server
        self._other_actors: Sequence[Any] = ()
        if make_actors is not None:
            self.host, *self._other_actors = make_actors()
        self.starts = 0
        self.busy = 0
        self.ready = False
        self.stale = False
        self.asleep: set[str] = set()
        self._client = self._make_client(url, settings.key) if url else None

    def _make_client(self, url: str, key: str | None) -> SGLangClient:
        return SGLangClient(
            url.rstrip("/"),
            timeout_s=self._settings.timeout_s,
            connections=self._settings.rows + _SPARE_CONNECTIONS,
            key=key,
        )

    @property
    def owned(self) -> bool:
        """True if the server's process is started and stopped here."""
        return self.host is not None

    @property
    def client(self) -> SGLangClient:
        """Client of the server's API, once the server has been started."""
        assert self._client is not None, "call `wait` first, which starts the server"
        return self._client

    async def start(self, node_timeout_s: float | None = None) -> None:
        """Start the server, also after it has ended; do not wait until it answers.

        Args:
            node_timeout_s: seconds that Ray may look for another node for the server; None: no limit.

        Raises:
            NoNodeFree: Ray has found no node.
        """
        if self.make_actors is None:
            url = self.host.start(self.gpus)
        else:
            url = await self._start_actor(self.make_actors, node_timeout_s)
        self._client = self._make_client(url, self._settings.server_key)
        self.starts += 1
        self.ready = False
        # A server that is started again has only the weights of the model's folder.
        self.stale = self.starts > 1
        self.asleep.clear()

    async def _start_actor(
        self, make_actors: Callable[[], Sequence[Any]], node_timeout_s: float | None
    ) -> str:
        """Start the server in its actor, or in a new actor if its own has died; return the server's URL."""
        try:
            await self.host.pid.remote()  # raises if the actor is dead
        except ray.exceptions.RayActorError:
            # The actor died with its node. Ray places the new actors on another node.
            self.host, *self._other_actors = make_actors()
        devices: list[str] = []
        try:
            # New actors answer their first call once Ray has found a node for them.
            async with asyncio.timeout(node_timeout_s):
                for actor in (self.host, *self._other_actors):
                    devices += await actor.devices.remote()
        except TimeoutError:
            raise NoNodeFree(
                f"no node has had room for another server within {node_timeout_s:g} s"
            ) from None
        return str(await self.host.start.remote(devices))

    async def wait(self, start_s: float) -> None:
        """Wait until the server is ready; start it if it has not been started.

        Args:
            start_s: seconds that the server may take.

        Raises:
            EngineError: the server has ended, or is not ready within `start_s`.
        """
        async with self._gpu_locks():
            if self._client is None:
                await self.start()
            await self._wait_until_up(start_s)
        self.ready = True

    async def start_again(self, start_s: float, node_timeout_s: float | None) -> None:
        """Start the server after it has ended, and wait until it is ready.

        Args:
            start_s: seconds that the server may take.
            node_timeout_s: see `start`.

        Raises:
            EngineError: as `start` and `wait`.
        """
        async with self._gpu_locks():
            await self.start(node_timeout_s)
            await self._wait_until_up(start_s)
        self.ready = True

    @asynccontextmanager
    async def _gpu_locks(self) -> AsyncIterator[None]:
        """Hold the locks of the shared GPUs, so that servers on one GPU start one after another.

        Each server sizes its cache by the memory that is free when it starts.
        """
        async with AsyncExitStack() as locks:
            for gpu in sorted(self.shared_gpus):  # one order for all servers, against deadlocks
                await locks.enter_async_context(per_loop(("GPU", gpu), asyncio.Lock))
            yield

    async def _wait_until_up(self, start_s: float) -> None:
        deadline = time.monotonic() + start_s
        while not await self.client.up():
            reason = await self.end_reason()
            if reason and self.owned:
                raise EngineError(f"SGLang: {reason}")
            if time.monotonic() > deadline:
                raise EngineError(f"SGLang at {self.client.url}: not ready within {start_s:g} s")
            await asyncio.sleep(_POLL_S)

    async def end_reason(self) -> str:
        """Return the reason why a server that does not answer has ended; "" while its process runs.

        A server that was not started here has no process to look at, and counts as ended.
        """
        if self.host is None:
            return f"the server at {self.client.url} is gone, and it was not started by this run"
        if self.make_actors is None:
            return str(self.host.end_reason())
        try:
            return str(await self.host.end_reason.remote())
        except ray.exceptions.RayActorError:
            return f"the server at {self.client.url} is gone with its actor"

    def close(self) -> None:
        """Stop the server if it was started here; a second call has no effect."""
        host, self.host = self.host, None
        if host is None:
            return
        if self.make_actors is None:
            host.stop()
            return
        with suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.get(host.stop.remote(), timeout=_STOP_S)
        for actor in (host, *self._other_actors):
            ray.kill(actor)


def owned_replica(settings: SGLangSettings, number: int) -> Replica:
    """Return server `number` of an engine, which Ray actors start if Ray runs, else this process.

    With Ray, it has one actor for each of its `tp` GPUs. The first runs the server; the others
    reserve GPUs.

    Raises:
        EngineError: `settings.python` is not a file.
    """
    server_options: dict[str, Any] = {
        "python": settings.python or "",
        "arguments": server_arguments(settings),
        "log": str(Path(settings.log).with_suffix(f".{number}.log")),
        "environment": settings.server_environment,
        "key": settings.server_key,
        "multi_node": settings.multi_node,
        "memory_share": settings.memory_share,
    }
    # Made with Ray too: its errors are raised here and not in an actor.
    server = Server(**server_options)
    if not ray.is_initialized():
        gpus = settings.gpus[number] if settings.gpus else ()
        return Replica(
            settings,
            server=server,
            gpus=gpus,
            shared_gpus=gpus if settings.shares_gpus else (),
        )

    first = number * settings.tp
    end = first + settings.tp
    actor_options: Sequence[Mapping[str, Any]]
    if settings.placements:
        actor_options = settings.placements[first:end]
    else:
        num_gpus = 1 if ray.cluster_resources().get("GPU") else 0
        actor_options = [{"num_gpus": num_gpus}] * settings.tp
    actor_class: Any = ray.remote(num_cpus=0)(Server)

    def make_actors() -> list[Any]:
        return [
            actor_class.options(**options).remote(**server_options) for options in actor_options
        ]

    return Replica(
        settings,
        make_actors=make_actors,
        shared_gpus=range(first, end) if settings.shares_gpus else (),
    )
