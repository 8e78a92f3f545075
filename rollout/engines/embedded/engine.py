"""The embedded engine in a Ray actor of its own: the client's side and the actor's side."""

from __future__ import annotations

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

from mcore_mas.rollout.base.errors import EngineError
from mcore_mas.rollout.base.files import memory_path
from mcore_mas.rollout.base.processes import Restarts, say
from mcore_mas.rollout.engines import BUSY, TRANSPORTS, Tag, TrainedEngine
from mcore_mas.rollout.engines.embedded.batching import Ask, Dispatcher, EmbeddedEngine, Report
from mcore_mas.rollout.engines.embedded.decoder import CachedDecoder
from mcore_mas.rollout.models.architecture import read_architecture
from mcore_mas.rollout.models.fused_weights import AdapterShape
from mcore_mas.rollout.models.tensors import compare, read_tensors
from mcore_mas.rollout.sync import SyncRoute, WeightUpdate
from mcore_mas.rollout.sync.disk import patched
from mcore_mas.rollout.sync.shared import SharedCheck, SharedWeights

_LOOK_S = 1.0  # between two looks at what has become of an actor
_BUDGET_S = 0.02  # of decoding per call: new requests wait at most this long, or a few times it when none ends

Held = tuple[int, int | None]  # version of the weights, and the shared half they are in; None: they are the folder's


@dataclass(slots=True, kw_only=True)
class HeldAdapter:
    """An adapter of an actor's, in shared memory."""

    shape: AdapterShape
    file: Path
    version: int = 0
    half: int | None = None  # the one it is in; None: it has no weights yet, and adds nothing


class ActorDied(EngineError):
    """An engine's actor is gone and is not started again; `at_start`, it never was there."""

    at_start = False


@dataclass(frozen=True, kw_only=True)
class HostedSettings:
    """Settings of an embedded engine in an actor.

    Raises:
        EngineError: no such transport.
    """

    max_length: int  # tokens of prompt and reply
    rows: int = 192  # sequences held at once
    threads: int = 1
    deterministic: bool = False  # as in `EmbeddedEngine`
    device: str = "cpu"  # or "cuda", which needs a GPU in `place`
    place: Mapping[str, Any] | None = None  # actor options; None: nothing set aside
    transport: str = "shared"  # how new weights come; "disk" and "delta" go through ...
    weights_folder: Path | str | None = None  # ... this folder, which the trainer sees too; None: one in shared memory
    far: bool = False  # its actor is on another node: nothing is mapped here, and new weights come through the folder
    restarts: int = 2  # in an hour
    hang_s: float = 600.0  # that the actor may take for one call

    def __post_init__(self) -> None:
        """Check the transport."""
        known = sorted(TRANSPORTS["embedded"])
        if self.transport not in known:
            raise EngineError(f"the embedded engine has no transport '{self.transport}'; known: {', '.join(known)}")
        if self.far and (self.transport != "disk" or self.weights_folder is None):
            raise EngineError("an engine on another node takes its weights by transport disk, in a folder both see")


