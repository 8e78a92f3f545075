"""The embedded engine: continuous batching over rows of cached keys and values, and its dispatch loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.base.async_tasks import set_outcome
from rollout.base.errors import EngineError
from rollout.engines.embedded.cache import Cache
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.engines.embedded.exact_decoder import exact_decoder
from rollout.engines.embedded.rows import CacheRows, GenerationRequest, plan
from rollout.engines.prompt_length import request_error
from rollout.engines.protocol import StreamingEngine, Tag, TokenCallback
from rollout.models.architecture import read_architecture
from rollout.models.tensors import WeightStream, read_tensors
from rollout.records.trajectory import Completion, Sampling

_TOGETHER = 8  # calls that an engine may have more than others, to be asked again what it is asked
BUSY = "the engine cannot sleep while requests are running; end or abort them first"

# request id, prompt ids, how to sample, how many tokens are worth News (0: none are), and the adapter's number
Ask = tuple[int, Sequence[int], Sampling, int, int]
News = tuple[int, list[int]]  # position of the first new token of a growing completion, new tokens
Outcome = Completion | EngineError
Report = tuple[int, Outcome | News]  # request id, and what there is of it


@dataclass(slots=True)
class Stats:
    """What an engine has done so far; seconds are CPU time of the engine's thread."""

    prefill_tokens: int = 0  # prompt tokens computed
    cached_tokens: int = 0  # prompt tokens reused
    decode_tokens: int = 0  # completion tokens sampled
    steps: int = 0  # decoding passes
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0


