"""A policy's SGLang servers as one engine: routing, completions, updates of weights."""

import asyncio
import hashlib
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rollout.base.errors import EngineError
from rollout.base.http import Unanswered
from rollout.base.processes import say
from rollout.engines.prompt_length import request_error
from rollout.engines.protocol import StreamingEngine, Tag, TokenCallback, TrainedEngine
from rollout.engines.sglang.client import StreamedReply, body_of, completion_of, routing_of
from rollout.engines.sglang.fleet import Fleet, Left, LostWeights
from rollout.engines.sglang.server import Replica
from rollout.engines.sglang.settings import PUSHED, SGLangSettings
from rollout.engines.sglang.weight_check import WeightCheck
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.memory import memory_path
from rollout.sync.transport import ServerOptions, SyncRoute, WeightUpdate

_IDLE_S = 60.0  # that requests which were aborted may take to end, before servers sleep


class SGLangEngine(StreamingEngine, TrainedEngine):
    """Serves one policy from its `replicas` servers, or from those that run at `urls`.

    A server that dies is started again, up to `restarts` times an hour, and gets the present weights before it answers.
    Requests of one session go to one replica. SGLang draws with a request's seed only if its deterministic inference
    is on (`options: {enable-deterministic-inference: true}`); otherwise seeds are not sent.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        version: int = 0,
        tell: Callable[[str], None] = say,
        **settings: Any,
    ) -> None:
        """Set up the servers of the Hugging Face model in `folder`; each starts with the first call that needs it.

        Args:
            version: of the weights in `folder`.
            tell: called with one line when a server is started again.
            settings: the fields of `SGLangSettings`.

        Raises:
            EngineError: no interpreter, or as `SGLangSettings`.
        """
        self._settings = SGLangSettings(folder=Path(folder), **settings)
        self.version = version
        self.pause_s = 0.0  # that the last update kept the servers from decoding
        self._transport = self._settings.transport
        self.folder, self.place = (
            self._settings.folder,
            Path(self._settings.weights_folder or memory_path()),
        )
        self._fleet = Fleet(self._settings, tell=tell, weigh=self._weigh, restore=self._restore)
        self._fleet.room = lambda: self.room()
        self._replicas = self._fleet.replicas
        self._weight_check = WeightCheck(tell)
        self._last: WeightUpdate | None = (
            None  # that the servers took; None: their weights are the folder's
        )
        self._new: list[Replica] = []  # servers that join with the update under way
        self._update: _Update | None = None  # under way, between `begin_update` and `commit_update`
        self._lost = LostWeights(self._fleet)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def starts(self) -> int:  # type: ignore[override]
        """How often servers were started or left, in all."""
        return sum(replica.starts for replica in self._replicas) + self._fleet.left

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_tokens: TokenCallback | None,
        adapter: str | None = None,
    ) -> Completion:
        """Sample one completion, of an `adapter` that the servers hold; `on_tokens` as `StreamingEngine` has it."""
        problem = request_error(
            prompt_ids,
            sampling,
            vocab_size=self._settings.vocab,
            max_length=self._settings.max_length,
        )
        if problem:
            raise EngineError(problem)
        body = body_of(prompt_ids, sampling, self._settings.seeded, adapter) | (
            {"stream": True} if on_tokens else {}
        )
        if on_tokens is not None and on_tokens.every > 1:
            body["sampling_params"]["stream_interval"] = on_tokens.every
        experts = self._settings.experts
        if experts is not None:
            body["return_routed_experts"] = True
        while True:
            replica = _route(prompt_ids, sampling.session, self._replicas, self._settings.rows)
            end = partial(tell_server, replica, "/abort_request", {"rid": body["rid"]}, self._tasks)
            stream = StreamedReply(on_tokens, end) if on_tokens else None
            replica.busy += 1
            try:
                reply = await self._fleet.call(
                    replica, "/generate", body, weighed=True, stream=stream
                )
            except Left:
                continue  # another one is asked
            except asyncio.CancelledError:
                end()
                raise
            finally:
                replica.busy -= 1
            said = completion_of(reply, self.version)
            if experts is None or (
                said.finish_reason == "abort" and "routed_experts" not in reply["meta_info"]
            ):
                return said  # one that was aborted before it ran, or between two runs, has none
            return replace(said, routing=routing_of(reply, len(prompt_ids), experts))

    async def begin_update(self) -> SyncRoute:
        """The folder to write to; or the servers themselves, which then pause until `commit_update`."""
        self._new = await self._fleet.meet()
        await self._fleet.all(
            "/model_info"
        )  # those that have died run again; /health fails during a pause
        began = time.perf_counter()
        if self._update is not None:  # the update before failed, and has left the servers paused
            began = self._update.began
        self._update = _Update(began, self.starts)

        model = str(self._settings.folder)
        if self._transport not in PUSHED:
            return SyncRoute(transport=self._transport, target=str(self.place), model=model)
        servers = ServerOptions(
            tp=self._settings.tp,
            key=self._settings.own_key,
            sessions=await self._replicas[0].client.has("/begin_weight_update"),
            starts=self.starts,
        )
        await self._fleet.all("/pause_generation", {"mode": "retract"})
        urls = [replica.client.url for replica in (*self._replicas, *self._new)]
        return SyncRoute(
            transport=self._transport, target=" ".join(urls), model=model, servers=servers
        )

    async def commit_update(self, update: WeightUpdate) -> None:
        """Serve the weights of `update` (see `TrainedEngine`); running requests go on with the new ones.

        Raises:
            EngineError: a server refuses them, with its text; one died meanwhile, and what was sent is not whole; or
                the servers do not hold the same weights.
        """
        began, begun = time.perf_counter(), self._update
        if begun is not None and update.transport in PUSHED:
            if begun.starts != self.starts:
                raise EngineError(
                    "SGLang: a server was started again while new weights came; they must come again"
                )
            began = begun.began
        self._last, before, self._update = update, self._last, None
        self._weight_check.begin_update()
        try:
            for replica in list(self._replicas):
                with suppress(Left):
                    await self._take(replica, update)
            while self._new:
                with suppress(Unanswered):  # it is gone again, and never joined
                    await self._apply(new := self._new.pop(), update)
                    self._fleet.join(new)
        except EngineError:
            self._last = before
            raise
        finally:
            self.pause_s = time.perf_counter() - began
        self.version = update.version
        self._lost.settle()

    async def _take(self, replica: Replica, update: WeightUpdate) -> None:
        """Have one server serve the weights of `update`; one that dies of it gets them when it is back."""
        starts = replica.starts
        try:
            await self._apply(replica, update)
        except Unanswered as error:
            await self._fleet.revive(replica, starts, error)
            if replica.stale:
                raise EngineError(
                    f"SGLang: {error} during an update; the weights must come again"
                ) from None

    async def _weigh(self, replica: Replica) -> bool:
        """Give a server that was started again the weights that were handed over last, where they still lie."""
        if self._last is None:
            return True
        if self._last.transport in PUSHED or self._update is not None:
            return False  # no copy is kept, or the next weights are being written in its place
        await self._apply(replica, self._last)
        return True

    def abort_update(self, error: Exception) -> None:
        self._update = None
        self._lost.settle(EngineError(f"SGLang: the weights did not come again: {error}"))

    async def weights_lost(self) -> None:
        await self._lost.needed()

    async def _restore(self) -> None:
        """Wait until weights that a server lost have come again; nothing if new ones are on their way."""
        if self._update is None and self._fleet.stale:
            await self._lost.restored(self._transport)

    async def _apply(self, replica: Replica, update: WeightUpdate) -> None:
        if (
            update.transport not in PUSHED
        ):  # without a pause it would wait for the last request; with it they go on
            await replica.client.call("/pause_generation", {"mode": "retract"})
            body = {
                "model_path": update.location,
                "weight_version": str(update.version),
                "flush_cache": True,
            }
            try:
                await replica.client.call("/update_weights_from_disk", body)
            except EngineError:
                if not replica.stale:
                    await replica.client.call("/continue_generation", {})
                raise
        await replica.client.call("/continue_generation", {})
        replica.stale = False
        if self._settings.verify:
            await self._weight_check.check(replica, update.version)

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Release the servers' memory; they must be idle and have been started with enable_memory_saver."""
        await self._fleet.all(f"/flush_cache?timeout={_IDLE_S:g}", {})
        await self._fleet.move(tags, asleep=True)

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Take the memory again; weights that were released come with the next update."""
        await self._fleet.move(tags, asleep=False)

    def close(self) -> None:
        """End the servers that are ours, and remove what was written for them."""
        self._fleet.close()
        shutil.rmtree(self.place, ignore_errors=True)


def tell_server(
    replica: Replica, path: str, body: dict[str, Any], tasks: set[asyncio.Task[None]]
) -> None:
    """Have a server end or give up something, which nobody waits for; `tasks` keeps what does."""

    async def tell() -> None:
        with suppress(Unanswered, EngineError):
            await replica.client.call(path, body)

    if replica.ready:
        task = asyncio.create_task(tell())
        tasks.add(task)
        task.add_done_callback(tasks.discard)


class _Update(NamedTuple):
    """One that was asked for and has not come yet."""

    began: float  # when servers that are pushed to were paused
    starts: int  # of servers so far


def _route(
    prompt_ids: Sequence[int], session: str, replicas: Sequence[Replica], rows: int
) -> Replica:
    """Where a request goes: with its session, or without one wherever an equal prompt went, if a row is free there.

    Args:
        rows: requests that a replica decodes at once.
    """
    if len(replicas) == 1:
        return replicas[0]
    key = session.encode() if session else struct.pack(f"<{len(prompt_ids)}q", *prompt_ids)
    own = replicas[
        int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % len(replicas)
    ]
    return own if own.busy < rows else min(replicas, key=lambda replica: replica.busy)
