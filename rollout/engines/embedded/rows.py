"""Rows of the embedded engine's KV cache: the request and the tokens that each holds."""

import math
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from rollout.engines.embedded.cache import DecodeBatch
from rollout.engines.embedded.requests import Generation, NewTokens
from rollout.engines.embedded.sampling import likeliest_tokens, sample_tokens, uniforms
from rollout.models.grammars import next_mask, unpack_masks
from rollout.records.trajectory import Completion, VersionSpan

_NOT_IDLE = np.iinfo(np.int64).max  # stands for the `last_used` of live rows: none is chosen


class CacheRows:
    """Requests and tokens in the rows of the KV cache.

    All attributes but `versions` are columns: entry r describes row r.

    Attributes:
        live: True while a request runs in the row.
        generations: the running `Generation`, or None.
        tokens: token ids of prompt and completion [rows, length].
        logprobs: log-probabilities of the completion's tokens, at their positions [rows, length].
        size: number of known tokens. The newest has no keys yet.
        prompt_size: number of tokens of the prompt.
        max_size: `size` at which the completion has reached its `max_tokens`.
        cached: number of leading tokens whose keys other requests may reuse.
        group: group number. A group begins with one prompt, in row `group % rows`; rows that copy
            enough keys from one of its rows join it (see `occupy`).
        shared: number of leading positions at which the row's keys equal those of the prompt with
            which its group began.
        adapter: number of the adapter that the keys were computed with; 0 for none.
        fresh: True if all keys come from the present weights.
        last_used: number of the last use; later uses have larger numbers.
        temperature, top_p, top_k, seed, stop: sampling of the request; `stop` is padded by -1.
        plain: True if the request has no top-p, top-k, grammar or candidates.
        versions: present version of each adapter, by number; 0 is the full weights.
    """

    def __init__(self, rows: int, length: int, version: int = 0) -> None:
        """Allocate `rows` rows of at most `length` tokens; `version` is that of the weights."""
        self.live = np.zeros(rows, dtype=bool)
        self.generations = np.full(rows, None, dtype=object)
        self.tokens = np.zeros((rows, length), dtype=np.int64)
        self.logprobs = np.zeros((rows, length), dtype=np.float32)
        self.size = np.zeros(rows, dtype=np.int64)
        self.prompt_size = np.zeros(rows, dtype=np.int64)
        self.max_size = np.zeros(rows, dtype=np.int64)
        self.cached = np.zeros(rows, dtype=np.int64)
        self.group = np.arange(rows)
        self.shared = np.zeros(rows, dtype=np.int64)
        self.adapter = np.zeros(rows, dtype=np.int64)
        self.fresh = np.zeros(rows, dtype=bool)
        self.last_used = np.zeros(rows, dtype=np.int64)
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.zeros(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.stop = np.full((rows, 1), -1, dtype=np.int64)
        self.plain = np.zeros(rows, dtype=bool)
        self.versions = defaultdict[int, int](int, {0: version})
        self._clock = 0  # number of uses so far
        self._groups = 0  # number of groups so far

    def decode_batch(self, rows: np.ndarray) -> tuple[DecodeBatch, np.ndarray]:
        """Return the batch in which `rows` [N], ascending, decode next, and their newest tokens [N]."""
        positions = self.size[rows] - 1
        batch = DecodeBatch(
            rows=rows,
            positions=positions,
            groups=self.group[rows],
            shared=self.shared[rows],
            adapters=self.adapter[rows],
        )
        return batch, self.tokens[rows, positions]

    def mark_cached(self, rows: np.ndarray) -> None:
        """Let other requests reuse all keys of `rows` [N], unless some are of older weights."""
        self.cached[rows] = np.where(self.fresh[rows], self.size[rows], 0)

    def longest_prefix(self, prompt: np.ndarray, adapter: int) -> tuple[int, int]:
        """Find the row whose cached keys share the most leading tokens with a prompt.

        Args:
            prompt: token ids [P].
            adapter: number of the prompt's adapter. Keys of other adapters are not considered.

        Returns:
            The row, and the number of tokens, which is 0 if there is no such row. The last token of
            the prompt is never shared, because its logits are needed.
        """
        usable = np.where(self.adapter == adapter, np.minimum(self.cached, len(prompt) - 1), 0)
        rows = np.flatnonzero(usable)
        if not len(rows):
            return 0, 0
        width = int(usable.max())
        same = self.tokens[rows, :width] == prompt[:width]
        first_difference = same.argmin(1)  # 0 if there is none
        shared = np.where(same.all(1), width, first_difference)
        shared = np.minimum(shared, usable[rows])
        best = int(shared.argmax())
        return int(rows[best]), int(shared[best])

    def find_idle_row(self, source: int, shared: int) -> int:
        """Return the idle row for a prompt that shares `shared` tokens with row `source`.

        This is `source` itself if it is idle and the prompt continues all of its cached tokens, else
        an idle row without cached keys, else the idle row that was used least recently.
        """
        if shared and not self.live[source] and self.cached[source] == shared:
            return source
        last_used = np.where(self.cached > 0, self.last_used, -1)  # rows without keys come first
        return int(np.where(self.live, _NOT_IDLE, last_used).argmin())

    def occupy(
        self,
        row: int,
        generation: Generation,
        source: int = 0,
        shared: int = 0,
        *,
        has_copies: bool = False,
    ) -> None:
        """Put a request into an idle row, before the keys of its prompt are computed.

        The row joins the group of row `source` if two conditions hold:

        - It takes at least one key from `source`, and at least half as many as `source` has in common
          with the group.
        - No copies follow, or the row has at least half of its prompt in common with the group.

        Otherwise it begins a group of its own, in which the copies share the whole prompt.

        Args:
            source: row with the keys of the first `shared` tokens; it may be `row` itself.
            shared: number of these tokens; 0: all keys are computed.
            has_copies: True if other rows with the same prompt follow.
        """
        sampling = generation.sampling
        size = len(generation.prompt)
        group_shared = int(self.shared[source])
        common = min(shared, group_shared)
        takes_enough = shared > 0 and 2 * shared >= group_shared
        suits_copies = not has_copies or 2 * common >= size
        if takes_enough and suits_copies:
            self.group[row] = self.group[source]
            self.shared[row] = common
        else:
            self._groups += 1
            self.group[row] = self._groups * len(self.live) + row
            self.shared[row] = size

        self.live[row] = True
        self.fresh[row] = True
        self.generations[row] = generation
        self.adapter[row] = generation.adapter
        generation.versions.append((self.versions[generation.adapter], 0))
        self.tokens[row, :size] = generation.prompt
        self.size[row] = size
        self.prompt_size[row] = size
        self.max_size[row] = size + sampling.max_tokens
        self.cached[row] = 0

        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.seed[row] = sampling.seed % 2**64
        is_truncated = sampling.top_p < 1 or sampling.top_k > 0
        has_extras = generation.matcher is not None or sampling.candidates > 0
        self.plain[row] = not is_truncated and not has_extras
        missing = len(sampling.stop) - self.stop.shape[1]
        if missing > 0:
            self.stop = np.pad(self.stop, ((0, 0), (0, missing)), constant_values=-1)
        self.stop[row] = -1
        self.stop[row, : len(sampling.stop)] = sampling.stop
        self._touch(row)

    def vacate(self, row: int, finish_reason: str, routing: bytes = b"") -> Completion:
        """End the request in a row and return its completion; the keys stay for other requests."""
        completion = self._completion(row, finish_reason, routing)
        self.live[row] = False
        self.generations[row] = None
        self._touch(row)
        return completion

    def _completion(self, row: int, finish_reason: str, routing: bytes) -> Completion:
        """Return what the request in a row has sampled so far."""
        generation: Generation = self.generations[row]
        start = int(self.prompt_size[row])
        end = int(self.size[row])
        ends = [first for _, first in generation.versions[1:]] + [end - start]
        spans = tuple(
            VersionSpan(version=version, start=first, end=last)
            for (version, first), last in zip(generation.versions, ends, strict=True)
        )
        return Completion(
            token_ids=tuple(self.tokens[row, start:end].tolist()),
            logprobs=tuple(self.logprobs[row, start:end].tolist()),
            finish_reason=finish_reason,
            versions=spans,
            cached_tokens=generation.cached_tokens,
            routing=routing,
            candidates=tuple(generation.candidates),
        )

    def empty_completion(self, generation: Generation) -> Completion:
        """Return the completion of a request that was aborted before it had a row."""
        span = VersionSpan(version=self.versions[generation.adapter], start=0, end=0)
        return Completion(token_ids=(), logprobs=(), finish_reason="abort", versions=(span,))

    def uniforms(self, rows: np.ndarray) -> np.ndarray:
        """Return the random numbers of the next tokens of `rows` [N], float32 in [0, 1)."""
        return uniforms(self.seed[rows], self.size[rows] - self.prompt_size[rows])

    def sample(self, rows: np.ndarray, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Sample the next tokens of `rows` [N] from logits [N, V], and record requested candidates.

        Tokens that the grammar of a row forbids get the logit -∞. The sampled token advances the
        grammar. `append` adds the tokens to the rows.

        Returns:
            Token ids [N] and their log-probabilities [N].
        """
        constrained = [
            (index, generation.matcher)
            for index, generation in enumerate(self.generations[rows])
            if generation.matcher is not None
        ]
        if constrained:
            masks = np.stack([next_mask(matcher) for _, matcher in constrained])
            indices = [index for index, _ in constrained]
            is_forbidden = np.zeros(logits.shape, dtype=bool)
            is_forbidden[indices] = ~unpack_masks(masks, logits.shape[1])
            logits = logits.masked_fill(torch.from_numpy(is_forbidden).to(logits.device), -math.inf)

        self._record_candidates(rows, logits)
        tokens, logprobs = sample_tokens(
            logits,
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            uniform=self.uniforms(rows),
        )
        sampled = tokens.cpu().numpy()
        sampled_logprobs = logprobs.cpu().numpy()
        for index, matcher in constrained:
            if np.isfinite(sampled_logprobs[index]):  # otherwise the request ends with an error
                matcher.consume_token(int(sampled[index]))
        return sampled, sampled_logprobs

    def _record_candidates(self, rows: np.ndarray, logits: Tensor) -> None:
        """Record the likeliest tokens of the rows whose sampling asks for them."""
        counts = np.array([generation.sampling.candidates for generation in self.generations[rows]])
        asking = np.flatnonzero(counts)  # indices in `rows`
        if not len(asking):
            return
        token_ids, logprobs = likeliest_tokens(
            logits[torch.from_numpy(asking).to(logits.device)],
            temperature=self.temperature[rows[asking]],
            count=int(counts.max()),
        )
        for index, ids, values in zip(asking, token_ids.tolist(), logprobs.tolist(), strict=True):
            pairs = list(zip(ids, values, strict=True))[: counts[index]]
            # Tokens that the grammar forbids have the log-probability -∞.
            allowed = tuple(pair for pair in pairs if math.isfinite(pair[1]))
            self.generations[rows[index]].candidates.append(allowed)

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Append a token to each of `rows` [N].

        Args:
            rows: the rows.
            tokens: token ids [N].
            logprobs: log-probabilities of the tokens [N].

        Returns:
            Three masks [N]. `stopped`: the row reached a stop token. `ended`: its completion has ended
            by a stop token or by its length. `broken`: its logits were not finite; such a row is not
            in `ended`.
        """
        size = self.size[rows]
        self.tokens[rows, size] = tokens
        self.logprobs[rows, size] = logprobs
        self.size[rows] = size + 1
        broken = ~np.isfinite(logprobs)
        stopped = (self.stop[rows] == tokens[:, None]).any(1)
        ended = (stopped | (size + 1 >= self.max_size[rows])) & ~broken
        return stopped, ended, broken

    def new_tokens(self) -> list[tuple[int, NewTokens]]:
        """Report the new tokens of requests with at least `notify_every` unreported ones.

        Returns:
            Request id and new tokens; the next call no longer returns these.
        """
        reports = []
        for row in np.flatnonzero(self.live).tolist():
            generation: Generation = self.generations[row]
            completion_size = int(self.size[row] - self.prompt_size[row])
            unreported = completion_size - generation.reported
            if generation.notify_every and unreported >= generation.notify_every:
                end = int(self.size[row])
                token_ids: list[int] = self.tokens[row, end - unreported : end].tolist()
                reports.append((generation.id, NewTokens(generation.reported, token_ids)))
                generation.reported = completion_size
        return reports

    def set_version(self, version: int, adapter: int) -> None:
        """Set the version of an adapter's weights; new requests no longer reuse keys of older weights.

        Running requests continue with the keys that they have, and sample further tokens with the
        new version.

        Args:
            version: the new version.
            adapter: number of the adapter; 0 for the full weights.
        """
        has_adapter = self.adapter == adapter
        self.versions[adapter] = version
        self.cached[has_adapter] = 0
        self.fresh[has_adapter] = False
        for row in np.flatnonzero(self.live & has_adapter):
            versions = self.generations[row].versions
            sampled = int(self.size[row] - self.prompt_size[row])
            if versions[-1][1] == sampled:  # the previous version has sampled nothing
                versions.pop()
            versions.append((version, sampled))

    def _touch(self, row: int) -> None:
        """Note that a row is used now."""
        self._clock += 1
        self.last_used[row] = self._clock