class EmbeddedEngine:
    """Generates for many requests at once; not safe for use by two threads.

    `rows` bounds how many sequences are held, running or kept for their prefixes; `max_length` bounds prompt plus
    completion in tokens. A request's tokens depend on its prompt, sampling and the weights; what else runs changes
    the last bits of a log-probability, because sums over more rows are made in another order. With `deterministic`
    it changes nothing, and a trainer with `deterministic` says the same to the bit (`ExactDecoder`); where that is not
    possible every sequence is computed by itself, several times slower. `routing`: completions name tokens' experts.
    """

    def __init__(
        self,
        decoder: CachedDecoder,
        *,
        rows: int = 192,
        version: int = 0,
        reuse_prefixes: bool = True,
        deterministic: bool = False,
        routing: bool = False,
    ) -> None:
        self.stats, self.max_length = Stats(), decoder.max_length
        self.decoder = (
            exact_decoder(decoder) if deterministic else decoder
        )  # the model and its weights
        self._rows = CacheRows(rows, decoder.max_length, version)
        self._cache: Any = None  # as while the engine sleeps
        self._asleep, self._routing, self._reuse = set[Tag](), routing, reuse_prefixes
        self.called: np.ndarray | None = (
            None  # [1]: not 0 while whoever called `exchange` has something new
        )
        self.wake(["kv_cache"])
        self._alone = deterministic and not self.decoder.exact
        self._waiting: deque[GenerationRequest] = deque()
        self._done: list[tuple[int, Outcome]] = []

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        max_length: int,
        device: str = "cpu",
        bf16: bool = False,
        **settings: Any,
    ) -> EmbeddedEngine:
        """Build from a Hugging Face model folder (config.json and safetensors); `settings` are those of the class.

        `device` and `bf16` are those of `CachedDecoder`.

        Raises:
            EngineError: the folder is not a model that this engine computes.
        """
        decoder = CachedDecoder(read_architecture(folder), max_length, device=device, bf16=bf16)
        decoder.load(read_tensors(folder))
        return cls(decoder, **settings)

    @property
    def version(self) -> int:
        """The version of the weights, adapters left out."""
        return self._rows.versions[0]

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to hand out."""
        return bool(self._waiting or self._done or self._rows.live.any())

    def submit(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stream: int = 0,
        adapter: int = 0,
    ) -> None:
        """Queue one generation, with an adapter by number or none (0). `step` says what is wrong with it."""
        problem = "the engine sleeps; wake it first" if self._asleep else ""
        problem = problem or request_error(
            prompt_ids,
            sampling,
            vocab_size=self.decoder.shape.vocab,
            max_length=self.max_length,
        )
        if problem:
            self._done.append((request_id, EngineError(problem)))
        else:
            prompt = np.asarray(prompt_ids, dtype=np.int64)
            request = GenerationRequest(
                id=request_id, prompt=prompt, sampling=sampling, stream=stream, adapter=adapter
            )
            self._waiting.append(request)

    def exchange(self, asks: list[Ask], aborts: list[int], budget_s: float = 0.0) -> list[Report]:
        """Take new requests, end `aborts`, decode for about `budget_s`, at least a step; returns what has ended.

        While nothing has ended, it is not `called` and nobody hears every token it goes on, for at most 15 times as
        long; where it cannot be called, for five times. News come last.
        """
        for ask in asks:
            self.submit(*ask)
        self.abort(aborts)
        began, done, called = time.monotonic(), list[Report](), self.called
        heard = any(r is not None and r.stream == 1 for r in (*self._waiting, *self._rows.requests))
        alone = budget_s * (1 if heard else 5 if called is None else 15)
        try:
            while self.has_work:
                done += self.step()
                wanted = done or (called is not None and called[0])
                if time.monotonic() - began >= (budget_s if wanted else alone):
                    break
        except Exception:
            self.reset()
            raise
        return [*done, *self._rows.news()]

    def step(self) -> list[tuple[int, Outcome]]:
        """Admit what fits, decode one token for every running request, and return what has ended."""
        while self._waiting and not self._rows.live.all():
            self._admit()
        live = np.flatnonzero(self._rows.live)
        if len(live):
            self._decode(live)
        done, self._done = self._done, []
        return done

    def abort(self, request_ids: Collection[int]) -> None:
        """End requests now; the next `step` returns what they have so far, with finish reason `abort`."""
        gone = set(request_ids)
        self._done += [
            (request.id, self._rows.nothing(request))
            for request in self._waiting
            if request.id in gone
        ]
        self._waiting = deque(request for request in self._waiting if request.id not in gone)
        for row in np.flatnonzero(self._rows.live).tolist():
            if self._rows.requests[row].id in gone:
                self._finish(row, "abort")

    def load_weights(self, stream: WeightStream, version: int) -> None:
        """Replace all weights by a stream of full tensors by Hugging Face name, and forget every cached prefix.

        Running requests go on with the keys they have and the new weights; their version spans say from which token.
        """
        self.decoder.load(stream)
        self._rows.renew(version, 0)

    def adopt(self, half: int, version: int) -> None:
        """As `load_weights`, with weights that somebody else has written into the decoder's `half`."""
        self.decoder.adopt(half)
        self._rows.renew(version, 0)

    def sleep(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> None:
        """Give memory back, of weights only a GPU's; only an idle engine can."""
        if self.has_work:
            raise EngineError(BUSY)
        self._asleep.update(tags)
        if "weights" in tags:
            self.decoder.release()
        if "kv_cache" in tags:
            self._rows.cached[:] = 0
            self._cache = None
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # to whoever else is on this GPU

    def wake(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> None:
        """Have the weights where they are computed with, and room for keys and values, of which none are cached."""
        self._asleep.difference_update(tags)
        if "weights" in tags:
            self.decoder.restore()
        if "kv_cache" in tags and self._cache is None:
            sizes = self.decoder.shape, len(self._rows.live), self.max_length
            self._cache = Cache(
                *sizes, self.decoder.device, routing=self._routing, exact=self.decoder.exact
            )

    def reset(self) -> None:
        """Drop every request and every cached prefix, unanswered: the way back after `step` has raised."""
        self._waiting.clear()
        self._done.clear()
        self._rows.live[:], self._rows.cached[:] = False, 0

    def _admit(self) -> None:
        """Prefill waiting requests, in order, up to one pass's budget; equal prompts are computed once."""
        began, rows = time.thread_time(), self._rows
        spans = plan(rows, self._waiting, reuse=self._reuse, alone=self._alone)
        logits = self.decoder.prefill(self._cache, spans)
        placed, index = [span.row for span in spans], list(range(len(spans)))
        for number, span in enumerate(spans):
            if span.copies:
                size = int(rows.prompt[span.row])
                self._cache.copy(span.row, span.copies, size)
                rows.cached[span.copies] = size
                placed += span.copies
                index += [number] * len(span.copies)
        for request in rows.requests[placed]:
            self.stats.cached_tokens += request.cached
            self.stats.prefill_tokens += len(request.prompt) - request.cached
        self.stats.prefill_s += time.thread_time() - began
        if len(index) > len(spans):
            logits = logits[torch.tensor(index, device=logits.device)]
        self._emit(np.array(placed), logits)

    def _decode(self, live: np.ndarray) -> None:
        began, rows = time.thread_time(), self._rows
        batches = live[:, None] if self._alone else [live]
        parts = [self.decoder.decode(self._cache, *rows.newest(batch)) for batch in batches]
        logits = torch.cat(parts) if self._alone else parts[0]
        rows.cached[live] = np.where(rows.fresh[live], rows.size[live], 0)
        self.stats.steps += 1
        self.stats.decode_s += time.thread_time() - began
        self._emit(live, logits)

    def _emit(self, placed: np.ndarray, logits: Tensor) -> None:
        """Sample the next token of the rows `placed` from their `logits`, and end those that are complete."""
        began, rows = time.thread_time(), self._rows
        stopped, ended, broken = rows.append(placed, *rows.draw(placed, logits))
        for row, at_stop in zip(placed[ended].tolist(), stopped[ended].tolist(), strict=True):
            self._finish(row, "stop" if at_stop else "length")
        for row, request in zip(
            placed[broken].tolist(), rows.requests[placed[broken]], strict=True
        ):
            problem = EngineError(
                f"weights version {request.versions[-1][0]} give logits that are not finite"
            )
            self._done.append((request.id, problem))
            rows.vacate(row, "abort")
            rows.cached[row] = 0
            self._cache.clear(row)
        self.stats.decode_tokens += len(placed)
        self.stats.sample_s += time.thread_time() - began

    def _finish(self, row: int, reason: str) -> None:
        rows, routing = self._rows, self._cache.routed(row, int(self._rows.size[row]) - 1)
        self._done.append((rows.requests[row].id, rows.vacate(row, reason, routing)))


class Dispatcher(StreamingEngine):
    """Dispatch loop: concurrent calls go to `exchange` together, and get their outcomes as they end."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Ask, asyncio.Future[Completion], TokenCallback | None]] = {}
        self._new: list[Ask] = []
        self._aborts: list[int] = []
        self._ids = itertools.count()
        self._loop: asyncio.Task[None] | None = None

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_tokens: TokenCallback | None,
        adapter: int = 0,
    ) -> Completion:
        """Sample one completion, with an adapter by number; `on_tokens` as `StreamingEngine` has it."""
        request_id = next(self._ids)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        every = 0 if on_tokens is None else on_tokens.every
        ask = (request_id, list(prompt_ids), sampling, every, adapter)
        self._waiting[request_id] = (ask, future, on_tokens)
        self._new.append(ask)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        self.call_back()
        try:
            return await future
        except asyncio.CancelledError:
            self._aborts.append(request_id)
            self.call_back()
            raise
        finally:
            self._waiting.pop(request_id, None)

    async def exchange(self, asks: list[Ask], aborts: list[int]) -> list[Report]:
        """Hand over what is new and what is not wanted any more; what has ended, and News, since the last call."""
        raise NotImplementedError

    def call_back(self) -> None:
        """Say that there is something new, for which an `exchange` under way returns soon."""

    def unanswered(self) -> list[Ask]:
        """All requests that wait, to be asked again of an engine that lost them."""
        self._new.clear()
        return [ask for ask, _, _ in self._waiting.values()]

    def burden(self, prompt_ids: Sequence[int]) -> int:
        """How many completions it is asked for, less a bonus for one of the same prompt: that is computed once."""
        asked = list(prompt_ids)
        return len(self._waiting) - _TOGETHER * any(
            ask[1] == asked for ask, _, _ in self._waiting.values()
        )

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
                for request_id, outcome in await self.exchange(asks, aborts):
                    if request_id in self._waiting:
                        self._take(request_id, outcome)
                await asyncio.sleep(0)  # whoever got an answer leaves, and may ask again
        except (
            Exception
        ) as error:  # nobody awaits this task: whatever broke must reach those who wait
            known = isinstance(error, EngineError)
            failure = (
                error
                if known
                else EngineError(f"the engine failed: {type(error).__name__}: {error}")
            )
            self._new.clear()
            for _, future, _ in self._waiting.values():
                set_outcome(future, failure)
            if not known:
                raise

    def _take(self, request_id: int, found: Outcome | News) -> None:
        _, future, on_tokens = self._waiting[request_id]
        if not isinstance(found, tuple):
            set_outcome(future, found)
        elif on_tokens is not None and not future.done() and not on_tokens(*found):
            self._aborts.append(request_id)


class LocalEngine(Dispatcher):
    """Runs an `EmbeddedEngine` on the event loop's thread, one step at a time between other coroutines.

    One on a GPU has a thread of its own, in which it waits for the GPU while engines on others work.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        max_length: int,
        core: EmbeddedEngine | None = None,
        **settings: Any,
    ) -> None:
        """Run `core`, or the Hugging Face model in `folder`; settings are those of `EmbeddedEngine.from_folder`."""
        super().__init__()
        self.core = core or EmbeddedEngine.from_folder(folder, max_length=max_length, **settings)

    async def load_weights(self, tensors: WeightStream, version: int) -> None:
        self.core.load_weights(tensors, version)

    async def exchange(self, asks: list[Ask], aborts: list[int]) -> list[Report]:
        if self.core.decoder.device.type == "cpu":
            return self.core.exchange(asks, aborts)
        return await asyncio.to_thread(self.core.exchange, asks, aborts)


class LocalReplicas(StreamingEngine):
    """A `LocalEngine` on each of several devices; a call goes to the one with the smallest burden."""

    def __init__(
        self, folder: Path | str, *, devices: Sequence[str], max_length: int, **settings: Any
    ) -> None:
        """Load the Hugging Face model in `folder` once, and onto each of `devices`; settings as of `LocalEngine`."""
        self.engines = [LocalEngine(folder, device=devices[0], max_length=max_length, **settings)]
        held = self.engines[0].core.decoder
        bf16 = settings.pop("bf16", False)
        for device in devices[1:]:
            decoder = CachedDecoder(held.shape, max_length, held.halves, device, bf16=bf16)
            decoder.adopt(held.half)
            core = EmbeddedEngine(decoder, **settings)
            self.engines.append(LocalEngine(folder, max_length=max_length, core=core))

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback | None
    ) -> Completion:
        """Sample one completion (see `StreamingEngine`)."""
        return await min(self.engines, key=lambda own: own.burden(prompt_ids)).stream(
            prompt_ids, sampling, on_tokens
        )
