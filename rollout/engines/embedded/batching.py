"""Continuous batching: the embedded engine over the rows of its KV cache."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.embedded.attention import (
    AttentionPlanner,
    GroupBlock,
    RowBlock,
    row_blocks,
)
from rollout.engines.embedded.cache import DecodeBatch, KVCache
from rollout.engines.embedded.decoder import CachedDecoder, PromptSpan
from rollout.engines.embedded.exact_decoder import exact_decoder
from rollout.engines.embedded.gpu_decoder import GpuDecoder, make_decoder
from rollout.engines.embedded.gpu_steps import CudaGraphs, GpuSteps
from rollout.engines.embedded.requests import Generation, Outcome, Report, Request
from rollout.engines.embedded.rows import CacheRows
from rollout.engines.embedded.schedule import admit
from rollout.engines.prompt_length import request_error
from rollout.engines.protocol import ScoredReply, Tag
from rollout.models.adapter_weights import AdapterWeights
from rollout.models.architecture import read_architecture
from rollout.models.grammars import GrammarError, Grammars
from rollout.models.tensors import WeightStream, read_tensors
from rollout.records.trajectory import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher

BUSY = "the engine cannot sleep while requests are running; end or abort them first"

# While no request ends, an exchange may last this many times its `budget_s`. The factor is
# larger if the client can interrupt the exchange.
_INTERRUPTIBLE_BUDGET_FACTOR = 15
_UNINTERRUPTIBLE_BUDGET_FACTOR = 5


@dataclass(slots=True)
class Stats:
    """Work of an engine so far; seconds are CPU time of its thread.

    Attributes:
        prefill_tokens: number of prompt tokens that were computed.
        cached_tokens: number of prompt tokens whose keys were reused.
        decode_tokens: number of completion tokens that were sampled.
        steps: number of decoding steps. Each computes one token of every running request.
        prefill_s: seconds of passes over prompts.
        decode_s: seconds of decoding steps; on a GPU with the sampling of `GpuSteps`.
        sample_s: seconds of all other sampling.
    """

    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0


class EmbeddedEngine:
    """Engine that decodes many requests at once; it is used by one thread at a time.

    A request's tokens depend on its prompt, its sampling and the weights. Other requests of the
    batch change only the last bits of log-probabilities, because a matrix product of more rows may
    add up its terms in another order. In deterministic mode they change nothing.

    Deterministic mode uses `ExactDecoder` if it can (see `exact_decoder`). A trainer in deterministic
    mode then computes the same bits. Otherwise every sequence is decoded alone, which is several
    times slower.

    Attributes:
        decoder: the model and its weights.
        stats: work so far.
        max_length: maximum number of tokens of prompt and reply.
        interrupt: int64 [1], not 0 if the client has new requests, aborts or calls; None if the
            client cannot interrupt the engine.
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
        grammars: Grammars | None = None,
        graphs: bool = True,
    ) -> None:
        """Allocate the KV cache.

        Args:
            rows: number of sequences that the cache holds: running ones, and ended ones whose
                prefixes may be reused. There are fewer if a GPU has no memory for all of them.
            version: version of the decoder's weights.
            reuse_prefixes: start a prompt from the cached keys of the longest prefix.
            deterministic: give a reply the same bits in any batch.
            routing: record the experts of each token in the completions.
            grammars: grammars of the model; None: requests that have a grammar are refused.
            graphs: decode with CUDA graphs on a GPU. A mixture of experts is decoded without them.

        Raises:
            EngineError: a GPU has no memory for even one sequence.
        """
        self.decoder = exact_decoder(decoder) if deterministic else decoder
        self.max_length = decoder.max_length
        self.stats = Stats()
        self.interrupt: np.ndarray | None = None
        self._reuse_prefixes = reuse_prefixes
        self._routing = routing
        self._grammars = grammars
        self._one_by_one = deterministic and not self.decoder.exact
        self._rows = CacheRows(decoder.rows_that_fit(rows), decoder.max_length, version)
        self._graphs = graphs and decoder.shape.experts is None
        self._cache: KVCache | None = None
        self._attention: AttentionPlanner | None = None  # None on a GPU, and without a cache
        self._steps: GpuSteps | None = None
        self._asleep: set[Tag] = set()
        self._waiting: deque[Generation] = deque()
        self._done: list[tuple[int, Outcome]] = []
        self.wake(["kv_cache"])

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        max_length: int,
        device: str = "cpu",
        bf16: bool = False,
        rows: int = 192,
        version: int = 0,
        reuse_prefixes: bool = True,
        deterministic: bool = False,
        routing: bool = False,
    ) -> EmbeddedEngine:
        """Build an engine of a Hugging Face model folder; see `CachedDecoder` and the constructor.

        Raises:
            EngineError: the folder has no model, or one that this engine does not support.
        """
        decoder = make_decoder(read_architecture(folder), max_length, device=device, bf16=bf16)
        decoder.load(read_tensors(folder), str(folder))
        return cls(
            decoder,
            rows=rows,
            version=version,
            reuse_prefixes=reuse_prefixes,
            deterministic=deterministic,
            routing=routing,
            grammars=Grammars(folder),
        )

    @property
    def version(self) -> int:
        """Version of the weights, without adapters."""
        return self._rows.versions[0]

    @property
    def has_work(self) -> bool:
        """True if `step` has something to compute or to return."""
        return bool(self._waiting or self._done or self._rows.live.any())

    def submit(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        adapter: int = 0,
        notify_every: int = 0,
    ) -> None:
        """Queue a request (see `Request`); `step` returns an error if it cannot be served."""
        problem = "the engine sleeps; wake it first" if self._asleep else ""
        problem = problem or request_error(
            prompt_ids,
            sampling,
            vocab_size=self.decoder.shape.vocab,
            max_length=self.max_length,
        )
        if problem:
            self._done.append((request_id, EngineError(problem)))
            return
        matcher = None
        if sampling.grammar:
            try:
                matcher = self._match(sampling.grammar)
            except GrammarError as error:
                self._done.append((request_id, EngineError(f"the grammar of the reply: {error}")))
                return
        self._waiting.append(
            Generation(
                id=request_id,
                prompt=np.asarray(prompt_ids, dtype=np.int64),
                sampling=sampling,
                adapter=adapter,
                notify_every=notify_every,
                matcher=matcher,
            )
        )

    def _match(self, grammar: str) -> LLMatcher:
        """Return a matcher of a grammar; raise GrammarError if there can be none."""
        if self._grammars is None:
            raise GrammarError("this engine was made without the tokenizer of its model")
        return self._grammars.matcher(grammar)

    def exchange(
        self, requests: list[Request], aborts: list[int], budget_s: float = 0.0
    ) -> list[Report]:
        """Take new requests, abort others, and decode for about `budget_s`, but at least for one step.

        If no request has ended by then, decoding continues until one ends or the client interrupts
        it, for at most several times `budget_s`. It does not continue if a request reports every token
        (`notify_every` is 1).

        Returns:
            Outcomes of the requests that have ended, and then new tokens of those that run.
        """
        for request in requests:
            self.submit(
                request.id,
                request.prompt_ids,
                request.sampling,
                adapter=request.adapter,
                notify_every=request.notify_every,
            )
        self.abort(aborts)

        began = time.monotonic()
        long_budget_s = budget_s * self._budget_factor()
        reports: list[Report] = []
        try:
            while self.has_work:
                reports += self.step()
                interrupted = self.interrupt is not None and bool(self.interrupt[0])
                limit_s = budget_s if reports or interrupted else long_budget_s
                if time.monotonic() - began >= limit_s:
                    break
        except Exception:
            self.reset()
            raise
        return [*reports, *self._rows.new_tokens()]

    def _budget_factor(self) -> int:
        """Return how many times `budget_s` an exchange may last if no request ends."""
        for generation in (*self._waiting, *self._rows.generations):
            if generation is not None and generation.notify_every == 1:
                return 1
        if self.interrupt is None:
            return _UNINTERRUPTIBLE_BUDGET_FACTOR
        return _INTERRUPTIBLE_BUDGET_FACTOR

    def step(self) -> list[tuple[int, Outcome]]:
        """Admit waiting requests, decode a token for each running one, and return the outcomes.

        Returns:
            Request id and outcome of the requests that have ended.
        """
        while self._waiting and not self._rows.live.all():
            self._prefill()
        live = np.flatnonzero(self._rows.live)
        if len(live):
            self._decode(live)
        done, self._done = self._done, []
        return done

    def score(self, replies: Sequence[ScoredReply], adapter: int = 0) -> list[list[float]]:
        """Return the log-probabilities of replies; see `ScoringEngine`.

        Args:
            adapter: number of the adapter to compute with; 0 for none.

        Raises:
            EngineError: the engine's weights sleep, or a reply is too long, or has token ids outside
                the vocabulary.
        """
        for reply in replies:
            problem = self._scoring_problem(reply)
            if problem:
                raise EngineError(problem)
        scores: list[list[float]] = []
        for part in _parts(replies, self.decoder.prefill_tokens, one_by_one=self._one_by_one):
            longest = max(len(reply.prompt_ids) + len(reply.completion_ids) for reply in part)
            cache = KVCache(
                self.decoder.shape,
                len(part),
                longest,
                self.decoder.device,
                dtype=self.decoder.cache_dtype,
                exact=self.decoder.exact,
                one_layer=True,
            )
            spans = [
                PromptSpan(
                    row=row,
                    start=0,
                    token_ids=np.array([*reply.prompt_ids, *reply.completion_ids], dtype=np.int64),
                    source=row,
                    adapter=adapter,
                )
                for row, reply in enumerate(part)
            ]
            prompt_sizes = [len(reply.prompt_ids) for reply in part]
            temperatures = [reply.temperature for reply in part]
            logprobs = self.decoder.score(cache, spans, prompt_sizes, temperatures)
            scores += [row.tolist() for row in logprobs]
        return scores

    def _scoring_problem(self, reply: ScoredReply) -> str:
        """Validate a reply to score; return the first problem, or ""."""
        if "weights" in self._asleep:
            return "the engine sleeps; wake it first"
        sampling = Sampling(temperature=reply.temperature, max_tokens=len(reply.completion_ids))
        problem = request_error(
            reply.prompt_ids,
            sampling,
            vocab_size=self.decoder.shape.vocab,
            max_length=self.max_length,
        )
        if problem:
            return problem
        vocab = self.decoder.shape.vocab
        if min(reply.completion_ids) < 0 or max(reply.completion_ids) >= vocab:
            return f"the reply has token ids outside 0..{vocab - 1}; is it from another tokenizer?"
        return ""

    def abort(self, request_ids: Collection[int]) -> None:
        """End requests; the next `step` returns their tokens so far, with finish reason `abort`."""
        aborted = set(request_ids)
        waiting: deque[Generation] = deque()
        for generation in self._waiting:
            if generation.id in aborted:
                completion = self._rows.empty_completion(generation)
                self._done.append((generation.id, completion))
            else:
                waiting.append(generation)
        self._waiting = waiting
        for row in np.flatnonzero(self._rows.live).tolist():
            if self._rows.generations[row].id in aborted:
                self._finish(row, "abort")

    def load_weights(self, stream: WeightStream, version: int) -> None:
        """Replace all weights by a stream of full tensors.

        Cached prefixes of requests without an adapter are dropped. Running requests continue with
        the keys that they have and the new weights; their version spans say from which token on.
        """
        self.decoder.load(stream)
        self._rows.set_version(version, 0)

    def adopt(self, half: int, version: int) -> None:
        """Activate the weights that were written into the decoder's `half`; see `load_weights`."""
        self.decoder.adopt(half)
        self._rows.set_version(version, 0)

    def adopt_adapter(self, number: int, weights: AdapterWeights, version: int) -> None:
        """Replace the weights of adapter `number`, counted from 1; 0 is the base model.

        Running requests of the adapter continue with the new weights, as in `load_weights`.

        Raises:
            EngineError: a tensor has infinite values or NaN; the adapter stays as it was.
        """
        assert self.decoder.adapters is not None
        self.decoder.adapters.put(number, weights)
        self._rows.set_version(version, number)

    def sleep(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> None:
        """Free the memory that `tags` name.

        "kv_cache" is the KV cache, and "weights" the decoder's copies of the active weights. The active
        weights themselves stay in the host's memory, and `wake` copies them again.

        Raises:
            EngineError: requests are running, or have outcomes that `step` has not returned yet.
        """
        if self.has_work:
            raise EngineError(BUSY)
        self._asleep.update(tags)
        self._steps = None  # graphs hold the addresses of weights and cache
        if "weights" in tags:
            self.decoder.release()
        if "kv_cache" in tags:
            self._rows.cached[:] = 0
            self._cache = None
            self._attention = None  # it holds the cache and copies of prefixes
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes on this GPU

    def wake(self, tags: Collection[Tag] = ("weights", "kv_cache")) -> None:
        """Allocate again what was freed; the KV cache is then empty."""
        self._asleep.difference_update(tags)
        if "weights" in tags:
            self.decoder.restore()
        if "kv_cache" in tags and self._cache is None:
            self._cache = KVCache(
                self.decoder.shape,
                len(self._rows.live),
                self.max_length,
                self.decoder.device,
                dtype=self.decoder.cache_dtype,
                routing=self._routing,
                exact=self.decoder.exact,
            )
            if not self.decoder.on_gpu:
                self._attention = AttentionPlanner(self._cache)
        if self._cache is not None and not self._asleep:
            self._steps = self._make_steps(self._cache)

    def _make_steps(self, cache: KVCache) -> GpuSteps | None:
        """Return the decoding steps on a GPU; None on a CPU."""
        if not isinstance(self.decoder, GpuDecoder):
            return None
        if not self._graphs or self.decoder.device.type != "cuda":
            return GpuSteps(self.decoder, cache)
        return GpuSteps(self.decoder, cache, capture=CudaGraphs(self.decoder.device).capture)

    def reset(self) -> None:
        """Drop all requests and cached prefixes, after `step` has raised."""
        self._waiting.clear()
        self._done.clear()
        self._rows.live[:] = False
        self._rows.generations[:] = None
        self._rows.cached[:] = 0

    def _prefill(self) -> None:
        """Compute prompts of waiting requests in one pass, and sample their first tokens."""
        assert self._cache is not None
        began = time.thread_time()
        spans = admit(
            self._rows,
            self._waiting,
            budget=self.decoder.prefill_tokens,
            reuse_prefixes=self._reuse_prefixes,
            one_by_one=self._one_by_one,
        )
        logits = self.decoder.prefill(self._cache, spans)

        admitted = [span.row for span in spans]  # cache rows
        logits_rows = list(range(len(spans)))  # for each of `admitted`, its row in `logits`
        for number, span in enumerate(spans):
            if span.copies:
                size = int(self._rows.prompt_size[span.row])
                self._cache.copy_prefix(span.row, span.copies, size)
                self._rows.cached[span.copies] = size
                admitted += span.copies
                logits_rows += [number] * len(span.copies)
        for generation in self._rows.generations[admitted]:
            self.stats.cached_tokens += generation.cached_tokens
            self.stats.prefill_tokens += len(generation.prompt) - generation.cached_tokens
        self.stats.prefill_s += time.thread_time() - began

        if len(admitted) > len(spans):
            logits = logits[torch.tensor(logits_rows, device=logits.device)]
        self._sample(np.array(admitted), logits)

    def _decode(self, live: np.ndarray) -> None:
        """Decode the newest tokens of the rows `live` [N], and sample the next ones."""
        batches = [live]
        if self._one_by_one:
            batches = [live[index : index + 1] for index in range(len(live))]
        if self._steps is not None:
            for rows in batches:
                self._decode_on_gpu(self._steps, rows)
            self.stats.steps += 1
            return
        began = time.thread_time()
        parts = [self._decode_rows(rows) for rows in batches]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._rows.mark_cached(live)
        self.stats.steps += 1
        self.stats.decode_s += time.thread_time() - began
        self._sample(live, logits)

    def _decode_on_gpu(self, steps: GpuSteps, rows: np.ndarray) -> None:
        """Decode `rows` [N] and sample their next tokens in one step.

        If a request has top-p, top-k, a grammar or candidates, sample all rows again from the logits.
        """
        began = time.thread_time()
        batch, token_ids = self._rows.decode_batch(rows)
        temperature = self._rows.temperature[rows]
        step = steps.run(batch, token_ids, temperature, self._rows.uniforms(rows))
        self._rows.mark_cached(rows)
        is_plain = bool(self._rows.plain[rows].all())
        if is_plain:
            tokens, logprobs = step.sampled()
        self.stats.decode_s += time.thread_time() - began
        if is_plain:
            self._append(rows, tokens, logprobs)
        else:
            self._sample(rows, step.logits)

    def _decode_rows(self, rows: np.ndarray) -> Tensor:
        """Decode the newest tokens of `rows` [N] on the CPU; return the logits [N, V]."""
        assert self._cache is not None
        batch, token_ids = self._rows.decode_batch(rows)
        return self.decoder.decode(self._cache, batch, self._plan_attention(batch), token_ids)

    def _plan_attention(self, batch: DecodeBatch) -> Sequence[RowBlock | GroupBlock]:
        """Return the attention blocks of a batch; in exact mode, only row blocks."""
        if self.decoder.exact:
            return row_blocks(batch, self.decoder.device)
        assert self._attention is not None
        return self._attention.plan(batch)

    def _sample(self, rows: np.ndarray, logits: Tensor) -> None:
        """Sample the next tokens of `rows` [N] from logits [N, V], and append them; see `_append`."""
        began = time.thread_time()
        tokens, logprobs = self._rows.sample(rows, logits)
        self._append(rows, tokens, logprobs)
        self.stats.sample_s += time.thread_time() - began

    def _append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Append a token to each of `rows` [N].

        End requests that stop, reach their limit, or had logits that are not finite.
        """
        assert self._cache is not None
        stopped, ended, broken = self._rows.append(rows, tokens, logprobs)
        for row, is_stop in zip(rows[ended].tolist(), stopped[ended].tolist(), strict=True):
            self._finish(row, "stop" if is_stop else "length")
        for row in rows[broken].tolist():
            generation = self._rows.generations[row]
            self._done.append((generation.id, generation.failure()))
            self._rows.vacate(row, "abort")
            self._rows.cached[row] = 0
            self._cache.clear(row)
        self.stats.decode_tokens += len(rows)

    def _finish(self, row: int, finish_reason: str) -> None:
        """End the request in a row, and keep its completion for the next `step`."""
        assert self._cache is not None
        request_id = self._rows.generations[row].id
        computed_tokens = int(self._rows.size[row]) - 1  # all but the newest
        routing = self._cache.routing_bytes(row, computed_tokens)
        self._done.append((request_id, self._rows.vacate(row, finish_reason, routing)))


def _parts(
    replies: Sequence[ScoredReply], tokens: int, *, one_by_one: bool
) -> Iterator[list[ScoredReply]]:
    """Split replies into parts, each of which is scored in one pass.

    Args:
        tokens: maximum number of tokens that the cache of a part with several replies holds. In the
            cache, each reply and its prompt take as many tokens as the longest of the part.
        one_by_one: give each reply a part of its own.
    """
    part: list[ScoredReply] = []
    longest = 0
    for reply in replies:
        length = len(reply.prompt_ids) + len(reply.completion_ids)
        longest = max(longest, length)
        if part and (one_by_one or (len(part) + 1) * longest > tokens):
            yield part
            part = []
            longest = length
        part.append(reply)
    if part:
        yield part
