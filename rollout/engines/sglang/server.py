"""One SGLang server of an engine: its process, which ends with ours, and the client that waits for it."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import ray

from rollout.base.errors import EngineError
from rollout.base.event_loop import per_loop
from rollout.base.processes import free_port, interface_of, start_group, stop_group
from rollout.base.urls import without_proxy
from rollout.engines.sglang.client import SGLangClient
from rollout.engines.sglang.settings import SGLangSettings

_SPARE = (
    6  # tokens of its context that SGLang leaves empty (`get_worker_info` in managers/tp_worker.py)
)
_SHOWN = 300  # characters of the log's end in an error
_MOST = 0.95  # of a GPU's free memory that a server may take for weights, keys and values
# What the server must not inherit: modules of this environment, and expandable segments under either name. SGLang's
# memory saver cannot give them back, and looks for them under the second name only.
_DROPPED = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


class NoRoom(EngineError):
    """Ray has no devices for a server whose node is lost."""


@dataclass(eq=False, repr=False)  # its key is shown to nobody
class Server:
    """A process that serves one replica; it runs in a Ray actor where GPUs are placed, in this process otherwise.

    It is `python -m sglang.launch_server *arguments`. With a `key` it answers who has the key. It listens at the
    loopback, or `far` at the address of its node. `share` is of the memory of its GPUs, whoever else is on them.

    Raises:
        EngineError: there is no such interpreter.
    """

    python: str
    arguments: Sequence[str]
    log: str
    environment: Mapping[str, str]
    key: str | None = None
    far: bool = False
    share: float | None = None

    def __post_init__(self) -> None:
        if not Path(self.python).is_file():
            raise EngineError(
                f"engine.python: no interpreter at {self.python}; see requirements/sglang.txt"
            )
        self._log = Path(self.log)
        self._process: subprocess.Popen[bytes] | None = None

    def devices(self) -> list[str]:
        """The GPUs that Ray gave this actor."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def start(self, devices: Sequence[str] = ()) -> str:
        """Start the server, after ending the one before, and return its URL; it may not answer yet.

        It sees the GPUs `devices`, or without any all that this process sees.
        """
        self.stop()
        address, network = "127.0.0.1", dict[str, str]()
        if self.far:
            address = str(ray.util.get_node_ip_address())
            network = dict.fromkeys(
                ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface_of(address)
            )
        port = free_port(address)
        inherited = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        # not resolved: a virtual environment is told by the link that was followed
        command = [
            str(Path(self.python).absolute()),
            "-m",
            "sglang.launch_server",
            *self.arguments,
            *self._secret(),
        ]
        command += self._fraction(devices)
        command += ["--host", address, "--port", str(port)]
        network |= without_proxy(address)  # a server sends itself requests, with its key
        self._process = start_group(
            command, log=self._log, env=inherited | seen | network | dict(self.environment)
        )
        return f"http://{address}:{port}"

    def _fraction(self, devices: Sequence[str]) -> list[str]:
        """Arguments for its `share`, as the part that it is of what is free now: SGLang takes it of that."""
        query = [
            "nvidia-smi",
            "--query-gpu=memory.total,memory.free",
            "--format=csv,noheader,nounits",
            "-i",
        ]
        try:
            said = (
                ""
                if self.share is None
                else subprocess.check_output([*query, ",".join(devices)], text=True)
            )
        except (OSError, subprocess.CalledProcessError):
            said = ""  # no GPU, or a part of one: the share is of what is free
        least = min(
            (
                float(free) / float(total)
                for total, free in (x.split(",") for x in said.splitlines())
            ),
            default=0,
        )
        return (
            ["--mem-fraction-static", f"{min(_MOST, (self.share or 0) / least):.3f}"]
            if least
            else []
        )

    def _secret(self) -> list[str]:
        """Arguments that name a file with the key, which is not on the command line."""
        if self.key is None:
            return []
        self._log.parent.mkdir(parents=True, exist_ok=True)
        secret = self._log.with_suffix(".key.yaml").absolute()
        secret.unlink(missing_ok=True)
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f'api-key: "{self.key}"\n')
        return ["--config", str(secret)]

    def ended(self) -> str:
        """Why the server is gone, with the end of its log; "" while it runs."""
        if self._process is not None and self._process.poll() is None:
            return ""
        with suppress(OSError):
            last = " ".join(self._log.read_text(errors="replace").split())[-_SHOWN:]
            return f"the server ended; {self._log} says last: {last}"
        return "the server ended"

    def pid(self) -> int | None:
        """The server's process."""
        return self._process.pid if self._process else None

    def stop(self) -> None:
        """End the server and all its processes."""
        if self._process is not None:
            stop_group(self._process)  # politely first: it has shared memory to remove
            self._process = None


def server_arguments(settings: SGLangSettings) -> list[str]:
    """Of `sglang.launch_server`; of further `arguments` true is for a switch, null for none, and a mapping is JSON."""
    fixed: dict[str, object] = {
        "model-path": settings.folder,
        "tp-size": settings.tp,
        "context-length": settings.max_length + _SPARE,
        "max-running-requests": settings.rows,
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "log-level": "warning",
        "incremental-streaming-output": True,  # else each event of a reply has all of it so far
    }
    words: list[str] = []
    for name, value in (fixed | settings.arguments).items():
        if value is None or value is False:
            continue
        given = value if isinstance(value, list | tuple) else [] if value is True else [value]
        words += [
            f"--{name}",
            *(json.dumps(x) if isinstance(x, Mapping) else str(x) for x in given),
        ]
    return words


