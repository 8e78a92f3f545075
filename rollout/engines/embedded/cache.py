"""Cached keys and values, and a decoding pass's attention: neighbouring rows together, prompts that rows share once."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.models.architecture import Architecture
from rollout.models.exact import COLUMNS, row_attention

_BLOCK_COST = 400  # tokens of context that can be read in the time it takes to start another attention product
_SHARED_COST = 600  # the same of a block of groups, which copies and adds between its products


class Cache:
    """Keys and values of `rows` sequences of at most `length` tokens."""

    def __init__(
        self,
        shape: Architecture,
        rows: int,
        length: int,
        device: torch.device,
        *,
        routing: bool = False,
        exact: bool = False,
    ) -> None:
        """Empty; with `routing` a mixture's also holds which experts each token went to.

        A token's key is contiguous, as its value; with `exact` the keys lie as `models/exact.py` takes them.
        """
        lead, experts = (shape.layers, rows, shape.kv_heads), shape.experts
        self.routing: np.ndarray | None = None  # [rows, length, sparse layers, k]
        if routing and experts is not None:
            sizes = (rows, length, sum(experts.sparse), experts.per_token)
            self.routing = np.zeros(sizes, f"<u{experts.number_bytes}")
        length = 16 * math.ceil(length / 16)
        length += 16 * (
            length % 128 == 0
        )  # a power-of-two stride would put a row's keys on the same cache lines
        self.values = _zeros(*lead, length, shape.head_dim, device=device)
        transposed = *lead, shape.head_dim, length
        keys = _zeros(*(transposed if exact else self.values.shape), device=device)
        self.keys = keys if exact else keys.transpose(-1, -2)  # [L, S, KV, D, M]
        self._prefixes: dict[bytes, tuple[Tensor, Tensor]] = {}
        self._batch: Decoding | None = None  # the last one, and what it was cut into
        self._blocks: list[RowBlock | GroupBlock] = []

    def copy(
        self, source: int, targets: int | list[int], tokens: int, layers: slice | int = slice(None)
    ) -> None:
        """Give the rows `targets` the first `tokens` positions of row `source`."""
        keys, values = self.keys[layers], self.values[layers]
        if isinstance(targets, list):
            rows = torch.tensor(targets, device=keys.device)
            keys[:, rows, :, :, :tokens] = keys[:, source, None, :, :, :tokens]
            values[:, rows, :, :tokens] = values[:, source, None, :, :tokens]
            if self.routing is not None:
                self.routing[targets, :tokens] = self.routing[source, :tokens]
        else:
            keys.select(-4, targets)[..., :tokens] = keys.select(-4, source)[..., :tokens]
            values.select(-4, targets)[..., :tokens, :] = values.select(-4, source)[..., :tokens, :]

    def routed(self, row: int, tokens: int) -> bytes:
        """The experts of a row's first `tokens` positions, as `Completion` has them."""
        return b"" if self.routing is None else self.routing[row, :tokens].tobytes()

    def clear(self, row: int) -> None:
        """Forget a row's numbers, where some are not finite: a masked NaN is still NaN."""
        self.keys[:, row] = 0.0
        self.values[:, row] = 0.0

    def blocks(self, batch: Decoding, *, alone: bool = False) -> list[RowBlock | GroupBlock]:
        """Cut a batch into what attends together; `alone`: each row to all its keys, shared or not."""
        if alone:
            return [*self._row_blocks(batch, 0, len(batch.rows))]
        if self._batch is not None and _goes_on(self._batch, batch):
            for block in self._blocks:
                block.advance()
        else:
            self._blocks = self._cut(batch)
        self._batch = batch
        return self._blocks

    def _cut(self, batch: Decoding) -> list[RowBlock | GroupBlock]:
        """Into groups on a grid, as far as there are some that are worth it, and the rows between."""
        known, self._prefixes = self._prefixes, {}
        blocks: list[RowBlock | GroupBlock] = []
        first = 0
        for runs in _grids(batch, self.keys.shape[1]):
            blocks += self._row_blocks(batch, first, runs[0].start)
            key = b"".join(
                batch.groups[run.start].tobytes() + batch.common[run].min().tobytes()
                for run in runs
            )
            self._prefixes[key] = known[key] if key in known else self._prefix(batch, runs)
            blocks.append(GroupBlock(batch, runs, self.keys.shape[1], *self._prefixes[key]))
            first = runs[-1].stop
        return blocks + self._row_blocks(batch, first, len(batch.rows))

    def _prefix(self, batch: Decoding, runs: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Keys [L, G KV, D, P] and values [L, G KV, P, D] that the rows of each group have in common."""
        rows = torch.tensor([int(batch.rows[run.start]) for run in runs], device=self.keys.device)
        tokens = max(int(batch.common[run].min()) for run in runs)
        keys, values = self.keys[:, rows, :, :, :tokens], self.values[:, rows, :, :tokens]
        return keys.flatten(1, 2).contiguous(), values.flatten(1, 2)

    def _row_blocks(self, batch: Decoding, first: int, last: int) -> list[RowBlock]:
        """Cut where one attention product would read too many idle rows or too much padding."""
        blocks, width = [], 0
        ids, contexts = batch.rows.tolist(), (batch.positions + 1).tolist()
        for i in range(first, last):
            wider = max(width, contexts[i])
            wasted = (ids[i] - ids[first] + 1) * wider - contexts[i]
            if i > first and wasted - (ids[i - 1] - ids[first] + 1) * width > _BLOCK_COST:
                blocks.append(RowBlock(batch, slice(first, i), self.keys.device))
                first, wider = i, contexts[i]
            width = wider
        return (
            [*blocks, RowBlock(batch, slice(first, last), self.keys.device)]
            if last > first
            else blocks
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Rows of the cache that decode a token each, ascending: columns [N] of int64."""

    rows: np.ndarray
    positions: np.ndarray
    groups: (
        np.ndarray
    )  # modulo the cache's rows, where the group began; rows of the same one have the same keys ...
    common: np.ndarray  # ... at so many leading positions
    adapters: np.ndarray  # number of the one that each row is computed with; 0: none


class _Window:
    """Neighbouring rows of the cache; idle ones look at position 0 only, and what they compute is dropped."""

    def __init__(
        self, batch: Decoding, part: slice, first: int, window: int, device: torch.device
    ) -> None:
        """The `part` of a batch is in the `window` rows from `first` on."""
        self.part, self._rows = part, slice(first, first + window)
        places = batch.rows[part] - first
        self._inside = (
            None if window == len(places) else torch.from_numpy(places).to(device)
        )  # None: all are live
        self._places, self._device = places, device
        self._at = np.zeros(window, dtype=np.int64)  # position of each row
        self._at[places] = batch.positions[part]
        self._look()

    def advance(self) -> None:
        """Go on with the next token of each row."""
        self._at[self._places] += 1
        self._look()

    def _look(self) -> None:
        """Find out what the rows see."""
        raise NotImplementedError

    def _spread(self, q: Tensor) -> Tensor:
        """Queries [n, H, D] where their rows are in the window [window, H, D]."""
        if self._inside is None:
            return q
        spread = q.new_zeros(len(self._at), *q.shape[1:])
        spread[self._inside] = q
        return spread

    def _live(self, mixed: Tensor) -> Tensor:
        """Of what all rows have computed [window, H D] what the live ones have [n, H D]."""
        return mixed if self._inside is None else mixed[self._inside]


class RowBlock(_Window):
    """Neighbouring rows as wide as their longest sequence."""

    def __init__(self, batch: Decoding, part: slice, device: torch.device) -> None:
        """Of the `part` of a batch."""
        first, last = int(batch.rows[part][0]), int(batch.rows[part][-1])
        super().__init__(batch, part, first, last - first + 1, device)

    def _look(self) -> None:
        self._width = COLUMNS * -(-(int(self._at.max()) + 1) // COLUMNS)
        self._mask = _mask(np.arange(self._width) <= self._at[:, None], self._device)[:, None]

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, layer: int, *, exact: bool = False
    ) -> Tensor:
        """Attention of queries [n, H, D] over a layer's keys [S, KV, D, M] and values [S, KV, M, D]; [n, H D]."""
        kv_heads, (heads, dim), window = keys.shape[1], q.shape[1:], len(self._mask)
        folded = self._spread(q).reshape(window * kv_heads, heads // kv_heads, dim)
        near, far = (
            keys[self._rows].flatten(0, 1)[..., : self._width],
            values[self._rows].flatten(0, 1),
        )
        if exact:
            mixed = row_attention(folded, near, far[:, : self._width], self._mask)
        else:
            scores = torch.bmm(folded, near)
            scores.view(window, heads, self._width).add_(self._mask)
            mixed = torch.bmm(scores.softmax(-1), far[:, : self._width])
        return self._live(mixed.reshape(window, heads * dim))


class GroupBlock(_Window):
    """Groups in a grid of rows, some idle: what a group has in common is read once, the rest of each row by itself."""

    def __init__(
        self, batch: Decoding, runs: Sequence[slice], most: int, keys: Tensor, values: Tensor
    ) -> None:
        """Of the `runs` of a batch, a group each, with the `keys` and `values` that it has in common."""
        part, self._prefix, self._tokens = (
            slice(runs[0].start, runs[-1].stop),
            (keys, values),
            keys.shape[-1],
        )
        homes = [int(batch.groups[run.start]) % most for run in runs]
        first, apart = homes[0], homes[1] - homes[0] if len(runs) > 1 else 0
        if not apart:
            first, apart = int(batch.rows[part][0]), int(np.ptp(batch.rows[part])) + 1
        self._grid = len(runs), apart
        self._common = np.repeat([int(batch.common[run].min()) for run in runs], apart)
        super().__init__(batch, part, first, len(runs) * apart, keys.device)

    def _look(self) -> None:
        at, common = self._at[:, None], self._common[:, None]
        self._own, self._mask = slice(int(common.min()), int(at.max()) + 1), None
        if np.ptp(common) or np.ptp(at):
            column = np.arange(self._own.start, self._own.stop)
            seen = np.arange(self._tokens) < common, (common <= column) & (column <= at)
            mask = _mask(np.concatenate(seen, 1), self._device)
            self._mask = mask.view(*self._grid, 1, 1, -1).transpose(1, 2)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, layer: int, *, exact: bool = False
    ) -> Tensor:
        """Attention as in `RowBlock`, never exact."""
        kv_heads, (heads, dim) = keys.shape[1], q.shape[1:]
        (groups, apart), shared = self._grid, heads // kv_heads
        q = self._spread(q).reshape(groups, apart, kv_heads, shared, dim)
        common, common_values = self._prefix[0][layer], self._prefix[1][layer]
        near = torch.bmm(q.transpose(1, 2).reshape(groups * kv_heads, -1, dim), common)
        alone = torch.bmm(q.flatten(0, 2), keys[self._rows].flatten(0, 1)[:, :, self._own])
        alone = alone.view(groups, apart, kv_heads, shared, -1).transpose(1, 2)
        scores = torch.cat([near.view(*alone.shape[:-1], -1), alone], -1)
        weights = (scores if self._mask is None else scores.add_(self._mask)).softmax(-1)
        mixed = torch.bmm(
            weights.view(groups * kv_heads, apart * shared, -1)[..., : self._tokens], common_values
        )
        alone = weights[..., self._tokens :].transpose(1, 2).flatten(0, 2)
        rest = torch.bmm(alone, values[self._rows].flatten(0, 1)[:, self._own]).view(q.shape)
        rest += mixed.view(groups, kv_heads, apart, shared, dim).transpose(1, 2)
        return self._live(rest.view(groups * apart, heads * dim))


def _goes_on(last: Decoding, batch: Decoding) -> bool:
    """Whether a batch has the next tokens of the last one's rows; every 16 tokens it is cut anew even so."""
    pairs = (
        (last.positions + 1, batch.positions),
        (last.rows, batch.rows),
        (last.groups, batch.groups),
        (last.common, batch.common),
    )
    return all(np.array_equal(a, b) for a, b in pairs) and bool(batch.positions.max() % COLUMNS)


def _grids(batch: Decoding, most: int) -> Iterator[list[slice]]:
    """Runs of rows of one group each, as far as their prompts are worth it, together where they are equally far apart.

    Args:
        most: rows of the cache.
    """
    cuts = [0, *(np.flatnonzero(np.diff(batch.groups)) + 1).tolist(), len(batch.rows)]
    together: list[slice] = []
    for run in map(slice, cuts, cuts[1:]):
        if (run.stop - run.start - 1) * batch.common[run].min() <= _SHARED_COST:
            continue
        if together and not _fits(batch, [*together, run], most):
            yield together
            together = []
        together.append(run)
    if together:
        yield together


def _fits(batch: Decoding, runs: Sequence[slice], most: int) -> bool:
    """Whether the last of the runs goes on the grid of those before it, without too much padding."""
    homes = [int(batch.groups[run.start]) % most for run in runs]
    apart = homes[1] - homes[0]
    inside = all(
        home <= batch.rows[run.start] and batch.rows[run.stop - 1] < home + apart <= most
        for home, run in zip(homes, runs, strict=True)
    )
    ragged = [
        abs(int(x[runs[-1]].max() - x[runs[0]].max())) for x in (batch.common, batch.positions)
    ]
    adjacent = runs[-2].stop == runs[-1].start and homes[-1] - homes[-2] == apart
    return inside and adjacent and apart * sum(ragged) <= _SHARED_COST


def _zeros(*size: int, device: torch.device) -> Tensor:
    """Zeros, on a CPU in large pages: rows are far apart, and small pages are more than its page tables' cache has."""
    if device.type != "cpu":
        return torch.zeros(size, device=device)
    memory = mmap.mmap(-1, 4 * math.prod(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(size)


def _mask(seen: np.ndarray, device: torch.device) -> Tensor:
    """0 where something is seen, else -inf."""
    return torch.from_numpy(np.where(seen, np.float32(0), np.float32("-inf"))).to(device)
