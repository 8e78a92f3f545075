"""The table of cache rows: who lives in each, which tokens it holds, how its next token is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollout.engines.protocol import Completion, Sampling, VersionSpan

_NEVER = np.iinfo(np.int64).max


@dataclass(slots=True, kw_only=True)
class Request:
    """One generation, waiting or running."""

    id: int
    prompt: np.ndarray  # [P] int64
    sampling: Sampling
    versions: list[tuple[int, int]] = field(default_factory=list)  # (weights version, its first completion token)
    cached: int = 0  # prompt tokens that were not computed again


class Rows:
    """Columns over cache rows; row r of every column belongs to row r of the key-value cache."""

    def __init__(self, rows: int, length: int) -> None:
        self.live = np.zeros(rows, dtype=bool)
        self.requests = np.full(rows, None, dtype=object)
        self.tokens = np.zeros((rows, length), dtype=np.int64)  # prompt, then completion
        self.logprobs = np.zeros((rows, length), dtype=np.float32)  # valid at completion positions
        self.size = np.zeros(rows, dtype=np.int64)  # tokens known; the newest one has no keys yet
        self.prompt = np.zeros(rows, dtype=np.int64)  # prompt tokens
        self.limit = np.zeros(rows, dtype=np.int64)  # size at which a generation is out of tokens
        self.cached = np.zeros(rows, dtype=np.int64)  # tokens whose keys may be reused by anyone
        self.fresh = np.zeros(rows, dtype=bool)  # all keys come from the present weights
        self.used = np.zeros(rows, dtype=np.int64)  # clock of the last use
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.zeros(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.stop = np.full((rows, 1), -1, dtype=np.int64)
        self._clock = 0

    def longest_prefix(self, prompt: np.ndarray) -> tuple[int, int]:
        """The row that shares most leading tokens with `prompt` and how many; at most all but the last one."""
        usable = np.minimum(self.cached, len(prompt) - 1)
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

    def occupy(self, row: int, request: Request) -> None:
        """Put a request into a row; its keys are not there yet."""
        sampling, size = request.sampling, len(request.prompt)
        self.live[row] = self.fresh[row] = True
        self.requests[row] = request
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

    def vacate(self, row: int, reason: str) -> Completion:
        """End the generation in a row and return it; the keys stay until the row is needed."""
        request: Request = self.requests[row]
        start, end = int(self.prompt[row]), int(self.size[row])
        firsts = [first for _, first in request.versions[1:]] + [end - start]
        spans = tuple(
            VersionSpan(version=version, start=first, end=last)
            for (version, first), last in zip(request.versions, firsts, strict=True)
        )
        self.live[row] = False
        self.requests[row] = None
        self.touch(row)
        return Completion(
            token_ids=tuple(self.tokens[row, start:end].tolist()),
            logprobs=tuple(self.logprobs[row, start:end].tolist()),
            finish_reason=reason,
            versions=spans,
            cached_tokens=request.cached,
        )

    def touch(self, row: int) -> None:
        """Note that a row was used now."""
        self._clock += 1
        self.used[row] = self._clock
