"""The embedded engine behind the asynchronous protocol: in this process, or in a Ray actor of its own."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rollout.base.errors import EngineError
from rollout.base.files import memory_path
from rollout.base.processes import say
from rollout.engines import BUSY, Tag
from rollout.engines.embedded.batching import Ask, EmbeddedEngine, Outcome
from rollout.engines.embedded.host import Host, HostedSettings
from rollout.models.architecture import read_architecture
from rollout.records.completion import Completion, Sampling
from rollout.sync import SyncRoute, WeightUpdate, make_sender
from rollout.sync.shared import SharedWeights

if TYPE_CHECKING:
    from torch import Tensor

_BUDGET_S = 0.02  # of decoding per call: new requests wait at most this long, or a few times it when none ends

Exchange = Callable[[list[Ask], list[int]], Awaitable[list[tuple[int, Outcome]]]]  # (new, aborted) -> what has ended


class Dispatcher:
    """Dispatch loop: concurrent `generate` calls go to an engine together, and get their outcomes as they end."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._waiting: dict[int, tuple[Ask, asyncio.Future[Completion]]] = {}
        self._new: list[Ask] = []
        self._aborts: list[int] = []
        self._ids = itertools.count()
        self._loop: asyncio.Task[None] | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: the request cannot be served, or the engine broke.
        """
        request_id = next(self._ids)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        ask = (request_id, list(prompt_ids), sampling)
        self._waiting[request_id] = (ask, future)
        self._new.append(ask)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        try:
            return await future
        except asyncio.CancelledError:
            self._aborts.append(request_id)
            raise
        finally:
            self._waiting.pop(request_id, None)

    def unanswered(self) -> list[Ask]:
        """All requests that wait, to be asked again of an engine that lost them."""
        self._new.clear()
        return [ask for ask, _ in self._waiting.values()]

    async def idle(self) -> bool:
        """Whether nothing waits; the engine has then heard of the last aborts."""
        if self._loop is not None and not self._loop.done() and not self._waiting:
            await asyncio.wait([self._loop])
        return not self._waiting

    async def _run(self) -> None:
        try:
            while self._waiting or self._aborts:
                asks, self._new = self._new, []
                aborts, self._aborts = self._aborts, []
                for request_id, outcome in await self._exchange(asks, aborts):
                    if request_id in self._waiting:
                        _settle(self._waiting[request_id][1], outcome)
                await asyncio.sleep(0)  # whoever got an answer leaves, and may ask again
        except Exception as error:  # nobody awaits this task: whatever broke must reach those who wait
            known = isinstance(error, EngineError)
            failure = error if known else EngineError(f"the engine failed: {type(error).__name__}: {error}")
            self._new.clear()
            for _, future in self._waiting.values():
                _settle(future, failure)
            if not known:
                raise


def _settle(future: asyncio.Future[Completion], outcome: Completion | Exception) -> None:
    """Give a waiting call its outcome, unless it has gone."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class LocalEngine:
    """Runs an `EmbeddedEngine` on the event loop's thread, one step at a time between other coroutines."""

    def __init__(self, folder: Path | str, *, max_length: int, version: int = 0, **settings: Any) -> None:
        """Load the Hugging Face model in `folder`; the settings are those of `EmbeddedEngine.from_folder`."""
        self.core = EmbeddedEngine.from_folder(folder, max_length=max_length, version=version, **settings)
        self._dispatcher = Dispatcher(self.exchange)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion; concurrent calls are batched.

        Raises:
            EngineError: the request cannot be served (too long, bad token ids or sampling).
        """
        return await self._dispatcher.generate(prompt_ids, sampling)

    async def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; running generations go on with the new ones.

        Raises:
            EngineError: a tensor is missing, unknown or of another shape; the old weights stay.
        """
        self.core.load_weights(tensors, version)

    async def exchange(self, asks: list[Ask], aborts: list[int]) -> list[tuple[int, Outcome]]:
        """One step of the engine, with what is new and what is not wanted any more."""
        return self.core.exchange(asks, aborts)


