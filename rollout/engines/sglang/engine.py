"""SGLang servers of one policy as an engine: routing, completions, and updates of weights."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout.base.errors import EngineError
from rollout.base.http import Unanswered
from rollout.base.terminal import say
from rollout.engines.build import RestartGuard
from rollout.engines.prompt_length import request_error
from rollout.engines.protocol import ScoredReply, StreamingEngine, Tag, TokenCallback, TrainedEngine
from rollout.engines.sglang.client import (
    StreamedReply,
    parse_completion,
    parse_routing,
    parse_scores,
    request_body,
    scoring_body,
)
from rollout.engines.sglang.fleet import Fleet, LostWeights, ServerLeft
from rollout.engines.sglang.replica import Replica
from rollout.engines.sglang.settings import PUSH_TRANSPORTS, SGLangSettings
from rollout.engines.sglang.weight_check import WeightCheck
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.memory import memory_path
from rollout.sync.transport import ServerOptions, SyncRoute, WeightUpdate

_IDLE_TIMEOUT_S = 60.0  # seconds that `sleep` waits for open requests to end


@dataclass(frozen=True, slots=True)
class _OpenUpdate:
    """Update between `begin_update` and `commit_update`.

    Attributes:
        began: time.perf_counter() at which the servers were paused.
        starts: number of starts of the servers at that time (`SGLangEngine.starts`). It has grown at
            the commit if a server started again or left meanwhile.
    """

    began: float
    starts: int


class SGLangEngine(StreamingEngine, TrainedEngine):
    """Engine of one policy's SGLang servers.

    Servers that die are started again, up to `restarts` times an hour in all, and get the present
    weights before they answer. Requests of one session, and requests of one prompt without a
    session, go to one server unless it is full. SGLang samples by a request's seed only in its
    deterministic inference; otherwise seeds are not sent.

    Attributes:
        settings: settings of the engine.
        transport: weight transport of the next update.
        weights_folder: folder that weights are written to.
        fleet: the servers.
        background: tasks that send requests whose answers nobody awaits.
    """

    def __init__(
        self,
        settings: SGLangSettings,
        *,
        restart_guard: RestartGuard = nullcontext,
        tell: Callable[[str], None] = say,
    ) -> None:
        """Prepare the servers; each starts with the first call that needs it.

        Args:
            restart_guard: context manager around the restart of a server.
            tell: called with one line when a server is started again, joins or leaves, or if the servers
                return no checksums.

        Raises:
            EngineError: `settings.python` is not a file.
        """
        self.settings = settings
        self.transport = settings.transport
        self.weights_folder = Path(settings.weights_folder or memory_path())
        self.version = settings.version
        self.pause_s = 0.0
        self.background: set[asyncio.Task[None]] = set()
        self.fleet = Fleet(
            settings,
            tell=tell,
            load_weights=self.load_present_weights,
            request_weights=self._request_weights,
            restart_guard=restart_guard,
        )
        self._lost_weights = LostWeights(self.fleet)
        self._weight_check = WeightCheck(tell)
        # None: the servers have the weights of the model's folder.
        self._last_update: WeightUpdate | None = None
        self._open_update: _OpenUpdate | None = None
        self._joining: list[Replica] = []  # servers that join with the open update

    @property
    def starts(self) -> int:  # type: ignore[override]
        """Number that grows when a server starts or leaves: starts so far, plus 1 for each server that left."""
        starts_of_present = sum(replica.starts for replica in self.fleet.replicas)
        return starts_of_present + self.fleet.starts_of_departed

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_tokens: TokenCallback | None,
        adapter: str | None = None,
    ) -> Completion:
        """Sample one completion; see `StreamingEngine`.

        Args:
            adapter: name of an adapter that the servers hold; None for the model itself.
        """
        problem = request_error(
            prompt_ids,
            sampling,
            vocab_size=self.settings.vocab,
            max_length=self.settings.max_length,
        )
        if problem:
            raise EngineError(problem)

        body = request_body(prompt_ids, sampling, seeded=self.settings.seeded, adapter=adapter)
        if on_tokens is not None:
            body["stream"] = True
            if on_tokens.every > 1:
                body["sampling_params"]["stream_interval"] = on_tokens.every
        experts = self.settings.experts
        if experts is not None:
            body["return_routed_experts"] = True

        while True:
            try:
                reply = await self._generate(body, sampling.session, on_tokens)
            except ServerLeft:
                continue  # another server gets the request
            completion = parse_completion(reply, self.version)
            if experts is None:
                return completion
            if completion.finish_reason == "abort" and "routed_experts" not in reply["meta_info"]:
                # A request that is aborted in the queue, new or retracted, is returned without experts.
                return completion
            routing = parse_routing(reply, len(prompt_ids), experts)
            return replace(completion, routing=routing)

    async def score(
        self, replies: Sequence[ScoredReply], adapter: str | None = None
    ) -> list[list[float]]:
        """Return the log-probabilities of replies at temperature 1; see `ScoringEngine`.

        Args:
            adapter: name of an adapter that the servers hold; None for the model itself.
        """
        return await asyncio.gather(*(self._score_one(reply, adapter) for reply in replies))

    async def _score_one(self, reply: ScoredReply, adapter: str | None) -> list[float]:
        body = scoring_body(reply, adapter=adapter)
        while True:
            try:
                answer = await self._generate(body, "", None)
            except ServerLeft:
                continue  # another server gets the request
            return parse_scores(answer, reply, self.settings.vocab)

    async def _generate(
        self, body: dict[str, Any], session: str, on_tokens: TokenCallback | None
    ) -> Any:
        """Send a request to one server; abort it there if this call is cancelled."""
        replica = self._choose_replica(body["input_ids"], session)

        def abort() -> None:
            self.send_in_background(replica, "/abort_request", {"rid": body["rid"]})

        stream = None if on_tokens is None else StreamedReply(on_tokens, abort)
        replica.busy += 1
        try:
            return await self.fleet.call(
                replica, "/generate", body, needs_weights=True, stream=stream
            )
        except asyncio.CancelledError:
            abort()
            raise
        finally:
            replica.busy -= 1

    def _choose_replica(self, prompt_ids: Sequence[int], session: str) -> Replica:
        """Return the replica that a session or a prompt is assigned to; if it is full, the least busy one."""
        replicas = self.fleet.replicas
        if len(replicas) == 1:
            return replicas[0]
        key = session.encode() if session else struct.pack(f"<{len(prompt_ids)}q", *prompt_ids)
        digest = hashlib.blake2b(key, digest_size=8).digest()
        preferred = replicas[int.from_bytes(digest, "big") % len(replicas)]
        if preferred.busy < self.settings.rows:
            return preferred
        return min(replicas, key=lambda replica: replica.busy)

    def send_in_background(self, replica: Replica, path: str, body: dict[str, Any]) -> None:
        """Send a request and ignore its answer; send nothing to a server that is not ready."""

        async def send() -> None:
            with suppress(Unanswered, EngineError):
                await replica.client.call(path, body)

        if replica.ready:
            task = asyncio.create_task(send())
            self.background.add(task)
            task.add_done_callback(self.background.discard)

    async def begin_update(self) -> SyncRoute:
        """Return the route to the folder, or to the servers if weights are pushed.

        In the latter case the servers pause until `commit_update`.
        """
        self._joining = await self.fleet.update_members()
        # This call only restarts servers that have died; its answer is not used. /health would not
        # do, because it fails while a server is paused.
        await self.fleet.call_all("/model_info")
        began = time.perf_counter()
        if self._open_update is not None:
            # The update before failed, and has left the servers paused.
            began = self._open_update.began
        self._open_update = _OpenUpdate(began, self.starts)

        model = str(self.settings.folder)
        if self.transport not in PUSH_TRANSPORTS:
            return SyncRoute(transport=self.transport, target=str(self.weights_folder), model=model)
        first = self.fleet.replicas[0].client
        servers = ServerOptions(
            tp=self.settings.tp,
            key=self.settings.server_key,
            sessions=await first.has("/begin_weight_update"),
            starts=self.starts,
        )
        await self.fleet.call_all("/pause_generation", {"mode": "retract"})
        urls = [replica.client.url for replica in (*self.fleet.replicas, *self._joining)]
        return SyncRoute(
            transport=self.transport, target=" ".join(urls), model=model, servers=servers
        )

    async def commit_update(self, update: WeightUpdate) -> None:
        """Serve the weights of `update`; running requests continue with them.

        Raises:
            EngineError: a server refuses the weights, a server died before it had received all
                pushed weights, or the servers do not hold the same weights.
        """
        began = time.perf_counter()
        opened = self._open_update
        if opened is not None and update.transport in PUSH_TRANSPORTS:
            if opened.starts != self.starts:
                raise EngineError(
                    "SGLang: a server was started again while it received new weights; they must be "
                    "sent again"
                )
            began = opened.began
        update_before = self._last_update
        # A server that dies while it takes this update loads it when it has started again.
        self._last_update = update
        self._open_update = None
        self._weight_check.begin_update()
        try:
            for replica in list(self.fleet.replicas):
                with suppress(ServerLeft):
                    await self._take_update(replica, update)
            while self._joining:
                replica = self._joining.pop()
                with suppress(Unanswered):  # a server that has gone meanwhile does not join
                    await self._apply(replica, update)
                    self.fleet.join(replica)
        except EngineError:
            self._last_update = update_before
            raise
        finally:
            self.pause_s = time.perf_counter() - began
        self.version = update.version
        self._lost_weights.settle()

    async def _take_update(self, replica: Replica, update: WeightUpdate) -> None:
        """Apply an update to one server; if the server dies meanwhile, start it again with the new weights.

        Raises:
            ServerLeft: as `Fleet.restart`.
            EngineError: as `Fleet.restart`; or the server refuses the update, or has died with pushed
                weights, which have no copy to load.
        """
        starts = replica.starts
        try:
            await self._apply(replica, update)
        except Unanswered as error:
            await self.fleet.restart(replica, starts, error)
            if replica.stale:
                raise EngineError(
                    f"SGLang: {error} during an update; the weights must be sent again"
                ) from None

    async def load_present_weights(self, replica: Replica) -> bool:
        """Load the present weights into a server that was started again.

        Returns:
            False if there are no files to load them from: they were pushed, or an update is open.
        """
        if self._last_update is None:
            return True
        pushed = self._last_update.transport in PUSH_TRANSPORTS
        if pushed or self._open_update is not None:
            # Pushed weights have no copy, and the next weights may be overwriting those in the folder.
            return False
        await self._apply(replica, self._last_update)
        return True

    async def _apply(self, replica: Replica, update: WeightUpdate) -> None:
        """Load weights from a folder into a server, let it continue, and compare its weights with another's.

        Pushed weights are in the server already.
        """
        client = replica.client
        if update.transport not in PUSH_TRANSPORTS:
            # Without a pause, SGLang would wait for the last request to end.
            await client.call("/pause_generation", {"mode": "retract"})
            body = {
                "model_path": update.location,
                "weight_version": str(update.version),
                "flush_cache": True,
            }
            try:
                await client.call("/update_weights_from_disk", body)
            except EngineError:
                if not replica.stale:  # the server still has the weights that it had before
                    await client.call("/continue_generation", {})
                raise
        await client.call("/continue_generation", {})
        replica.stale = False
        if self.settings.compare_servers:
            await self._weight_check.check(replica, update.version)

    def abort_update(self, error: Exception) -> None:
        """Fail the calls that wait for lost weights; see `TrainedEngine`."""
        self._open_update = None
        self._lost_weights.settle(
            EngineError(f"SGLang: the lost weights were not sent again: {error}")
        )

    async def weights_lost(self) -> None:
        """Wait until a call needs weights that a server has lost; see `TrainedEngine`."""
        await self._lost_weights.wait_until_needed()

    async def _request_weights(self) -> None:
        """Wait until lost weights have been sent again.

        Return at once if an update is open: the paused server holds a request until its commit.
        """
        if self._open_update is None and self.fleet.stale:
            await self._lost_weights.wait_until_restored(self.transport)

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Free the servers' memory; they must have been started with enable-memory-saver.

        Raises:
            EngineError: a server still runs requests after `_IDLE_TIMEOUT_S`.
        """
        # SGLang flushes its cache once no request runs, and fails after the timeout.
        await self.fleet.call_all(f"/flush_cache?timeout={_IDLE_TIMEOUT_S:g}", {})
        await self.fleet.free_memory(tags)

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Allocate the memory again; weights that were freed come with the next update."""
        await self.fleet.take_memory(tags)

    def close(self) -> None:
        """Stop the servers that this engine started, and remove the weights written for them."""
        self.fleet.close()
        shutil.rmtree(self.weights_folder, ignore_errors=True)
