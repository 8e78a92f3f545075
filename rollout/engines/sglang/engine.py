"""A policy's SGLang servers as one engine: routing, completions, updates of weights, restarts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engines import TRANSPORTS
from rollout.engines.protocol import Completion, EngineError, Sampling, Tag
from rollout.engines.request import problem_of
from rollout.engines.say import say
from rollout.engines.sglang.body import body_of, completion_of
from rollout.engines.sglang.client import Lost
from rollout.engines.sglang.replica import Replica, attached, owned
from rollout.transports import make_sender
from rollout.transports.handover import Handover, Route
from rollout.transports.manifest import compare
from rollout.transports.memory import fresh_place

if TYPE_CHECKING:
    from torch import Tensor

_PUSHED = ("tensor", "distributed")  # written into the servers while they pause


class SGLangEngine:
    """Serves one policy from `replicas` SGLang servers, or from those that run at `urls`.

    A server that dies is started again, up to `restarts` times in all, and gets the present weights before it answers.
    Requests of one session go to one replica. SGLang draws with a request's seed only if its deterministic inference
    is on (`options: {enable-deterministic-inference: true}`); otherwise seeds are not sent.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        max_length: int,
        rows: int = 192,
        version: int = 0,
        threads: int = 1,
        python: str | None = None,
        urls: Sequence[str] = (),
        key: str | None = None,
        replicas: int = 1,
        tp: int = 1,
        transport: str = "disk",
        weights_folder: Path | str | None = None,
        places: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        verify: bool = True,
        restarts: int = 2,
        start_s: float = 900.0,
        timeout_s: float = 600.0,
        log: Path | str = "sglang.log",
        tell: Callable[[str], None] = say,
    ) -> None:
        """Start the servers on the Hugging Face model in `folder`, without waiting for them.

        Args:
            weights_folder: that trainer and servers see, for `disk` and `changed`; None: one in shared memory.
            places: actor options for each GPU, server by server; None: what Ray finds.
            options: further arguments of sglang.launch_server.
            verify: compare checksums after every update (servers without a GPU and tensor parallelism).
            start_s: that a server may take to answer for the first time.
            timeout_s: of one request.
            log: of the servers; a number is put before its suffix.
            tell: called with one line when a server is started again.

        Raises:
            EngineError: no interpreter, no model, or an unknown transport.
        """
        if transport not in TRANSPORTS["sglang"]:
            raise EngineError(f"SGLang has no transport '{transport}'; known: {', '.join(TRANSPORTS['sglang'])}")
        self.version = version
        self.pause_s = 0.0  # that the last update kept the servers from decoding
        self._folder, self._max_length, self._rows, self._tp = str(folder), max_length, rows, tp
        self._vocab = _vocab_size(Path(folder))
        self._options = {name.replace("_", "-"): value for name, value in (options or {}).items()}
        self._transport, self._place = transport, Path(weights_folder or fresh_place())
        self._verify = verify and tp == 1 and self._options.get("device") == "cpu"
        self._restarts, self._start_s, self._tell = restarts, start_s, tell
        self._key = key
        self._seeded = bool(self._options.get("enable-deterministic-inference"))
        self._last: Handover | None = None
        self.resend: Callable[[], Awaitable[None]] | None = None  # has the trainer send its weights again
        shared: dict[str, Any] = {"timeout_s": timeout_s, "connections": rows + 8}
        if urls:
            self._replicas = [attached(url, key=key, **shared) for url in urls]
        else:
            self._replicas = [
                owned(
                    self._folder,
                    python=python or "",
                    tp=tp,
                    max_length=max_length,
                    slots=rows,
                    threads=threads,
                    options=self._options,
                    environment=environment or {},
                    places=places[number * tp : (number + 1) * tp] if places else None,
                    log=str(Path(log).with_suffix(f".{number}.log")),
                    **shared,
                )
                for number in range(replicas)
            ]
        self._gates: dict[int, asyncio.Lock] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def starts(self) -> int:
        """How often servers were started, in all."""
        return sum(replica.starts for replica in self._replicas)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: the request cannot be served, the deadline passed, or the server is gone for good.
        """
        problem = problem_of(prompt_ids, sampling, self._vocab, self._max_length)
        if problem:
            raise EngineError(problem)
        replica = self._replicas[_slot(prompt_ids, sampling.session, len(self._replicas))]
        body = body_of(prompt_ids, sampling, seeded=self._seeded)
        try:
            reply = await self._call(replica, "/generate", body)
        except asyncio.CancelledError:
            self._later(replica.client.call("/abort_request", {"rid": body["rid"]}))
            raise
        return completion_of(reply, self.version)

    async def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by local tensors, over the engine's own transport.

        Raises:
            EngineError: as `load_weights_from`; a tensor that is missing, unknown or of another shape changes nothing.
        """
        route = await self.route()
        handover = await asyncio.to_thread(make_sender(route).send, tensors, version, route.state)
        await self.load_weights_from(handover)

    async def route(self) -> Route:
        """The folder to write to; or the servers themselves, which then pause until `load_weights_from`."""
        options: dict[str, Any] = {"digest": "nothing"}
        if self._verify:
            options = {"digest": "sglang", "dtype": self._options.get("dtype", "float32")}
        for replica in self._replicas:
            await self._alive(replica)
        if self._transport in _PUSHED:
            sessions = await self._replicas[0].client.has("/begin_weight_update")
            options |= {"tp": self._tp, "sessions": sessions, "key": self._key}
            place = " ".join(replica.client.url for replica in self._replicas)
            await self._all("/pause_generation", {"mode": "retract"})
            return Route(transport=self._transport, place=place, model=self._folder, options=options)
        state = {"base": self.version if self._last is not None else None}
        return Route(
            transport=self._transport, place=str(self._place), model=self._folder, options=options, state=state
        )

    async def load_weights_from(self, handover: Handover) -> None:
        """Serve the weights of `handover` (see `TrainedEngine`); running requests go on with the new ones.

        Raises:
            EngineError: a server refuses them, with its text; or their checksums are not the trainer's.
        """
        began = time.perf_counter()
        self._last, before = handover, self._last
        try:
            for replica in self._replicas:
                await self._take(replica, handover)
        except EngineError:
            self._last = before
            raise
        finally:
            self.pause_s = time.perf_counter() - began
        self.version = handover.version

    async def _take(self, replica: Replica, handover: Handover) -> None:
        """Have one server serve the weights of `handover`; one that dies of it gets them when it is back."""
        starts = replica.starts
        try:
            await self._apply(replica, handover)
        except Lost as error:
            await self._revive(replica, starts, error, handover)

    async def _apply(self, replica: Replica, handover: Handover) -> None:
        body = {"model_path": handover.place, "weight_version": str(handover.version), "flush_cache": True}
        if handover.transport in _PUSHED:
            await replica.client.call("/continue_generation", {})
        else:
            async with _paused(replica):
                await replica.client.call("/update_weights_from_disk", body)
        await self._compare(replica, handover)

    async def _compare(self, replica: Replica, handover: Handover) -> None:
        if not handover.checksums:
            return
        said = await replica.client.call("/weights_checker", {"action": "checksum"})
        compare(said["ranks"][0]["checksums"], handover.checksums, handover.version)

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Release the servers' memory; they must be idle and have been started with enable_memory_saver."""
        await self._all("/flush_cache", None)
        await self._all("/release_memory_occupation", {"tags": list(tags)})
        for replica in self._replicas:
            replica.asleep.update(tags)

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Take the memory again; weights that were released come with the next update."""
        await asyncio.gather(*(self._wake(replica, tags) for replica in self._replicas))

    async def _wake(self, replica: Replica, tags: Sequence[Tag]) -> None:
        """SGLang dies of a tag that does not sleep, as none does in a server that was started again meanwhile."""
        while sleeping := [tag for tag in tags if tag in replica.asleep]:
            starts = replica.starts
            try:
                await replica.client.call("/resume_memory_occupation", {"tags": sleeping})
            except Lost as error:
                await self._revive(replica, starts, error, self._last)
            else:
                replica.asleep.difference_update(sleeping)

    async def pause(self, mode: str = "retract") -> None:
        """Hold generation: `retract` keeps what was sampled, `in_place` the cache too, `abort` neither."""
        await self._all("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._all("/continue_generation", {})

    async def flush(self) -> None:
        """Forget every cached prefix; refused while requests run."""
        await self._all("/flush_cache", None)

    def close(self) -> None:
        """End the servers that are ours, and remove what was written for them."""
        for replica in self._replicas:
            replica.close()
        shutil.rmtree(self._place, ignore_errors=True)

    async def _all(self, path: str, body: Mapping[str, Any] | None) -> None:
        await asyncio.gather(*(self._call(replica, path, body) for replica in self._replicas))

    async def _call(self, replica: Replica, path: str, body: Mapping[str, Any] | None) -> Any:
        while True:
            await self._ready(replica)
            starts = replica.starts
            try:
                return await replica.client.call(path, body)
            except Lost as error:
                await self._revive(replica, starts, error, self._last)

    async def _alive(self, replica: Replica) -> None:
        """Start a server that has died again, without weights: they are about to come."""
        await self._ready(replica)
        starts = replica.starts
        try:
            await replica.client.call("/model_info", method="GET")  # /health takes a second, and fails during a pause
        except Lost as error:
            await self._revive(replica, starts, error, None)

    async def _ready(self, replica: Replica) -> None:
        """Wait for the first answer of a server."""
        if replica.ready:
            return
        async with self._gate(replica):
            if not replica.ready:
                await replica.wait(self._start_s)

    async def _revive(self, replica: Replica, starts: int, error: Lost, handover: Handover | None) -> None:
        """Start again a server that was started `starts` times and is lost, and give it the weights of `handover`.

        Raises:
            EngineError: it is not ours, has died once too often, or its weights cannot be had again.
        """
        async with self._gate(replica):
            while replica.starts == starts:  # else another request was faster
                ended = await replica.ended()
                if not ended:
                    raise EngineError(f"SGLang at {replica.client.url}: {error}; its process runs but does not answer")
                if not replica.ours or not self._restarts:
                    raise EngineError(f"SGLang: {ended}{'; no restart is left' if replica.ours else ''}")
                self._restarts -= 1
                self._tell(f"SGLang: {ended}; started again, {self._restarts} restarts left")
                await replica.start()
                await replica.wait(self._start_s)
                if handover is None or handover.transport != "disk":
                    break
                try:
                    await self._apply(replica, handover)
                except Lost as again:
                    starts, error = replica.starts, again
        if handover is not None and handover.transport != "disk":
            if self.resend is None:
                raise EngineError(f"SGLang: restarted, but transport '{handover.transport}' keeps no weights to resend")
            self._last = None  # the next hand-over is whole
            await self.resend()

    def _gate(self, replica: Replica) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._gates = loop, {}
        return self._gates.setdefault(id(replica), asyncio.Lock())

    def _later(self, work: Coroutine[Any, Any, Any]) -> None:
        async def quietly() -> None:
            with suppress(Lost, EngineError):  # nobody waits for what is aborted
                await work

        task = asyncio.create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@asynccontextmanager
async def _paused(replica: Replica) -> AsyncIterator[None]:
    """Hold one server's requests: without it an update waits for the last of them, with it they go on afterwards."""
    await replica.client.call("/pause_generation", {"mode": "retract"})
    try:
        yield
    except EngineError:
        await replica.client.call("/continue_generation", {})
        raise
    await replica.client.call("/continue_generation", {})


def _vocab_size(folder: Path) -> int:
    path = folder / "config.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"{path}: no vocab_size to be read ({error!r}); expected a Hugging Face folder") from error


def _slot(prompt_ids: Sequence[int], session: str, replicas: int) -> int:
    """Where a request belongs: with its session, or without one wherever an equal prompt went."""
    if replicas == 1:
        return 0
    key = session.encode() if session else struct.pack(f"<{len(prompt_ids)}q", *prompt_ids)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % replicas
