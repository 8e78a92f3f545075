"""The embedded engine in a Ray actor of its own: the client's side and the actor's side."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from rollout.base.errors import EngineError
from rollout.base.processes import Restarts, say
from rollout.engines.embedded.batching import BUSY, Ask, Dispatcher, EmbeddedEngine, Report
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.engines.protocol import Tag, TrainedEngine
from rollout.models.architecture import read_architecture
from rollout.models.fused_weights import AdapterShape
from rollout.models.tensors import checksum, compare, read_tensors
from rollout.sync.memory import memory_path
from rollout.sync.shared import SharedWeights
from rollout.sync.transport import SyncRoute, WeightUpdate

_LOOK_S = 1.0  # between two looks at what has become of an actor
_BUDGET_S = 0.02  # of decoding per call: new requests wait at most this long, or a few times it when none ends


@dataclass(slots=True, kw_only=True)
class Held:
    """The weights of an actor, or one of its adapters, in the halves of shared memory that the trainer writes."""

    file: Path | None  # None: memory of the actor's own
    adapter: AdapterShape | None = None  # None: the weights
    version: int = 0
    half: int | None = (
        None  # the one in use; None: the folder's weights, or an adapter that adds nothing yet
    )

    @property
    def free(self) -> int:
        """The half that the next ones go into."""
        return 0 if self.half is None else 1 - self.half


@dataclass(frozen=True, kw_only=True)
class HostedSettings:
    """Settings of an embedded engine in an actor."""

    max_length: int  # tokens of prompt and reply
    rows: int = 192  # sequences held at once
    threads: int = 1
    deterministic: bool = False  # as in `EmbeddedEngine`
    routing: bool = False  # as there
    bf16: bool = False  # as in `CachedDecoder`
    device: str = "cpu"  # or "cuda", which needs a GPU in `place`
    place: Mapping[str, Any] | None = None  # actor options; None: nothing set aside
    transport: str = "shared"  # how new weights come; "disk" goes through ...
    weights_folder: Path | str | None = (
        None  # ... this folder, which the trainer sees too; None: one in shared memory
    )
    restarts: int = 2  # in an hour
    hang_s: float = 600.0  # that the actor may take for one call


class Host(EmbeddedEngine):
    """The embedded engine in its Ray actor: it decodes, and takes new weights, when it is asked to."""

    def __init__(self, folder: str, held: Sequence[Held], settings: HostedSettings) -> None:
        """Compute from what is `held`, the weights first; if they have no half, they are in the folder."""
        torch.set_num_threads(settings.threads)
        shape = read_architecture(folder)
        self._places = [SharedWeights(own.file, shape, own.adapter) for own in held]
        weights, *adapters = held
        shapes = [own.adapter for own in adapters if own.adapter is not None]
        where = self._places[0].halves, settings.device
        decoder = CachedDecoder(shape, settings.max_length, *where, shapes, settings.bf16)
        if weights.half is None:
            decoder.load(read_tensors(folder))
        else:
            decoder.adopt(weights.half)
        ways = {"deterministic": settings.deterministic, "routing": settings.routing}
        super().__init__(decoder, rows=settings.rows, version=weights.version, **ways)
        self.called = next((place.interrupt for place in self._places if place.file), None)
        for number, own in enumerate(adapters, 1):
            if own.half is not None:
                self._adopt_adapter(number, own.half, own.version)

    def take(
        self, half: int, version: int, checksums: dict[str, str], number: int, folder: str
    ) -> None:
        """Compare the weights in `half` with the trainer's checksums, and compute from them.

        Args:
            number: of the adapter; 0 for the full weights.
            folder: folder to read the weights from; "" if the trainer has written them into `half`.

        Raises:
            EngineError: the weights are of another version, or differ from the trainer's. The engine
                then keeps its present weights.
        """
        shared = self._places[number]
        if folder:
            shared.versions[half] = -1
            shared.halves[half].fill(read_tensors(folder))
            shared.versions[half] = version
        if shared.versions[half] != version:
            raise EngineError(
                f"the shared weights hold version {shared.versions[half]}; expected {version}"
            )
        engine_checksums = {
            name: checksum(tensor) for name, tensor in shared.halves[half].tensors()
        }
        compare(engine_checksums, checksums, version)
        if number:
            self._adopt_adapter(number, half, version)
        else:
            self.adopt(half, version)

    def _adopt_adapter(self, number: int, half: int, version: int) -> None:
        assert self.decoder.adapters is not None
        self.decoder.adapters.put(number, self._places[number].halves[half])
        self._rows.renew(version, number)

    def pid(self) -> int:
        """The actor's process."""
        return os.getpid()

    def counters(self) -> dict[str, float]:
        """`stats` by field name."""
        return asdict(self.stats)


_HOSTS: Any = ray.remote(num_cpus=0)(Host)


