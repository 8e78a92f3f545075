"""The embedded engine in a Ray actor of its own, reached in few, large calls."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rollout.engines.architecture import Architecture
from rollout.engines.local import settle
from rollout.engines.protocol import Completion, EngineError, Sampling, Tag, VersionSpan
from rollout.engines.request import BUSY
from rollout.engines.say import say
from rollout.transports import make_sender
from rollout.transports.handover import Handover, Route
from rollout.transports.manifest import compare
from rollout.transports.memory import fresh_place
from rollout.transports.shared import SharedCheck, SharedWeights

if TYPE_CHECKING:
    from torch import Tensor

_BUDGET_S = 0.02  # of decoding per call: new requests wait at most this long, or a few times it when none ends

Ask = tuple[int, Sequence[int], tuple[Any, ...]]  # request id, prompt ids, Sampling's fields
Answer = tuple[int, str, tuple[Any, ...]]  # request id, error text, Completion's fields
Held = tuple[int, int | None]  # version of the weights, and the shared half they are in; None: they are the folder's


class _Host:
    """What runs inside the actor."""

    def __init__(
        self,
        folder: str,
        file: str,
        max_length: int,
        rows: int,
        held: Held,
        threads: int,
        deterministic: bool,
        device: str,
    ) -> None:
        import torch

        from rollout.engines.architecture import Architecture
        from rollout.engines.decoder import Decoder, read_folder
        from rollout.engines.embedded import EmbeddedEngine

        torch.set_num_threads(threads)
        shape = Architecture.read(Path(folder))
        self._shared = SharedWeights(Path(file), shape)
        decoder = Decoder(shape, max_length, self._shared.halves, device)
        version, half = held
        if half is None:
            decoder.load(read_folder(Path(folder)))
        else:
            decoder.adopt(half)
        self._core = EmbeddedEngine(decoder, rows=rows, version=version, deterministic=deterministic)
        self._check: SharedCheck | None = None  # of the update under way

    def exchange(self, asks: list[Ask], aborts: list[int], budget_s: float) -> list[Answer]:
        """Take new requests and decode for about `budget_s`; longer, but at most five times, while none has ended."""
        for request_id, prompt_ids, fields in asks:
            self._core.submit(request_id, prompt_ids, Sampling(**dict(zip(Sampling.__slots__, fields, strict=True))))
        self._core.abort(aborts)
        try:
            return self._decode(budget_s)
        except Exception:
            self._core.reset()
            raise

    def _decode(self, budget_s: float) -> list[Answer]:
        began = time.monotonic()
        answers: list[Answer] = []
        while self._core.has_work:
            for request_id, outcome in self._core.step():
                if isinstance(outcome, EngineError):
                    answers.append((request_id, str(outcome), ()))
                else:
                    spans = tuple((span.version, span.start, span.end) for span in outcome.versions)
                    reply = (outcome.token_ids, outcome.logprobs, outcome.finish_reason, spans, outcome.cached_tokens)
                    answers.append((request_id, "", reply))
            elapsed = time.monotonic() - began
            if (answers and elapsed >= budget_s) or elapsed >= 5 * budget_s:
                break
        return answers

    def follow(self, half: int) -> None:
        """Take the checksum of every tensor that the trainer writes into `half` as soon as it is there."""
        if self._check is not None:
            self._check.stop()
        self._check = SharedCheck(self._shared, half)

    def adopt(self, half: int, version: int, checksums: dict[str, str]) -> str:
        """Compute from what was written into `half`, and is right; "" or what is wrong with it."""
        if self._shared.versions[half] != version:
            return f"the shared weights hold version {self._shared.versions[half]}; expected {version}"
        try:
            check = self._check if self._check is not None else SharedCheck(self._shared, half)
            self._check = None
            compare(check.finish(), checksums, version)
        except EngineError as error:
            return str(error)
        self._core.adopt(half, version)
        return ""

    def read(self, half: int, place: str, version: int, checksums: dict[str, str]) -> str:
        """Fill `half` from a folder, or with the changes in a file, and adopt it; "" or what is wrong."""
        from rollout.engines.decoder import read_folder
        from rollout.transports.delta import patched

        path, held = Path(place), self._core.decoder.weights.tensors()
        self._shared.versions[half] = -1
        try:
            self._shared.halves[half].fill(
                read_folder(path) if path.is_dir() else patched(held, path, self._core.version)
            )
        except EngineError as error:
            return str(error)
        self._shared.versions[half] = version
        return self.adopt(half, version, checksums)

    def sleep(self, tags: Sequence[Tag]) -> str:
        """Give memory back; "" or why not."""
        try:
            self._core.sleep(tags)
        except EngineError as error:
            return str(error)
        return ""

    def wake(self, tags: Sequence[Tag]) -> None:
        self._core.wake(tags)

    def pid(self) -> int:
        """The actor's process."""
        return os.getpid()

    def stats(self) -> dict[str, float]:
        """The counters of the engine, `rollout.engines.embedded.Stats` by field name."""
        return asdict(self._core.stats)


