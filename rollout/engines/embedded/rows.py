"""Key-value cache rows and the sampler: which request and tokens each row holds, and how the next token is drawn."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engines.embedded.cache import Decoding
from rollout.engines.embedded.decoder import Span
from rollout.records.trajectory import Completion, Sampling, VersionSpan

_PREFILL_TOKENS = 1024  # of one forward pass; more would leave the processor's cache
_NEVER = np.iinfo(np.int64).max


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """One generation, waiting or running."""

    id: int
    prompt: np.ndarray  # [P] int64
    sampling: Sampling
    adapter: int = 0  # number of the one it is computed with; 0: none
    versions: list[tuple[int, int]] = field(
        default_factory=list
    )  # (weights version, its first completion token)
    cached: int = 0  # prompt tokens that were not computed again
    stream: int = 0  # tokens that are worth telling before it is whole; 0: none are told
    told: int = 0  # completion tokens that were


class CacheRows:
    """Columns over cache rows; row r of every column belongs to row r of the key-value cache."""

    def __init__(self, rows: int, length: int, version: int = 0) -> None:
        self.live = np.zeros(rows, dtype=bool)
        self.requests = np.full(rows, None, dtype=object)
        self.tokens = np.zeros((rows, length), dtype=np.int64)  # prompt, then completion
        self.logprobs = np.zeros((rows, length), dtype=np.float32)  # valid at completion positions
        self.size = np.zeros(rows, dtype=np.int64)  # tokens known; the newest one has no keys yet
        self.prompt = np.zeros(rows, dtype=np.int64)  # prompt tokens
        self.limit = np.zeros(rows, dtype=np.int64)  # size at which a generation is out of tokens
        self.cached = np.zeros(rows, dtype=np.int64)  # tokens whose keys may be reused by anyone
        # rows of the same group have the same keys at `common` leading positions; it began at `group` modulo `rows`
        self.group = np.arange(rows)
        self.common = np.zeros(rows, dtype=np.int64)
        self.adapter = np.zeros(rows, dtype=np.int64)  # that the keys are of
        self.fresh = np.zeros(rows, dtype=bool)  # all keys come from the present weights
        self.used = np.zeros(rows, dtype=np.int64)  # clock of the last use
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.zeros(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.stop = np.full((rows, 1), -1, dtype=np.int64)
        self.versions = defaultdict[int, int](
            int, {0: version}
        )  # of weights, and of adapters by their numbers
        self._clock = self._groups = 0

    def newest(self, rows: np.ndarray) -> tuple[Decoding, np.ndarray]:
        """What is to decode of some rows, ascending, and their newest tokens [N]."""
        last = self.size[rows] - 1
        group, common, adapters = self.group[rows], self.common[rows], self.adapter[rows]
        batch = Decoding(rows=rows, positions=last, groups=group, common=common, adapters=adapters)
        return batch, self.tokens[rows, last]

    def longest_prefix(self, prompt: np.ndarray, adapter: int) -> tuple[int, int]:
        """The row of an adapter that shares most leading tokens with `prompt` and how many; all but one at most."""
        usable = np.where(self.adapter == adapter, np.minimum(self.cached, len(prompt) - 1), 0)
        rows = np.flatnonzero(usable)
        if not len(rows):
            return 0, 0
        width = int(usable.max())
        same = self.tokens[rows, :width] == prompt[:width]
        shared = np.where(same.all(1), width, same.argmin(1))
        shared = np.minimum(shared, usable[rows])
        best = int(shared.argmax())
        return int(rows[best]), int(shared[best])

    def place(self, source: int, shared: int) -> int:
        """The idle row for a prompt that shares `shared` tokens with row `source`."""
        if shared and not self.live[source] and self.cached[source] == shared:
            return source  # it goes on where that row ended
        return int(np.where(self.live, _NEVER, np.where(self.cached > 0, self.used, -1)).argmin())

    def occupy(
        self,
        row: int,
        request: GenerationRequest,
        source: int = 0,
        shared: int = 0,
        *,
        most: bool = False,
    ) -> None:
        """Put a request into a row; of its keys, which are not there yet, `shared` will be those of row `source`.

        It joins that row's group if it shares half of what the group does, and with `most` half of its prompt as well:
        equal prompts that begin as others do share more among themselves.
        """
        sampling, size = request.sampling, len(request.prompt)
        common = min(shared, int(self.common[source]))
        if 2 * shared >= max(1, int(self.common[source])) and 2 * common >= size * most:
            self.group[row], self.common[row] = self.group[source], common
        else:
            self._groups += 1
            self.group[row], self.common[row] = self._groups * len(self.live) + row, size
        self.live[row] = self.fresh[row] = True
        self.requests[row] = request
        self.adapter[row] = request.adapter
        request.versions.append((self.versions[request.adapter], 0))
        self.tokens[row, :size] = request.prompt
        self.size[row] = self.prompt[row] = size
        self.limit[row] = size + sampling.max_tokens
        self.cached[row] = 0
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.seed[row] = sampling.seed % 2**64
        missing = len(sampling.stop) - self.stop.shape[1]
        if missing > 0:
            self.stop = np.pad(self.stop, ((0, 0), (0, missing)), constant_values=-1)
        self.stop[row] = -1
        self.stop[row, : len(sampling.stop)] = sampling.stop
        self.touch(row)

    def vacate(self, row: int, reason: str, routing: bytes = b"") -> Completion:
        """End the generation in a row and return it, with its `routing`; the keys stay until the row is needed."""
        completion = self._completion(row, reason, routing)
        self.live[row] = False
        self.requests[row] = None
        self.touch(row)
        return completion

    def _completion(self, row: int, reason: str, routing: bytes) -> Completion:
        """Return the completion in a row."""
        request: GenerationRequest = self.requests[row]
        start = int(self.prompt[row])
        end = int(self.size[row])
        ends = [first for _, first in request.versions[1:]] + [end - start]
        spans = tuple(
            VersionSpan(version=version, start=first, end=last)
            for (version, first), last in zip(request.versions, ends, strict=True)
        )
        return Completion(
            token_ids=tuple(self.tokens[row, start:end].tolist()),
            logprobs=tuple(self.logprobs[row, start:end].tolist()),
            finish_reason=reason,
            versions=spans,
            cached_tokens=request.cached,
            routing=routing,
        )

    def nothing(self, request: GenerationRequest) -> Completion:
        """The completion of a request that never had a row."""
        version = VersionSpan(version=self.versions[request.adapter], start=0, end=0)
        return Completion(token_ids=(), logprobs=(), finish_reason="abort", versions=(version,))

    def draw(self, placed: np.ndarray, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Next token [N] and its log-probability [N] of the rows `placed` [N] by their `logits` [N, V]."""
        uniform = uniforms(self.seed[placed], self.size[placed] - self.prompt[placed])
        tokens, logprobs = choose(
            logits, self.temperature[placed], self.top_p[placed], self.top_k[placed], uniform
        )
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def append(
        self, placed: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give each of the rows `placed` [N] its next token; which [N] stop, which end, and which have no logits."""
        size = self.size[placed]
        self.tokens[placed, size] = tokens
        self.logprobs[placed, size] = logprobs
        self.size[placed] = size + 1
        broken = ~np.isfinite(logprobs)
        stopped = (self.stop[placed] == tokens[:, None]).any(1)
        return stopped, (stopped | (size + 1 >= self.limit[placed])) & ~broken, broken

    def news(self) -> list[tuple[int, tuple[int, list[int]]]]:
        """Return request id, position and token ids of new tokens, of the requests that have enough of them.

        Every token is returned once.
        """
        news = []
        for row in np.flatnonzero(self.live).tolist():
            request: GenerationRequest = self.requests[row]
            size = int(self.size[row] - self.prompt[row])
            if request.stream and size - request.told >= request.stream:
                start = int(self.prompt[row]) + request.told
                token_ids: list[int] = self.tokens[row, start : int(self.size[row])].tolist()
                news.append((request.id, (request.told, token_ids)))
                request.told = size
        return news

    def renew(self, version: int, adapter: int) -> None:
        """Forget what was cached with an adapter's other weights; what runs goes on with those of `version`."""
        own = self.adapter == adapter
        self.versions[adapter] = version
        self.cached[own] = 0
        self.fresh[own] = False
        for row in np.flatnonzero(self.live & own):
            versions, first = self.requests[row].versions, int(self.size[row] - self.prompt[row])
            if versions[-1][1] == first:
                versions.pop()
            versions.append((version, first))

    def touch(self, row: int) -> None:
        """Note that a row was used now."""
        self._clock += 1
        self.used[row] = self._clock


def plan(
    rows: CacheRows, waiting: deque[GenerationRequest], *, reuse: bool, alone: bool
) -> list[Span]:
    """Place waiting requests in cache rows, equal prompts side by side, up to one pass's budget; what is to compute."""
    budget = 1 if alone else _PREFILL_TOKENS
    spans: list[Span] = []
    equal = defaultdict[tuple[int, bytes | int], deque[GenerationRequest]](deque)
    for request in waiting:
        equal[request.adapter, request.prompt.tobytes() if reuse else request.id].append(request)
    for same in equal.values():
        if budget <= 0 or rows.live.all():
            break
        request = same.popleft()
        size = len(request.prompt)
        source, shared = (
            rows.longest_prefix(request.prompt, request.adapter) if reuse and not alone else (0, 0)
        )
        row = rows.place(source, shared)
        request.cached = shared
        source = source if shared else row
        spans.append(
            Span(
                row=row,
                start=shared,
                ids=request.prompt[shared:],
                source=source,
                adapter=request.adapter,
            )
        )
        budget -= size - shared
        rows.occupy(row, request, source, shared, most=bool(same))
        rows.cached[row] = size  # later spans of this very pass may start from it
        while same and not rows.live.all():
            spans[-1].copies.append(copy := rows.place(0, 0))
            same[0].cached = size
            rows.occupy(copy, same.popleft(), row, size)
    waiting.clear()
    waiting.extend(chain.from_iterable(equal.values()))
    return spans


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One float32 in [0, 1) per (seed, position), independent of everything else.

    `seeds` is uint64 [N] and `positions` an integer [N]: the index of the token in its completion.
    """
    counter = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (_mix(counter) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(z: np.ndarray) -> np.ndarray:
    # splitmix64, Steele, Lea and Flood 2014
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def choose(
    logits: Tensor,
    temperature: np.ndarray,
    top_p: np.ndarray,
    top_k: np.ndarray,
    uniform: np.ndarray,
) -> tuple[Tensor, Tensor]:
    """Token int64 [N] and log-probability float32 [N] for each row of `logits` float32 [N, V].

    A token is the inverse of the cumulative distribution at `uniform` [N]. Its log-probability is that of the full
    distribution after temperature, before top-p and top-k; NaN where the logits are not finite. Temperature 0 takes
    the most likely token; its log-probability is that of temperature 1. Top-k and top-p both look at the distribution
    after temperature (a token stays when it is among the k likeliest and the mass before it is below p), as in SGLang.
    """
    device = logits.device
    greedy = temperature == 0
    if (temperature != 1).any():
        scale = np.where(greedy, 1, temperature).astype(np.float32)
        logits = logits / torch.from_numpy(scale).to(device)[:, None]
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()
    # of what is above the peak: as an exact head of the trainer, to the bit
    log_sum = weights.sum(-1, keepdim=True).log_()
    cut = np.flatnonzero((top_p < 1) | (top_k > 0))
    if len(cut):
        rows, p, k = (torch.from_numpy(array).to(device) for array in (cut, top_p[cut], top_k[cut]))
        weights[rows] = _truncate((logits[rows] - peak[rows] - log_sum[rows]).exp_(), p, k)
    tokens = _inverse(weights, torch.from_numpy(uniform).to(device)[:, None])
    if greedy.any():
        tokens = torch.where(
            torch.from_numpy(greedy).to(device)[:, None], logits.argmax(-1, keepdim=True), tokens
        )
    return tokens[:, 0], (logits.gather(-1, tokens) - peak - log_sum)[:, 0]


_BLOCK = 64  # tokens whose weights are summed before they are looked at one by one


def _inverse(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token [N, 1] at which the running sum of `weights` [N, V] passes `uniform` [N, 1] times their total."""
    missing = -weights.shape[1] % _BLOCK
    blocks = (F.pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(-1).cumsum_(-1)
    point = uniform * sums[:, -1:]
    block = _passed(sums, point)
    point -= torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].cumsum_(-1)
    return (block * _BLOCK + _passed(inside, point)).clamp_(max=weights.shape[1] - 1)


def _passed(sums: Tensor, point: Tensor) -> Tensor:
    """Where running sums [N, K] first exceed `point` [N, 1], which rounding may have lifted past the last of them."""
    last = sums[:, -1:]
    below = torch.minimum(point, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(sums, below, right=True).clamp_(
        max=sums.shape[1] - 1
    )  # NaN sorts last


def _truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = (before < top_p[:, None]) & ((rank < top_k[:, None]) | (top_k[:, None] == 0))
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(-1, order, ordered * keep)