class HostedEngine(Dispatcher, TrainedEngine):
    """An engine in a process of its own; Ray must be running.

    Concurrent `generate` calls travel together: each call to the actor brings what is new and takes what is done. An
    actor that dies is started again up to `restarts` times an hour, and so is one that hangs; it goes on with the
    weights in shared memory, and what it was asked is asked again, which gives the same tokens.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        version: int = 0,
        adapters: Sequence[AdapterShape] = (),
        tell: Callable[[str], None] = say,
        **settings: Any,
    ) -> None:
        """Start the actor on the Hugging Face model in `folder`.

        Args:
            version: of the weights in `folder`.
            adapters: on these weights, which then stay as they are (see `AdapterEngine`).
            tell: called with one line when the actor is started again.
            settings: the fields of `HostedSettings`.

        Raises:
            EngineError: Ray is not running, there is no room for the weights, or no model that is computed here. What
                is wrong with its tensors comes with the first call.
        """
        super().__init__()
        if not ray.is_initialized():
            raise EngineError("Ray is not running; call ray.init before making a hosted engine")
        self._settings = HostedSettings(**settings)
        self.version, self.pause_s, self.starts = version, 0.0, 0
        self.exchanges = 0  # calls made to the actor for generations
        self.folder, self._tell = str(folder), tell
        self._restarts = Restarts("engine", self._settings.restarts)
        self._weights_folder = Path(self._settings.weights_folder or memory_path())
        self.transport = (
            self._settings.transport
        )  # whoever places a trainer on another node makes it "disk"
        self._actor = _HOSTS.options(**self._settings.place or {})
        self.held = [Held(file=None if adapters else memory_path(), version=version)]
        self.held += [Held(file=memory_path(), adapter=adapter) for adapter in adapters]
        shape, held = read_architecture(self.folder), enumerate(self.held)
        # what this process maps of it, made before the actor does
        self._shared = {
            n: SharedWeights(own.file, shape, own.adapter, create=True)
            for n, own in held
            if own.file
        }
        self._host: Any = self._start()
        self._closed = False

    def _start(self) -> Any:
        self.starts += 1
        return self._actor.remote(self.folder, self.held, self._settings)

    async def begin_update(self) -> SyncRoute:
        """Return the route to the free half of the shared weights, or to the folder."""
        if self.transport == "shared":
            return await self.route(0)
        return SyncRoute(
            transport=self.transport,
            target=str(self._weights_folder),
            model=self.folder,
            checksums=True,
        )

    async def route(self, number: int) -> SyncRoute:
        """Return the route to the free half of the weights (0), or of an adapter by number."""
        held = self.held[number]
        return SyncRoute(
            transport="shared",
            target=str(held.file),
            model=self.folder,
            adapter=held.adapter,
            half=held.free,
        )

    async def commit_update(self, update: WeightUpdate) -> None:
        self.pause_s = await self.take(update, 0)
        self.version = update.version

    async def take(self, update: WeightUpdate, number: int) -> float:
        """Have the actor compute from new weights (0), or a new adapter by number; how many seconds that took."""
        own, folder = self.held[number], "" if update.transport == "shared" else update.location
        began = time.perf_counter()
        await self._call("take", own.free, update.version, dict(update.checksums), number, folder)
        own.half, own.version = own.free, update.version
        return time.perf_counter() - began

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Give the memory of keys and values and of a GPU's weights back; where the trainer writes, they stay."""
        if not await self.idle():
            raise EngineError(BUSY)
        await self._call("sleep", tags)

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        await self._call("wake", tags)

    async def stats(self) -> dict[str, float]:
        """Counters of the engine since it started: tokens and CPU seconds by kind of work."""
        counters: dict[str, float] = await self._call("counters")
        return counters

    def end(self) -> None:
        """End the actor; what still waits gets an EngineError."""
        self._closed = True
        ray.kill(self._host)

    def close(self) -> None:
        """End the actor and remove the weights on their way to it."""
        self.end()
        for own in self.held:
            if own.file is not None:
                own.file.unlink(missing_ok=True)
        shutil.rmtree(self._weights_folder, ignore_errors=True)

    async def exchange(self, asks: list[Ask], aborts: list[int]) -> list[Report]:
        """What has ended, and News, since the last call; an actor that has died is asked for all that waits again."""
        while True:
            self.exchanges += 1
            starts = self.starts
            self.call_back(0)
            done: list[Report] = await self._call("exchange", asks, aborts, _BUDGET_S, again=False)
            if self.starts == starts:
                return done
            asks, aborts = self.unanswered(), []

    def call_back(self, wanted: int = 1) -> None:
        for shared in self._shared.values():
            shared.interrupt[0] = wanted

    async def _call(self, method: str, *arguments: Any, again: bool = True) -> Any:
        """Call the actor; one that has died, or hangs and is ended, is started again first, as long as it may be.

        Args:
            again: make the call again then; else [] is returned.
        """
        if method != "exchange":
            self.call_back()
        while True:
            host = self._host
            try:
                answer = asyncio.wrap_future(getattr(host, method).remote(*arguments).future())
                if not (await asyncio.wait({answer}, timeout=self._settings.hang_s))[0]:
                    self._tell(
                        f"the engine's actor has not answered for {self._settings.hang_s:g} s"
                    )
                    ray.kill(host)  # so that it can be started again
                return await answer
            except ray.exceptions.RayActorError as error:
                await _end_of(host)
                self._revive(host, error)
                if not again:
                    return []
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                raise cause if isinstance(cause, EngineError) else _failure(error) from error

    def _revive(self, host: Any, error: Exception) -> None:
        if host is not self._host:
            return  # another call was faster
        started = not isinstance(
            error, ray.exceptions.ActorUnschedulableError
        ) and "__init__" not in str(error)
        if self._closed or not started or not self._restarts.take():
            raise _failure(error) from error
        left = self._restarts.remaining
        self._tell(
            f"the engine's actor died; started again with version {self.version}, {left} starts left"
        )
        self._host = self._start()


async def _end_of(host: Any) -> None:
    """Wait until Ray knows what an actor that is out of reach has come to; one that is back is ended.

    Else another would be started on a node that is gone, as long as Ray believes in it.
    """
    with suppress(ray.exceptions.RayActorError):
        while True:
            with suppress(ray.exceptions.ActorUnavailableError):
                await host.pid.remote()
                ray.kill(host)
            await asyncio.sleep(_LOOK_S)


def _failure(error: Exception) -> EngineError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return EngineError(f"the engine's actor failed: {lines[-1] if lines else type(error).__name__}")
