"""The embedded engine: continuous batching over rows of cached keys and values, in one thread of one process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.embedded import rows as sampler
from rollout.engines.embedded.decoder import Cache, Decoder, Span
from rollout.engines.embedded.rows import Request, Rows
from rollout.engines.protocol import BUSY, Tag, problem_of
from rollout.records.completion import Completion, Sampling, VersionSpan

_PREFILL_TOKENS = 1024  # of one forward pass; more would leave the processor's cache

Outcome = Completion | EngineError


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
    it changes nothing: every sequence is computed by itself, which takes several times longer.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        rows: int = 192,
        version: int = 0,
        reuse_prefixes: bool = True,
        deterministic: bool = False,
    ) -> None:
        self.version = version
        self.stats = Stats()
        self.max_length = decoder.max_length
        self._decoder = decoder
        self._rows = Rows(rows, decoder.max_length)
        self._cache: Any = None  # as while the engine sleeps
        self._asleep: set[Tag] = {"kv_cache"}
        self.wake(tuple(self._asleep))
        self._reuse = reuse_prefixes
        self._alone = deterministic
        self._waiting: deque[Request] = deque()
        self._done: list[tuple[int, Outcome]] = []

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        max_length: int,
        rows: int = 192,
        version: int = 0,
        reuse_prefixes: bool = True,
        deterministic: bool = False,
        device: str = "cpu",
    ) -> EmbeddedEngine:
        """Build from a Hugging Face model folder (config.json and safetensors).

        Raises:
            EngineError: the folder is not a model that this engine computes.
        """
        decoder = Decoder.from_folder(Path(folder), max_length, device)
        return cls(decoder, rows=rows, version=version, reuse_prefixes=reuse_prefixes, deterministic=deterministic)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to hand out."""
        return bool(self._waiting or self._done or self._rows.live.any())

    def submit(self, request_id: int, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue one generation. What is wrong with it comes back from `step` as its EngineError."""
        problem = problem_of(prompt_ids, sampling, self._decoder.shape.vocab, self.max_length)
        if self._asleep:
            problem = "the engine sleeps; wake it first"
        if problem:
            self._done.append((request_id, EngineError(problem)))
        else:
            prompt = np.asarray(prompt_ids, dtype=np.int64)
            self._waiting.append(Request(id=request_id, prompt=prompt, sampling=sampling))

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
        nothing = Completion(
            token_ids=(),
            logprobs=(),
            finish_reason="abort",
            versions=(VersionSpan(version=self.version, start=0, end=0),),
        )
        self._done += [(request.id, nothing) for request in self._waiting if request.id in gone]
        self._waiting = deque(request for request in self._waiting if request.id not in gone)
        for row in np.flatnonzero(self._rows.live).tolist():
            if self._rows.requests[row].id in gone:
                self._finish(row, "abort")

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by a stream of (Hugging Face name, full tensor) and forget every cached prefix.

        Running requests go on with the keys they have and the new weights; their version spans say from which token.

        Raises:
            EngineError: names a tensor that is missing, unknown or of another shape; nothing has changed.
        """
        self._decoder.load(stream)
        self._renew(version)

    def adopt(self, half: int, version: int) -> None:
        """As `load_weights`, with weights that somebody else has written into the decoder's `half`."""
        self._decoder.adopt(half)
        self._renew(version)

    @property
    def decoder(self) -> Decoder:
        """The model and its weights."""
        return self._decoder

    def sleep(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> None:
        """Give memory back, of weights only a GPU's; only an idle engine can.

        Raises:
            EngineError: requests are running.
        """
        if self.has_work:
            raise EngineError(BUSY)
        self._asleep.update(tags)
        if "weights" in tags:
            self._decoder.release()
        if "kv_cache" in tags:
            self._rows.cached[:] = 0
            self._cache = None
        if self._decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # to whoever else is on this GPU

    def wake(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> None:
        """Have the weights where they are computed with, and room for keys and values, of which none are cached."""
        self._asleep.difference_update(tags)
        decoder = self._decoder
        if "weights" in tags:
            decoder.restore()
        if "kv_cache" in tags and self._cache is None:
            self._cache = Cache(decoder.shape, len(self._rows.live), decoder.max_length, decoder.device)

    def _renew(self, version: int) -> None:
        self.version = version
        rows = self._rows
        rows.cached[:] = 0
        rows.fresh[:] = False
        for row in np.flatnonzero(rows.live):
            versions, first = rows.requests[row].versions, int(rows.size[row] - rows.prompt[row])
            if versions[-1][1] == first:
                versions.pop()
            versions.append((version, first))

    def reset(self) -> None:
        """Drop every request and every cached prefix, unanswered: the way back after `step` has raised."""
        self._waiting.clear()
        self._done.clear()
        self._rows.live[:] = False
        self._rows.cached[:] = 0

    def _admit(self) -> None:
        """Prefill waiting requests, in order, up to one pass's budget; equal prompts are computed once."""
        began = time.thread_time()
        rows, budget = self._rows, 1 if self._alone else _PREFILL_TOKENS
        spans: list[Span] = []
        owners: dict[bytes, int] = {}  # prompt -> index of its span
        twins: dict[int, list[int]] = {}  # index of a span -> rows with the same prompt
        while self._waiting and not rows.live.all():
            if budget <= 0 and not (self._reuse and self._waiting[0].prompt.tobytes() in owners):
                break
            request = self._waiting.popleft()
            key = request.prompt.tobytes()
            if self._reuse and key in owners:
                row = rows.place(0, 0)
                request.cached = len(request.prompt)
                twins.setdefault(owners[key], []).append(row)
            else:
                reuse = self._reuse and not self._alone
                source, shared = rows.longest_prefix(request.prompt) if reuse else (0, 0)
                row = rows.place(source, shared)
                request.cached = shared
                owners[key] = len(spans)
                spans.append(Span(row=row, start=shared, ids=request.prompt[shared:], source=source if shared else row))
                budget -= len(request.prompt) - shared
            rows.occupy(row, request)
            if row not in twins.get(owners[key], ()):
                rows.cached[row] = len(request.prompt)  # later spans of this very pass may start from it
            request.versions.append((self.version, 0))
            self.stats.cached_tokens += request.cached
            self.stats.prefill_tokens += len(request.prompt) - request.cached
        logits = self._decoder.prefill(self._cache, spans)
        placed, index = [span.row for span in spans], list(range(len(spans)))
        for owner, copies in twins.items():
            size = int(rows.prompt[spans[owner].row])
            self._cache.copy(spans[owner].row, copies, size)
            rows.cached[copies] = size
            placed += copies
            index += [owner] * len(copies)
        self.stats.prefill_s += time.thread_time() - began
        self._emit(
            np.array(placed), logits if len(index) == len(spans) else logits[torch.tensor(index, device=logits.device)]
        )

    def _decode(self, live: np.ndarray) -> None:
        began = time.thread_time()
        rows = self._rows
        newest = rows.size[live] - 1
        batches = np.arange(len(live))[:, None] if self._alone else [slice(None)]
        logits = torch.cat(
            [self._decoder.decode(self._cache, live[b], rows.tokens[live[b], newest[b]], newest[b]) for b in batches]
        )
        rows.cached[live] = np.where(rows.fresh[live], newest + 1, 0)
        self.stats.steps += 1
        self.stats.decode_s += time.thread_time() - began
        self._emit(live, logits)

    def _emit(self, placed: np.ndarray, logits: Tensor) -> None:
        """Sample the next token of the rows `placed` from their `logits`, and end those that are complete."""
        began = time.thread_time()
        rows = self._rows
        size = rows.size[placed]
        uniform = sampler.uniforms(rows.seed[placed], size - rows.prompt[placed])
        drawn, logprobs = sampler.choose(
            logits, rows.temperature[placed], rows.top_p[placed], rows.top_k[placed], uniform
        )
        tokens = drawn.cpu().numpy()
        rows.tokens[placed, size] = tokens
        rows.logprobs[placed, size] = logprobs.cpu().numpy()
        rows.size[placed] = size + 1
        broken = ~np.isfinite(rows.logprobs[placed, size])
        stopped = (rows.stop[placed] == tokens[:, None]).any(1)
        ended = (stopped | (size + 1 >= rows.limit[placed])) & ~broken
        for row, at_stop in zip(placed[ended].tolist(), stopped[ended].tolist(), strict=True):
            self._finish(row, "stop" if at_stop else "length")
        for row in placed[broken].tolist():
            request_id = rows.requests[row].id
            rows.vacate(row, "abort")
            rows.cached[row] = 0
            self._cache.clear(row)
            self._done.append(
                (request_id, EngineError(f"weights version {self.version} give logits that are not finite"))
            )
        self.stats.decode_tokens += len(placed)
        self.stats.sample_s += time.thread_time() - began

    def _finish(self, row: int, reason: str) -> None:
        request_id = self._rows.requests[row].id
        self._done.append((request_id, self._rows.vacate(row, reason)))