class Host(EmbeddedEngine):
    """The embedded engine in its Ray actor: it decodes, and takes new weights, when it is asked to."""

    def __init__(
        self,
        folder: str,
        file: Path | None,
        held: Held,
        settings: HostedSettings,
        source: str = "",
        adapters: Sequence[HeldAdapter] = (),
    ) -> None:
        torch.set_num_threads(settings.threads)
        shape = read_architecture(folder)
        self._places = [SharedWeights(file, shape)]  # of the weights, and of each adapter
        self._checks: dict[int, SharedCheck] = {}  # of updates under way, by place
        shapes = [adapter.shape for adapter in adapters]
        decoder = CachedDecoder(shape, settings.max_length, self._places[0].halves, settings.device, shapes)
        version, half = held
        if half is None:
            decoder.load(read_tensors(source or folder))
        else:
            decoder.adopt(half)
        super().__init__(decoder, rows=settings.rows, version=version, deterministic=settings.deterministic)
        for number, adapter in enumerate(adapters, 1):
            self._places.append(SharedWeights(adapter.file, shape, adapter.shape))
            if adapter.half is not None:
                self._adopt_adapter(number, adapter.half, adapter.version)

    def follow(self, half: int, adapter: int = 0) -> None:
        """Take the checksum of every tensor that the trainer writes into `half` as soon as it is there."""
        if adapter in self._checks:
            self._checks[adapter].stop()
        self._checks[adapter] = SharedCheck(self._places[adapter], half)

    def take(self, half: int, version: int, checksums: dict[str, str], adapter: int = 0) -> None:
        """Compute from what was written into `half`, of the weights or of an adapter by number.

        Raises:
            EngineError: it is not what the trainer has.
        """
        place = self._places[adapter]
        if place.versions[half] != version:
            raise EngineError(f"the shared weights hold version {place.versions[half]}; expected {version}")
        check = self._checks.pop(adapter, None) or SharedCheck(place, half)
        compare(check.finish(), checksums, version)
        if adapter:
            self._adopt_adapter(adapter, half, version)
        else:
            self.adopt(half, version)

    def _adopt_adapter(self, number: int, half: int, version: int) -> None:
        assert self.decoder.adapters is not None
        self.decoder.adapters.put(number, self._places[number].halves[half])
        self._rows.renew(version, number)

    def read(self, place: str, version: int, checksums: dict[str, str]) -> None:
        """Fill the half that is free from a folder, or with its changes to what is held, and `take` it."""
        held, half = self.decoder.weights.tensors(), 1 - self.decoder.half
        shared = self._places[0]
        shared.versions[half] = -1
        shared.halves[half].fill(patched(held, Path(place), self.version))
        shared.versions[half] = version
        self.take(half, version, checksums)

    def pid(self) -> int:
        """The actor's process."""
        return os.getpid()

    def counters(self) -> dict[str, float]:
        """`stats` by field name."""
        return asdict(self.stats)


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
        source: str = "",
        adapters: Sequence[AdapterShape] = (),
        tell: Callable[[str], None] = say,
        **settings: Any,
    ) -> None:
        """Start the actor on the Hugging Face model in `folder`.

        Args:
            version: of the weights in `folder`, or in `source`.
            source: folder with weights in place of the model's.
            adapters: on these weights, which then stay as they are (see `AdapterEngine`).
            tell: called with one line when the actor is started again.
            settings: the fields of `HostedSettings`.

        Raises:
            EngineError: Ray is not running, or there is no room for the weights. What else is wrong with the folder
                comes with the first call.
        """
        super().__init__()
        if not ray.is_initialized():
            raise EngineError("Ray is not running; call ray.init before making a hosted engine")
        self._settings = HostedSettings(**settings)
        self.version = version
        self.pause_s = 0.0  # that the last update kept the actor from decoding
        self.starts = 0  # of the actor
        self.exchanges = 0  # calls made to the actor for generations
        self.folder, self._tell = str(folder), tell
        self._restarts = Restarts("engine", self._settings.restarts)
        self._weights_folder = Path(self._settings.weights_folder or memory_path())
        self.transport = self._settings.transport  # whoever places a trainer on another node makes it "disk"
        self._actor = ray.remote(num_cpus=0)(Host).options(**self._settings.place or {})
        self._file = None if self._settings.far or adapters else memory_path()
        self._shared = self._mapped() if self._file else None
        self._source = source or self.folder  # what an actor reads that does not find its weights in shared memory
        self._half: int | None = None  # the one that the weights are in; None: they are the folder's
        self._free = 0  # the one that the next weights go into
        self.adapters = [HeldAdapter(shape=adapter, file=memory_path()) for adapter in adapters]
        for own in self.adapters:  # before the actor maps it
            SharedWeights(own.file, read_architecture(self.folder), own.shape, create=True)
        self._host: Any = self._start()
        self._closed = False

    def _mapped(self) -> SharedWeights | None:
        try:
            shape = read_architecture(self.folder)
        except EngineError:
            return None  # the actor says so with the first call
        return SharedWeights(self._file, shape, create=True)

    def _start(self) -> Any:
        self.starts += 1
        held = (self.version, self._half)
        return self._actor.remote(self.folder, self._file, held, self._settings, self._source, self.adapters)

    async def begin_update(self) -> SyncRoute:
        """The half of the shared weights that is free, which the actor watches from now on, or the folder."""
        if self.transport == "shared":
            if self._shared is None:
                await self._call("pid")  # says what is wrong with the folder
            else:
                self._shared.written[self._free] = 0
                self.follow(self._free)
            state = {"half": self._free}
            return SyncRoute(transport="shared", place=str(self._file), model=self.folder, state=state)
        place, state = str(self._weights_folder), {"base": self.version}
        return SyncRoute(transport=self.transport, place=place, model=self.folder, state=state)

    async def commit_update(self, update: WeightUpdate) -> None:
        """Compute from the weights of `update` (see `TrainedEngine`).

        Raises:
            EngineError: their bytes are not the trainer's; the old weights stay.
        """
        began = time.perf_counter()
        try:
            if update.transport == "shared":
                await self.take(self._free, update)
            else:
                await self._call("read", update.place, update.version, dict(update.checksums))
        finally:
            self.pause_s = time.perf_counter() - began
        self._half, self._free = self._free, 1 - self._free
        self.version = update.version

    def follow(self, half: int, adapter: int = 0) -> None:
        """Have the actor take checksums of what is written into a half; not waited for: `take` reads what it misses."""
        self._host.follow.remote(half, adapter)

    async def take(self, half: int, update: WeightUpdate, adapter: int = 0) -> None:
        """Have the actor compute from a half.

        Raises:
            EngineError: its bytes are not the trainer's.
        """
        await self._call("take", half, update.version, dict(update.checksums), adapter)

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Give the memory of keys and values and of a GPU's weights back; where the trainer writes, they stay.

        Raises:
            EngineError: requests are running.
        """
        if not await self.idle():
            raise EngineError(BUSY)
        await self._call("sleep", tags)

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Have room for keys and values, and the weights, again."""
        await self._call("wake", tags)

    async def stats(self) -> dict[str, float]:
        """Counters of the engine since it started: tokens and CPU seconds by kind of work."""
        counters: dict[str, float] = await self._call("counters")
        return counters

    @property
    def waiting(self) -> int:
        """How many completions it is asked for."""
        return len(self._waiting)

    def end(self) -> None:
        """End the actor; what still waits gets an EngineError."""
        self._closed = True
        ray.kill(self._host)

    def close(self) -> None:
        """End the actor and remove the weights on their way to it."""
        self.end()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        for own in self.adapters:
            own.file.unlink(missing_ok=True)
        shutil.rmtree(self._weights_folder, ignore_errors=True)

    async def exchange(self, asks: list[Ask], aborts: list[int]) -> list[Report]:
        """What has ended, and News, since the last call; an actor that has died is asked for all that waits again."""
        while True:
            self.exchanges += 1
            starts = self.starts
            done: list[Report] = await self._call("exchange", asks, aborts, _BUDGET_S, again=False)
            if self.starts == starts:
                return done
            asks, aborts = self.unanswered(), []

    async def _call(self, method: str, *arguments: Any, again: bool = True) -> Any:
        """Call the actor; one that has died is started again first, as long as it may be.

        Args:
            again: make the call again then; else [] is returned.
        """
        while True:
            host = self._host
            try:
                return await self._answer(host, getattr(host, method).remote(*arguments))
            except ray.exceptions.RayActorError as error:
                await _end_of(host)
                self._revive(host, error)
                if not again:
                    return []
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                raise cause if isinstance(cause, EngineError) else _failure(error) from error

    async def _answer(self, host: Any, call: Any) -> Any:
        """What the actor answers; one that hangs is ended, so that it can be started again."""
        answer = asyncio.wrap_future(call.future())
        if not (await asyncio.wait({answer}, timeout=self._settings.hang_s))[0]:
            self._tell(f"the engine's actor has not answered for {self._settings.hang_s:g} s")
            ray.kill(host)
        return await answer

    def _revive(self, host: Any, error: Exception) -> None:
        if host is not self._host:
            return  # another call was faster
        started = not isinstance(error, ray.exceptions.ActorUnschedulableError) and "__init__" not in str(error)
        if self._closed or not started or not self._restarts.take():
            died = ActorDied(str(_failure(error)))
            died.at_start = not started
            raise died from error
        left = self._restarts.left
        self._tell(f"the engine's actor died; started again with version {self.version}, {left} starts left")
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