class HostedEngine:
    """An engine in a process of its own; Ray must be running.

    Concurrent `generate` calls travel together: each call to the actor brings what is new and takes what is done. An
    actor that dies is started again up to `restarts` times; it goes on with the weights in shared memory, and what it
    was asked is asked again, which gives the same tokens.
    """

    def __init__(
        self, folder: Path | str, *, version: int = 0, tell: Callable[[str], None] = say, **settings: Any
    ) -> None:
        """Start the actor on the Hugging Face model in `folder`.

        Args:
            version: of the weights in `folder`.
            tell: called with one line when the actor is started again.
            settings: the fields of `HostedSettings`.

        Raises:
            EngineError: Ray is not running, or there is no room for the weights. What else is wrong with the folder
                comes with the first call.
        """
        if not ray.is_initialized():
            raise EngineError("Ray is not running; call ray.init before making a hosted engine")
        self._settings = HostedSettings(**settings)
        self.version = version
        self.pause_s = 0.0  # that the last update kept the actor from decoding
        self.starts = 0  # of the actor
        self.exchanges = 0  # calls made to the actor for generations
        self._folder, self._restarts, self._tell = str(folder), self._settings.restarts, tell
        self._weights_folder = Path(self._settings.weights_folder or memory_path())
        self._actor = ray.remote(num_cpus=0)(Host).options(**self._settings.place or {})
        self._file = memory_path()
        self._shared = self._mapped()
        self._half: int | None = None  # the one that the weights are in; None: they are the folder's
        self._free = 0  # the one that the next weights go into
        self._host: Any = self._start()
        self._dispatcher = Dispatcher(self._exchange)
        self._closed = False

    def _mapped(self) -> SharedWeights | None:
        try:
            shape = read_architecture(self._folder, dense=True)
        except EngineError:
            return None  # the actor says so with the first call
        return SharedWeights(self._file, shape, create=True)

    def _start(self) -> Any:
        self.starts += 1
        return self._actor.remote(self._folder, str(self._file), (self.version, self._half), self._settings)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: the request cannot be served, or the actor died more often than it may.
        """
        return await self._dispatcher.generate(prompt_ids, sampling)

    async def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by local tensors, over the engine's own transport.

        Raises:
            EngineError: a tensor is missing, unknown or of another shape (the old weights stay), or the actor has died.
        """
        route = await self.begin_update()
        await self.commit_update(make_sender(route).send(tensors, version, route.state))

    async def begin_update(self) -> SyncRoute:
        """The half of the shared weights that is free, which the actor watches from now on, or the folder."""
        if self._settings.transport == "shared":
            if self._shared is None:
                await self._call("pid")  # says what is wrong with the folder
            else:
                self._shared.written[self._free] = 0
                self._host.follow.remote(self._free)  # not waited for: what it does not see, `adopt` reads
            state = {"half": self._free}
            return SyncRoute(transport="shared", place=str(self._file), model=self._folder, state=state)
        place, state = str(self._weights_folder), {"base": self.version}
        return SyncRoute(transport=self._settings.transport, place=place, model=self._folder, state=state)

    async def commit_update(self, update: WeightUpdate) -> None:
        """Compute from the weights of `update` (see `TrainedEngine`).

        Raises:
            EngineError: their bytes are not the trainer's; the old weights stay.
        """
        began = time.perf_counter()
        sums = dict(update.checksums)
        if update.transport == "shared":
            problem = await self._call("adopt", self._free, update.version, sums)
        else:
            problem = await self._call("read", self._free, update.place, update.version, sums)
        self.pause_s = time.perf_counter() - began
        if problem:
            raise EngineError(problem)
        self._half, self._free = self._free, 1 - self._free
        self.version = update.version

    def abort_update(self, error: Exception) -> None:
        """Nothing waits for an update: the old weights are served until it is there."""

    async def weights_lost(self) -> None:
        """Never: an actor that is started again finds its weights where they were."""
        await asyncio.Event().wait()

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Give the memory of keys and values and of a GPU's weights back; where the trainer writes, they stay.

        Raises:
            EngineError: requests are running.
        """
        problem = await self._call("sleep", tags) if await self._dispatcher.idle() else BUSY
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

    async def _exchange(self, asks: list[Ask], aborts: list[int]) -> list[tuple[int, Outcome]]:
        """What has ended since the last call; an actor that has died is asked for all that waits again."""
        while True:
            self.exchanges += 1
            starts = self.starts
            done: list[tuple[int, Outcome]] = await self._call("exchange", asks, aborts, _BUDGET_S, again=False)
            if self.starts == starts:
                return done
            asks, aborts = self._dispatcher.unanswered(), []

    async def _call(self, method: str, *arguments: Any, again: bool = True) -> Any:
        """Call the actor; one that has died is started again first, as long as it may be.

        Args:
            again: make the call again then; else [] is returned.
        """
        while True:
            host = self._host
            try:
                return await getattr(host, method).remote(*arguments)
            except ray.exceptions.RayActorError as error:
                self._revive(host, error)
                if not again:
                    return []
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


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
