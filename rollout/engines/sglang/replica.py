"""One server of an engine: its client, and its process where that is ours."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.engines.protocol import EngineError
from rollout.engines.sglang.client import Client
from rollout.engines.sglang.server import Server, arguments
from rollout.engines.sglang.settings import Settings

_LOOK_S = 0.25  # between two looks at a server that starts


class Replica:
    """A server that answers, starts, or has died; `starts` counts how often it was started.

    `asleep` has the tags of the memory that it has given away; one that is `stale` pauses, without the present weights.
    """

    def __init__(
        self, settings: Settings, host: Any = None, *, remote: bool = False, fellows: Sequence[Any] = ()
    ) -> None:
        """`host` is a `Server`, or with `remote` a Ray actor of one; None for a server that somebody else runs.

        `fellows` are actors that hold the server's further GPUs.
        """
        self._host, self._remote, self._fellows = host, remote, list(fellows)
        self._settings: dict[str, Any] = {"timeout_s": settings.timeout_s, "connections": settings.rows + 8}
        self.starts = 0
        self.ready = False
        self.stale = False
        self.asleep: set[str] = set()
        self._client: Client | None = None

    @property
    def ours(self) -> bool:
        """Whether the process is ours to start and end."""
        return self._host is not None

    @property
    def client(self) -> Client:
        """The server's API."""
        assert self._client is not None, "a server is waited for before it is asked"
        return self._client

    def attach(self, url: str, key: str | None) -> None:
        """Speak to a server that runs already."""
        self._client = Client(url, key=key, **self._settings)

    async def start(self) -> None:
        """Start the server, again if it ran before."""
        if self._remote:
            devices = [gpu for actor in (self._host, *self._fellows) for gpu in await actor.devices.remote()]
            url = await self._host.start.remote(devices)
        else:
            url = self._host.start()
        self._client = Client(url, **self._settings)
        self.starts += 1
        self.ready = False
        self.asleep.clear()

    async def wait(self, start_s: float) -> None:
        """Wait until the server is ready.

        Raises:
            EngineError: it ended, with what it said last; or `start_s` have passed.
        """
        if self._client is None:
            await self.start()
        deadline = time.monotonic() + start_s
        while not await self.client.up():
            ended = await self.ended()
            if ended and self.ours:
                raise EngineError(f"SGLang: {ended}")
            if time.monotonic() > deadline:
                raise EngineError(f"SGLang at {self.client.url}: not ready within {start_s:g} s")
            await asyncio.sleep(_LOOK_S)
        self.ready = True

    async def ended(self) -> str:
        """Why the server is gone; "" while its process runs."""
        if self._host is None:
            return f"the server at {self.client.url} is gone, and it is not ours to start"
        return str(await self._ask("ended"))

    async def pid(self) -> int | None:
        """The server's process, None where it is not ours."""
        return None if self._host is None else await self._ask("pid")

    def close(self) -> None:
        """End the server if it is ours; again does nothing."""
        host, self._host = self._host, None
        if host is None:
            return
        if not self._remote:
            host.stop()
            return
        import ray

        with contextlib.suppress(ray.exceptions.RayActorError):  # a server ends with its actor
            ray.get(host.stop.remote(), timeout=30)
        for actor in (host, *self._fellows):
            ray.kill(actor)

    async def _ask(self, method: str) -> Any:
        if self._remote:
            return await getattr(self._host, method).remote()
        return getattr(self._host, method)()


def attached(url: str, settings: Settings) -> Replica:
    """A server that runs at `url`."""
    replica = Replica(settings)
    replica.attach(url.rstrip("/"), settings.key)
    return replica


def owned(settings: Settings, number: int) -> Replica:
    """A server of our own: where Ray runs in an actor of its own, with one for each further GPU; else in this process.

    Raises:
        EngineError: no interpreter at `settings.python`.
    """
    words = arguments(
        str(settings.folder),
        tp=settings.tp,
        max_length=settings.max_length,
        slots=settings.rows,
        options=settings.arguments,
    )
    told = (settings.python or "", words, settings.log_of(number), settings.variables)
    server = Server(*told)  # complains here rather than in an actor
    if not _ray_runs():
        return Replica(settings, server)
    host, *fellows = [actor.remote(*told) for actor in _actors(settings.tp, settings.places_of(number))]
    return Replica(settings, host, remote=True, fellows=fellows)


def _ray_runs() -> bool:
    import sys

    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _actors(tp: int, places: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """One for each GPU of a server."""
    import ray

    if places is None:
        places = [{"num_gpus": 1 if ray.cluster_resources().get("GPU") else 0}] * tp
    return [ray.remote(num_cpus=0)(Server).options(**place) for place in places]