class HostedEngine:
    """An engine in a process of its own; Ray must be running.

    Concurrent `generate` calls travel together: each call to the actor brings what is new and takes what is done. An
    actor that dies is started again up to `restarts` times; it goes on with the weights in shared memory, and what it
    was asked is asked again, which gives the same tokens.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        max_length: int,
        rows: int = 192,
        version: int = 0,
        threads: int = 1,
        place: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        device: str = "cpu",
        transport: str = "shared",
        weights_folder: Path | str | None = None,
        restarts: int = 2,
        tell: Callable[[str], None] = say,
    ) -> None:
        """Start the actor on the Hugging Face model in `folder`; `place` are actor options, None: nothing set aside.

        Args:
            deterministic: as in `EmbeddedEngine`.
            device: what the actor computes on, `cpu` or `cuda`; the latter needs a GPU in `place`.
            transport: how new weights come: `shared`, or `disk` or `delta` through the folder
                `weights_folder` that the trainer sees too (None: one in shared memory).
            tell: called with one line when the actor is started again.

        Raises:
            EngineError: Ray is not running, or there is no room for the weights. What else is wrong with the folder
                comes with the first call.
        """
        if not ray.is_initialized():
            raise EngineError("Ray is not running; call ray.init before making a hosted engine")
        self.version = version
        self.pause_s = 0.0  # that the last update kept the actor from decoding
        self.starts = 0  # of the actor
        self.resend: Callable[[], Awaitable[None]] | None = None  # not needed: the weights are where they were
        self.exchanges = 0  # calls made to the actor for generations
        self._folder, self._settings = str(folder), (max_length, rows)
        self._computing = (threads, deterministic, device)
        self._transport, self._restarts, self._tell = transport, restarts, tell
        if transport not in ("shared", "disk", "delta"):
            raise EngineError(f"the embedded engine has no transport '{transport}'; known: delta, disk, shared")
        self._weights_folder = Path(weights_folder) if weights_folder else fresh_place()
        self._actor = ray.remote(num_cpus=0)(_Host).options(**place or {})
        self._file = fresh_place()
        self._shared = self._mapped()
        self._half: int | None = None  # the one that the weights are in; None: they are the folder's
        self._free = 0  # the one that the next weights go into
        self._host: Any = self._start()
        self._waiting: dict[int, tuple[Ask, asyncio.Future[Completion]]] = {}
        self._asks: list[Ask] = []
        self._aborts: list[int] = []
        self._ids = itertools.count()
        self._pump: asyncio.Task[None] | None = None
        self._closed = False

    def _mapped(self) -> SharedWeights | None:
        try:
            shape = Architecture.read(Path(self._folder))
        except EngineError:
            return None  # the actor says so with the first call
        return SharedWeights(self._file, shape, create=True)

    def _start(self) -> Any:
        self.starts += 1
        held = (self.version, self._half)
        return self._actor.remote(self._folder, str(self._file), *self._settings, held, *self._computing)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: the request cannot be served, or the actor died more often than it may.
        """
        request_id = next(self._ids)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        ask = (request_id, list(prompt_ids), tuple(getattr(sampling, name) for name in Sampling.__slots__))
        self._waiting[request_id] = (ask, future)
        self._asks.append(ask)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            return await future
        except asyncio.CancelledError:
            self._aborts.append(request_id)
            raise
        finally:
            self._waiting.pop(request_id, None)

    async def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by local tensors, over the engine's own transport.

        Raises:
            EngineError: a tensor is missing, unknown or of another shape (the old weights stay), or the actor has died.
        """
        route = await self.route()
        await self.load_weights_from(make_sender(route).send(tensors, version, route.state))

    async def route(self) -> Route:
        """The half of the shared weights that is free, which the actor watches from now on, or the folder."""
        if self._transport == "shared":
            if self._shared is None:
                await self._call("pid")  # says what is wrong with the folder
            else:
                self._shared.written[self._free] = 0
                self._host.follow.remote(self._free)  # not waited for: what it does not see, `adopt` reads
            state = {"half": self._free}
            return Route(transport="shared", place=str(self._file), model=self._folder, state=state)
        return Route(
            transport=self._transport, place=str(self._weights_folder), model=self._folder, state={"base": self.version}
        )

    async def load_weights_from(self, handover: Handover) -> None:
        """Compute from the weights of `handover` (see `TrainedEngine`).

        Raises:
            EngineError: their bytes are not the trainer's; the old weights stay.
        """
        began = time.perf_counter()
        sums = dict(handover.checksums)
        if handover.transport == "shared":
            problem = await self._call("adopt", self._free, handover.version, sums)
        else:
            problem = await self._call("read", self._free, handover.place, handover.version, sums)
        self.pause_s = time.perf_counter() - began
        if problem:
            raise EngineError(problem)
        self._half, self._free = self._free, 1 - self._free
        self.version = handover.version

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Give the memory of keys and values and of a GPU's weights back; where the trainer writes, they stay.

        Raises:
            EngineError: requests are running.
        """
        if self._pump is not None and not self._pump.done() and not self._waiting:
            await asyncio.wait([self._pump])  # until the actor has heard of the last aborts
        problem = BUSY if self._waiting else await self._call("sleep", tags)
        if problem:
            raise EngineError(problem)

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Have room for keys and values, and the weights, again."""
        await self._call("wake", tags)

    async def stats(self) -> dict[str, float]:
        """Counters of the engine since it started: tokens and CPU seconds by kind of work."""
        counters: dict[str, float] = await self._call("stats")
        return counters

    def close(self) -> None:
        """End the actor and remove the shared weights; what still waits gets an EngineError."""
        self._closed = True
        ray.kill(self._host)
        self._file.unlink(missing_ok=True)
        shutil.rmtree(self._weights_folder, ignore_errors=True)

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call the actor; one that has died is started again first, as long as it may be."""
        while True:
            host = self._host
            try:
                return await getattr(host, method).remote(*arguments)
            except ray.exceptions.RayActorError as error:
                self._revive(host, error)
                if method == "exchange":
                    self._asks.clear()  # they are among those that wait
                    arguments = ([ask for ask, _ in self._waiting.values()], [], *arguments[2:])
            except ray.exceptions.RayError as error:
                raise EngineError(f"the engine's actor failed: {_reason(error)}") from error

    def _revive(self, host: Any, error: Exception) -> None:
        if host is not self._host:
            return  # another call was faster
        started = not isinstance(error, ray.exceptions.ActorUnschedulableError) and "__init__" not in str(error)
        if self._closed or not started or not self._restarts:
            raise EngineError(f"the engine's actor failed: {_reason(error)}") from error
        self._restarts -= 1
        self._tell(f"the engine's actor died; started again with version {self.version}, {self._restarts} starts left")
        self._host = self._start()

    async def _run(self) -> None:
        try:
            while self._waiting or self._aborts:
                asks, self._asks = self._asks, []
                aborts, self._aborts = self._aborts, []
                self.exchanges += 1
                for request_id, problem, fields in await self._call("exchange", asks, aborts, _BUDGET_S):
                    outcome = EngineError(problem) if problem else _completion(*fields)
                    settle(self._waiting[request_id][1] if request_id in self._waiting else None, outcome)
                await asyncio.sleep(0)  # whoever got an answer may now ask again
                self._waiting = {key: entry for key, entry in self._waiting.items() if not entry[1].done()}
        except EngineError as error:
            self._asks.clear()
            for _, future in self._waiting.values():
                settle(future, error)


def _completion(
    token_ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    reason: str,
    spans: tuple[tuple[int, int, int], ...],
    cached: int,
) -> Completion:
    versions = tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans)
    return Completion(
        token_ids=token_ids, logprobs=logprobs, finish_reason=reason, versions=versions, cached_tokens=cached
    )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
