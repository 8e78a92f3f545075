"""Client's side of an embedded engine that runs in a Ray actor."""

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from rollout.base.errors import EngineError
from rollout.base.restarts import Restarts
from rollout.base.terminal import say
from rollout.engines.embedded.batching import BUSY
from rollout.engines.embedded.dispatcher import Dispatcher
from rollout.engines.embedded.host import EngineActor, WeightSlot
from rollout.engines.embedded.requests import Report, Request
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.engines.protocol import ScoredReply, Tag, TrainedEngine
from rollout.models.adapter_weights import AdapterShape
from rollout.models.architecture import read_architecture
from rollout.sync.memory import memory_path
from rollout.sync.shared import SharedWeights
from rollout.sync.transport import SyncRoute, WeightUpdate

_POLL_S = 1.0  # pause between two calls to an actor that cannot be reached

# Seconds that one call to the actor decodes. While no request ends it decodes for longer, until a new
# request, an abort or another call interrupts it (see `EmbeddedEngine.exchange`).
_EXCHANGE_S = 0.02


_ENGINE_ACTOR: Any = ray.remote(num_cpus=0)(EngineActor)


class HostedEngine(Dispatcher, TrainedEngine):
    """Embedded engine in a Ray actor; Ray must be running.

    Concurrent calls of `generate` share the calls to the actor. Each call to the actor sends the new
    requests and returns the replies that have ended.

    An actor that dies or hangs is started again, up to `restarts` times an hour. It continues with
    the weights in shared memory, and samples all open requests again with the same seeds.

    Attributes:
        exchanges: number of calls to the actor's `exchange`.
        slots: weights that are updated separately: those of the model, and then each adapter.
        transport: weight transport. A run sets it to "disk" if the trainer is on another node.
    """

    def __init__(
        self,
        settings: EmbeddedSettings,
        *,
        adapters: Sequence[AdapterShape] = (),
        tell: Callable[[str], None] = say,
    ) -> None:
        """Start the actor.

        Args:
            adapters: shapes of the adapters; with any, the model's own weights are frozen.
            tell: called with one line when the actor hangs or is started again.

        Raises:
            EngineError: Ray is not running, there is not enough shared memory, or the model is not
                one that this engine supports. Errors in its tensors come with the first call.
        """
        super().__init__()
        if not ray.is_initialized():
            raise EngineError("Ray is not running; call ray.init before making a hosted engine")
        self.version = settings.version
        self.pause_s = 0.0
        self.starts = 0
        self.exchanges = 0
        self.transport = settings.transport
        self._settings = settings
        self._tell = tell
        self._restarts = Restarts("engine", settings.restarts)
        self._weights_folder = Path(settings.weights_folder or memory_path())
        self._closed = False

        file = None if adapters else memory_path()  # frozen weights are not shared with a trainer
        self.slots = [WeightSlot(file=file, version=settings.version)]
        self.slots += [WeightSlot(file=memory_path(), adapter=adapter) for adapter in adapters]
        architecture = read_architecture(settings.folder)
        self._shared = [
            SharedWeights(slot.file, architecture, slot.adapter, create=True)
            for slot in self.slots
            if slot.file is not None
        ]
        self._actor: Any = self._start_actor()

    def _start_actor(self) -> Any:
        """Start an actor, which loads the present weights of `slots`."""
        self.starts += 1
        options = self._settings.placement or {}
        return _ENGINE_ACTOR.options(**options).remote(self._settings, self.slots)

    async def begin_update(self) -> SyncRoute:
        """Return the route to the free half of the shared buffer, or to the weights folder."""
        if self.transport == "shared":
            return self._shared_route(0)
        return SyncRoute(
            transport=self.transport,
            target=str(self._weights_folder),
            model=str(self._settings.folder),
            checksums=True,
        )

    async def commit_update(self, update: WeightUpdate) -> None:
        """Have the actor compute from new weights; see `TrainedEngine`."""
        self.pause_s = await self._commit(update, 0)
        self.version = update.version

    async def adapter_route(self, number: int) -> SyncRoute:
        """Return the route to the free half of an adapter's buffer."""
        return self._shared_route(number)

    async def commit_adapter(self, update: WeightUpdate, number: int) -> float:
        """Have the actor use an adapter's new weights; return the seconds of the pause."""
        return await self._commit(update, number)

    def _shared_route(self, number: int) -> SyncRoute:
        """Return the route to the free half of the buffer of slot `number`."""
        slot = self.slots[number]
        return SyncRoute(
            transport="shared",
            target=str(slot.file),
            model=str(self._settings.folder),
            adapter=slot.adapter,
            half=slot.free_half,
        )

    async def _commit(self, update: WeightUpdate, number: int) -> float:
        """Have the actor use the new weights of slot `number`; return the seconds of the pause."""
        slot = self.slots[number]
        half = slot.free_half
        folder = "" if update.transport == "shared" else update.location
        began = time.perf_counter()
        await self.call("commit", half, update.version, dict(update.checksums), number, folder)
        slot.half = half
        slot.version = update.version
        return time.perf_counter() - began

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Free the memory that `tags` name, but not the shared weights; see `EmbeddedEngine.sleep`.

        Raises:
            EngineError: requests are running.
        """
        if not await self.idle():
            raise EngineError(BUSY)
        await self.call("sleep", tags)

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Allocate again what `sleep` has freed; see `EmbeddedEngine.wake`."""
        await self.call("wake", tags)

    async def score(self, replies: Sequence[ScoredReply], adapter: int = 0) -> list[list[float]]:
        """Return the log-probabilities of replies; see `EmbeddedEngine.score`."""
        scores: list[list[float]] = await self.call("score", list(replies), adapter)
        return scores

    async def stats(self) -> dict[str, float]:
        """Return the engine's `Stats` since its actor started, by field name."""
        counters: dict[str, float] = await self.call("counters")
        return counters

    def end(self) -> None:
        """End the actor; open requests get an EngineError."""
        self._closed = True
        ray.kill(self._actor)

    def close(self) -> None:
        """End the actor; remove its weights from shared memory, and the weights folder."""
        self.end()
        for slot in self.slots:
            if slot.file is not None:
                slot.file.unlink(missing_ok=True)
        shutil.rmtree(self._weights_folder, ignore_errors=True)

    async def exchange(self, requests: list[Request], aborts: list[int]) -> list[Report]:
        """Exchange requests and reports with the actor; see `Dispatcher`.

        An actor that was started again gets all open requests.
        """
        while True:
            self.exchanges += 1
            starts = self.starts
            self._set_interrupt(0)
            reports: list[Report] | None = await self._call_once(
                "exchange", requests, aborts, _EXCHANGE_S
            )
            if reports is not None and self.starts == starts:
                return reports
            # The actor was lost, by this call or by another, and with it all requests.
            requests = self.open_requests()
            aborts = []

    def interrupt_exchange(self) -> None:
        """Set the flag in shared memory that ends a running exchange soon; see `Dispatcher`."""
        self._set_interrupt(1)

    def _set_interrupt(self, value: int) -> None:
        for shared in self._shared:
            shared.interrupt[0] = value

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the actor; if it dies or hangs, start it again and repeat the call."""
        self.interrupt_exchange()
        while True:
            starts = self.starts
            answer = await self._call_once(method, *arguments)
            if self.starts == starts:  # otherwise the actor was lost, and a new one was started
                return answer

    async def _call_once(self, method: str, *arguments: Any) -> Any:
        """Call the actor and return its answer. If it dies or hangs, start it again and return None.

        Raises:
            EngineError: the actor raised an error, or has died and no restart is left.
        """
        actor = self._actor
        future = asyncio.wrap_future(getattr(actor, method).remote(*arguments).future())
        try:
            await asyncio.wait({future}, timeout=self._settings.hang_s)
            if not future.done():
                self._tell(f"the engine's actor has not answered for {self._settings.hang_s:g} s")
                ray.kill(actor)  # the call then fails, and the actor is started again
            return await future
        except ray.exceptions.RayActorError as error:
            await _wait_until_dead(actor)
            self._restart(actor, error)
            return None
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, EngineError):
                raise cause from error
            raise _actor_error(error) from error

    def _restart(self, actor: Any, error: Exception) -> None:
        """Start a new actor in place of a dead one; raise EngineError if that is not possible."""
        if actor is not self._actor:
            return  # another call has started it already
        never_scheduled = isinstance(error, ray.exceptions.ActorUnschedulableError)
        # Ray's message names the constructor if that failed; it would fail again.
        never_started = never_scheduled or "__init__" in str(error)
        if self._closed or never_started or not self._restarts.take():
            raise _actor_error(error) from error
        self._tell(
            f"the engine's actor died; started again with version {self.version}, "
            f"{self._restarts.remaining} starts left"
        )
        self._actor = self._start_actor()


async def _wait_until_dead(actor: Any) -> None:
    """Wait until Ray knows that an actor is dead; kill the actor if it answers again.

    As long as Ray does not know that a node is lost, it may place a new actor there.
    """
    while True:
        try:
            await actor.pid.remote()
            ray.kill(actor)
        except ray.exceptions.ActorUnavailableError:
            pass  # it cannot be reached now, but may not be dead
        except ray.exceptions.RayActorError:
            return  # it is dead
        await asyncio.sleep(_POLL_S)


def _actor_error(error: Exception) -> EngineError:
    """Return an EngineError with the last line of Ray's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return EngineError(f"the engine's actor failed: {lines[-1] if lines else type(error).__name__}")