_LOOK_S = 0.25  # between two looks at a server that starts


@dataclass(eq=False, repr=False)  # its settings have a key
class Replica:
    """A server that answers, starts, or has died; `starts` counts how often it was started.

    `asleep` has the tags of the memory that it has given away; one that is `stale` pauses, without the present weights.
    """

    settings: SGLangSettings
    host: Any = None  # a `Server` in this process, with `gpus`; None for one that somebody else runs, at `url`
    _: KW_ONLY
    # makes Ray actors of a `Server` instead: the first runs it, the others hold its further GPUs
    actors: Callable[[], Sequence[Any]] | None = None
    gpus: Sequence[str] = ()
    seats: Sequence[
        Any
    ] = ()  # its GPUs by name, or by number, where other servers start on them too
    url: str = ""

    def __post_init__(self) -> None:
        self._fellows: Sequence[Any] = ()
        if self.actors is not None:
            self.host, *self._fellows = self.actors()
        self.starts = 0
        self.busy = 0  # completions that it was asked for
        self.ready = self.stale = False
        self.asleep: set[str] = set()
        self._client = self._client_of(self.url, self.settings.key) if self.url else None

    def _client_of(self, url: str, key: str | None) -> SGLangClient:
        connections = self.settings.rows + 8
        return SGLangClient(
            url.rstrip("/"), timeout_s=self.settings.timeout_s, connections=connections, key=key
        )

    @property
    def ours(self) -> bool:
        """Whether the process is ours to start and end."""
        return self.host is not None

    @property
    def client(self) -> SGLangClient:
        """The server's API."""
        assert self._client is not None, "a server is waited for before it is asked"
        return self._client

    async def start(self, room_s: float | None = None) -> None:
        """Start the server, again if it ran before.

        Args:
            room_s: that Ray may look for another node for it; None: as long as it takes.

        Raises:
            NoRoom: it has found none.
        """
        url = (
            self.host.start(self.gpus)
            if self.actors is None
            else await self._start_actor(self.actors, room_s)
        )
        self._client = self._client_of(url, self.settings.own_key)
        self.starts += 1
        self.ready = False
        self.asleep.clear()

    async def _start_actor(self, make: Callable[[], Sequence[Any]], room_s: float | None) -> str:
        try:
            await self.host.pid.remote()
        except ray.exceptions.RayActorError:  # with its node, of which Ray finds another
            self.host, *self._fellows = make()
        try:
            async with asyncio.timeout(room_s):
                devices = [
                    gpu
                    for actor in (self.host, *self._fellows)
                    for gpu in await actor.devices.remote()
                ]
        except TimeoutError:
            raise NoRoom(f"no node has had room for another within {room_s:g} s") from None
        return str(await self.host.start.remote(devices))

    async def wait(self, start_s: float) -> None:
        """Wait until the server is ready, and before it starts for the first time until others on its GPUs are.

        Each sizes its cache by the memory that it finds free.

        Raises:
            EngineError: it ended, with what it said last; or `start_s` have passed.
        """
        async with AsyncExitStack() as turns:
            for seat in sorted(self.seats):
                await turns.enter_async_context(per_loop(("GPU", seat), asyncio.Lock))
            if self._client is None:
                await self.start()
            await self._answering(start_s)
        self.ready = True

    async def _answering(self, start_s: float) -> None:
        deadline = time.monotonic() + start_s
        while not await self.client.up():
            ended = await self.ended()
            if ended and self.ours:
                raise EngineError(f"SGLang: {ended}")
            if time.monotonic() > deadline:
                raise EngineError(f"SGLang at {self.client.url}: not ready within {start_s:g} s")
            await asyncio.sleep(_LOOK_S)

    async def ended(self) -> str:
        """Why the server is gone; "" while its process runs."""
        if self.host is None:
            return f"the server at {self.client.url} is gone, and it is not ours to start"
        if self.actors is None:
            return str(self.host.ended())
        try:
            return str(await self.host.ended.remote())
        except ray.exceptions.RayActorError:
            return f"the server at {self.client.url} is gone with its actor"

    def close(self) -> None:
        """End the server if it is ours; again does nothing."""
        host, self.host = self.host, None
        if host is None:
            return
        if self.actors is None:
            host.stop()
            return
        with suppress(
            ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError
        ):  # ends with its actor
            ray.get(host.stop.remote(), timeout=30)
        for actor in (host, *self._fellows):
            ray.kill(actor)


def owned_replica(settings: SGLangSettings, number: int) -> Replica:
    """A server of our own: where Ray runs in an actor of its own, others for its further GPUs; else in this process."""
    log = str(Path(settings.log).with_suffix(f".{number}.log"))
    words = server_arguments(settings)
    told = (
        settings.python or "",
        words,
        log,
        settings.variables,
        settings.own_key,
        settings.far,
        settings.share,
    )
    server = Server(*told)  # complains here rather than in an actor
    if not ray.is_initialized():
        gpus = settings.gpus[number] if settings.gpus else ()
        return Replica(settings, server, gpus=gpus, seats=gpus if settings.in_turn else ())
    own = slice(number * settings.tp, (number + 1) * settings.tp)
    places = settings.places and settings.places[own]  # of each of its GPUs
    if not places:
        places = [{"num_gpus": 1 if ray.cluster_resources().get("GPU") else 0}] * settings.tp
    made: Any = ray.remote(num_cpus=0)(Server)
    seats = range(own.start, own.stop) if settings.in_turn else ()
    return Replica(
        settings,
        actors=lambda: [made.options(**place).remote(*told) for place in places],
        seats=seats,
    )
