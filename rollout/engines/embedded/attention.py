"""Attention of a decoding pass over the KV cache.

A batch is cut into blocks. A `RowBlock` has neighbouring rows of the cache, which are all read up to
the length of the longest. A `GroupBlock` has groups of rows that begin with the same tokens; the keys
of these are read once for each group.

Letters of shapes: n rows of the batch in a block, S rows and M positions of the cache, L layers, H
query heads, KV key and value heads, D head dimension, G groups, W cache rows of a group (with idle
ones), P tokens of the longest common prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rollout.engines.embedded.cache import DecodeBatch, KVCache
from rollout.models.batch_invariant import KEY_MULTIPLE, row_attention

# Overheads, as the number of context tokens that could be read in the same time.
_ROW_BLOCK_COST = 400  # starting another attention product
_GROUP_BLOCK_COST = 600  # the same, with the copies and sums between the products of a group block

_PrefixKey = tuple[tuple[int, int], ...]  # (group number, shared tokens) of each group of a block


class AttentionPlanner:
    """Planner that cuts decoding batches into blocks, and keeps the blocks while a batch continues.

    Attributes:
        blocks: blocks of the latest batch.
    """

    def __init__(self, cache: KVCache) -> None:
        self.blocks: list[RowBlock | GroupBlock] = []
        self._cache = cache
        self._device = cache.keys.device
        self._batch: DecodeBatch | None = None
        # Common keys and values of the present group blocks, by `_prefix_key`.
        self._prefixes: dict[_PrefixKey, tuple[Tensor, Tensor]] = {}

    def plan(self, batch: DecodeBatch) -> list[RowBlock | GroupBlock]:
        """Return blocks that together cover the rows of a batch, in order.

        Even a batch that continues is cut anew every `KEY_MULTIPLE` tokens, because other blocks may
        be faster once its rows are longer.
        """
        last = self._batch
        continues = last is not None and batch.continues(last)
        if continues and batch.positions.max() % KEY_MULTIPLE:
            for block in self.blocks:
                block.advance()
        else:
            self.blocks = self.cut(batch)
        self._batch = batch
        return self.blocks

    def cut(self, batch: DecodeBatch) -> list[RowBlock | GroupBlock]:
        """Cut a batch into group blocks where they save time, and row blocks between them."""
        known_prefixes = self._prefixes
        self._prefixes = {}
        cache_rows = self._cache.keys.shape[1]
        blocks: list[RowBlock | GroupBlock] = []
        first = 0
        for runs in _group_runs(batch, cache_rows):
            # `runs` has one slice of the batch for each group of the block.
            blocks += row_blocks(batch, self._device, first, runs[0].start)
            key = _prefix_key(batch, runs)
            prefix = known_prefixes.get(key)
            if prefix is None:
                prefix = self._gather_prefix(batch, runs)
            self._prefixes[key] = prefix
            blocks.append(GroupBlock(batch, runs, cache_rows, *prefix))
            first = runs[-1].stop
        return blocks + row_blocks(batch, self._device, first)

    def _gather_prefix(self, batch: DecodeBatch, runs: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Copy the keys [L, G KV, D, P] and values [L, G KV, P, D] that each group's rows share.

        P is the largest number of tokens that the rows of any group share. For a group that shares
        fewer, `GroupBlock` masks the entries behind its shared tokens.
        """
        keys = self._cache.keys
        values = self._cache.values
        rows = torch.tensor([int(batch.rows[run.start]) for run in runs], device=self._device)
        tokens = max(_shared_tokens(batch, run) for run in runs)
        prefix_keys = keys[:, rows, :, :, :tokens].flatten(1, 2).contiguous()
        prefix_values = values[:, rows, :, :tokens].flatten(1, 2)
        return prefix_keys, prefix_values


def row_blocks(
    batch: DecodeBatch, device: torch.device, first: int = 0, last: int | None = None
) -> list[RowBlock]:
    """Cut the rows `first` to `last - 1` of a batch into row blocks; by default all rows.

    A block ends where one attention product would read more idle rows and padding than another
    product costs.
    """
    if last is None:
        last = len(batch.rows)
    if first == last:
        return []
    rows = batch.rows.tolist()
    context_lengths = (batch.positions + 1).tolist()
    blocks: list[RowBlock] = []
    width = context_lengths[first]
    for i in range(first + 1, last):
        wider = max(width, context_lengths[i])
        entries_read = (rows[i] - rows[first] + 1) * wider
        entries_read_before = (rows[i - 1] - rows[first] + 1) * width
        # Entries of the KV cache that the block reads because of this row, beyond the row's context.
        idle_entries = entries_read - entries_read_before - context_lengths[i]
        if idle_entries > _ROW_BLOCK_COST:
            blocks.append(RowBlock(batch, slice(first, i), device))
            first = i
            wider = context_lengths[i]
        width = wider
    blocks.append(RowBlock(batch, slice(first, last), device))
    return blocks


class _Window:
    """Range of cache rows that attend together.

    Idle rows in the range attend to position 0, or to the common keys of their group; their results
    are dropped.

    Attributes:
        part: rows of the batch that are in the window.
    """

    def __init__(
        self, batch: DecodeBatch, part: slice, first_row: int, size: int, device: torch.device
    ) -> None:
        """Build the window of `size` cache rows from `first_row` on, for the rows `part` of a batch."""
        self.part = part
        self._rows = slice(first_row, first_row + size)
        self._device = device
        self._offsets = batch.rows[part] - first_row  # of the live rows, within the window
        # The offsets on the device; None if all rows of the window are live.
        self._live: Tensor | None = None
        if size != len(self._offsets):
            self._live = torch.from_numpy(self._offsets).to(device)
        self._positions = np.zeros(size, dtype=np.int64)
        self._positions[self._offsets] = batch.positions[part]
        self._update_mask()

    def advance(self) -> None:
        """Go on to the next token of each row."""
        self._positions[self._offsets] += 1
        self._update_mask()

    def _update_mask(self) -> None:
        """Compute the mask for the present positions of the rows."""
        raise NotImplementedError

    def _spread(self, q: Tensor) -> Tensor:
        """Spread the queries [n, H, D] of live rows over the window [size, H, D]."""
        if self._live is None:
            return q
        spread = q.new_zeros(len(self._positions), *q.shape[1:])
        spread[self._live] = q
        return spread

    def _select_live(self, attended: Tensor) -> Tensor:
        """Return the results [n, H D] of live rows from those of the window [size, H D]."""
        return attended if self._live is None else attended[self._live]


class RowBlock(_Window):
    """Neighbouring rows, which are all read up to the length of the longest.

    The block is as wide as this length, rounded up to a multiple of `KEY_MULTIPLE`.
    """

    def __init__(self, batch: DecodeBatch, part: slice, device: torch.device) -> None:
        first_row = int(batch.rows[part][0])
        last_row = int(batch.rows[part][-1])
        super().__init__(batch, part, first_row, last_row - first_row + 1, device)

    def _update_mask(self) -> None:
        """Compute the width of the block, and its mask [rows of the window, 1, width]."""
        self._width = KEY_MULTIPLE * -(-(int(self._positions.max()) + 1) // KEY_MULTIPLE)
        visible = np.arange(self._width) <= self._positions[:, None]
        self._mask = _additive_mask(visible, self._device)[:, None]

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, layer: int, *, exact: bool = False
    ) -> Tensor:
        """Return the attention [n, H D] of queries [n, H, D] over a layer's cache.

        Args:
            keys: [S, KV, D, M].
            values: [S, KV, M, D].
            layer: index of the layer, which only a `GroupBlock` needs.
            exact: compute as the trainer's exact mode does.
        """
        kv_heads = keys.shape[1]
        heads, head_dim = q.shape[1:]
        window = len(self._mask)  # number of rows
        folded = self._spread(q).reshape(window * kv_heads, heads // kv_heads, head_dim)
        window_keys = keys[self._rows].flatten(0, 1)[..., : self._width]
        window_values = values[self._rows].flatten(0, 1)[:, : self._width]
        if exact:
            attended = row_attention(folded, window_keys, window_values, self._mask)
        else:
            scores = torch.bmm(folded, window_keys)
            scores.view(window, heads, self._width).add_(self._mask)
            attended = torch.bmm(scores.softmax(-1), window_values)
        return self._select_live(attended.reshape(window, heads * head_dim))


class GroupBlock(_Window):
    """Groups of rows, whose common keys are read once for each group.

    The groups begin in cache rows at equal distances, so that the window is a grid of G groups of W
    rows.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        runs: Sequence[slice],
        cache_rows: int,
        prefix_keys: Tensor,
        prefix_values: Tensor,
    ) -> None:
        """Build a block of the groups in the `runs` of a batch.

        Args:
            runs: neighbouring rows of the batch, one run for each group.
            cache_rows: number of rows of the cache, S.
            prefix_keys: common keys of each group [L, G KV, D, P].
            prefix_values: common values of each group [L, G KV, P, D].
        """
        part = slice(runs[0].start, runs[-1].stop)
        self._prefix_keys = prefix_keys
        self._prefix_values = prefix_values
        self._prefix_tokens = prefix_keys.shape[-1]

        first_rows = [_first_row_of_group(batch, run, cache_rows) for run in runs]
        if len(runs) > 1:
            first_row = first_rows[0]
            distance = first_rows[1] - first_rows[0]
        else:
            # A single group has no distance to another, so the window is from its first to its last
            # live row.
            first_row = int(batch.rows[part][0])
            distance = int(np.ptp(batch.rows[part])) + 1
        self._grid = (len(runs), distance)  # G and W
        shared = [_shared_tokens(batch, run) for run in runs]
        self._shared = np.repeat(shared, distance)  # common tokens of each row of the window
        super().__init__(batch, part, first_row, len(runs) * distance, prefix_keys.device)

    def _update_mask(self) -> None:
        """Compute `_suffix`, the positions of the keys that each row reads for itself, and the mask.

        The mask is [G, 1, W, 1, P + keys of `_suffix`], or None if every row attends to all keys.
        """
        positions = self._positions[:, None]
        shared = self._shared[:, None]
        # The suffix begins at the end of the shortest prefix. The mask hides keys of the suffix that
        # a longer prefix has already, and those behind the row's position.
        self._suffix = slice(int(shared.min()), int(positions.max()) + 1)
        self._mask: Tensor | None = None
        if np.ptp(shared) or np.ptp(positions):
            columns = np.arange(self._suffix.start, self._suffix.stop)
            in_prefix = np.arange(self._prefix_tokens) < shared
            in_suffix = (shared <= columns) & (columns <= positions)
            mask = _additive_mask(np.concatenate((in_prefix, in_suffix), 1), self._device)
            self._mask = mask.view(*self._grid, 1, 1, -1).transpose(1, 2)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, layer: int, *, exact: bool = False
    ) -> Tensor:
        """Return the attention of the block; see `RowBlock.attend`.

        All rows of a group attend to its prefix in one product, and each row to its own suffix.
        `exact` is ignored, because exact mode has row blocks only.
        """
        kv_heads = keys.shape[1]
        heads, head_dim = q.shape[1:]
        groups, rows = self._grid
        q = self._spread(q).reshape(groups, rows, kv_heads, heads // kv_heads, head_dim)

        scores = torch.cat([self._prefix_scores(q, layer), self._suffix_scores(q, keys)], -1)
        if self._mask is not None:
            scores.add_(self._mask)
        weights = scores.softmax(-1)

        attended = self._sum_suffix(weights[..., self._prefix_tokens :], values)
        attended += self._sum_prefix(weights[..., : self._prefix_tokens], layer)
        return self._select_live(attended.view(groups * rows, heads * head_dim))

    def _prefix_scores(self, q: Tensor, layer: int) -> Tensor:
        """Return the scores of queries [G, W, KV, H / KV, D] and their group's common keys.

        Returns:
            [G, KV, W, H / KV, P].
        """
        groups, rows, kv_heads, heads_per_kv, head_dim = q.shape
        by_group = q.transpose(1, 2).reshape(groups * kv_heads, rows * heads_per_kv, head_dim)
        scores = torch.bmm(by_group, self._prefix_keys[layer])
        return scores.view(groups, kv_heads, rows, heads_per_kv, -1)

    def _suffix_scores(self, q: Tensor, keys: Tensor) -> Tensor:
        """Return the scores of queries [G, W, KV, H / KV, D] and the keys of their own rows.

        Returns:
            [G, KV, W, H / KV, keys of `_suffix`].
        """
        suffix_keys = keys[self._rows].flatten(0, 1)[:, :, self._suffix]
        scores = torch.bmm(q.flatten(0, 2), suffix_keys)
        return scores.view(*q.shape[:-1], -1).transpose(1, 2)

    def _sum_prefix(self, weights: Tensor, layer: int) -> Tensor:
        """Return each row's weighted sum [G, W, KV, H / KV, D] of its group's common values.

        Args:
            weights: attention weights of the common keys [G, KV, W, H / KV, P].
            layer: index of the layer.
        """
        by_group = weights.flatten(2, 3).flatten(0, 1)
        sums = torch.bmm(by_group, self._prefix_values[layer])
        return sums.view(*weights.shape[:-1], -1).transpose(1, 2)

    def _sum_suffix(self, weights: Tensor, values: Tensor) -> Tensor:
        """Return each row's weighted sum [G, W, KV, H / KV, D] of its own values.

        Args:
            weights: attention weights of the rows' own keys [G, KV, W, H / KV, keys of `_suffix`].
            values: the layer's cache [S, KV, M, D].
        """
        by_row = weights.transpose(1, 2)
        suffix_values = values[self._rows].flatten(0, 1)[:, self._suffix]
        sums = torch.bmm(by_row.flatten(0, 2), suffix_values)
        return sums.view(*by_row.shape[:-1], -1)


def _group_runs(batch: DecodeBatch, cache_rows: int) -> Iterator[list[slice]]:
    """Yield, for each group block, the slices of the batch's rows that belong to its groups.

    A run is the slice of one group. Groups that would not save time in a group block are left out.
    """
    ends = (np.flatnonzero(np.diff(batch.groups)) + 1).tolist()
    bounds = [0, *ends, len(batch.rows)]
    block_runs: list[slice] = []
    for start, stop in pairwise(bounds):
        run = slice(start, stop)
        saved_tokens = (stop - start - 1) * _shared_tokens(batch, run)
        if saved_tokens <= _GROUP_BLOCK_COST:
            continue
        if block_runs and not _fits(batch, [*block_runs, run], cache_rows):
            yield block_runs
            block_runs = []
        block_runs.append(run)
    if block_runs:
        yield block_runs


def _shared_tokens(batch: DecodeBatch, run: slice) -> int:
    """Return the number of leading tokens that all rows of a run share."""
    return int(batch.shared[run].min())


def _prefix_key(batch: DecodeBatch, runs: Sequence[slice]) -> _PrefixKey:
    """Return the group and the number of shared tokens of each run, which identify the common keys."""
    return tuple((int(batch.groups[run.start]), _shared_tokens(batch, run)) for run in runs)


def _first_row_of_group(batch: DecodeBatch, run: slice, cache_rows: int) -> int:
    """Return the cache row in which the group of a run began; see `DecodeBatch.groups`."""
    return int(batch.groups[run.start]) % cache_rows


def _fits(batch: DecodeBatch, runs: Sequence[slice], cache_rows: int) -> bool:
    """Return True if the last run fits into a group block with those before it.

    The groups must be a grid, and padding must not cost more than a block of its own.
    """
    first_rows = [_first_row_of_group(batch, run, cache_rows) for run in runs]
    if not _is_grid(batch, runs, first_rows, cache_rows):
        return False
    # Of the first group and the last, the one with the shorter prefix is padded to the prefix of the
    # other, and the one with the shorter rows to their length. Both are padded in each row.
    first_run = runs[0]
    last_run = runs[-1]
    prefix_padding = abs(_shared_tokens(batch, last_run) - _shared_tokens(batch, first_run))
    length_padding = abs(int(batch.positions[last_run].max() - batch.positions[first_run].max()))
    rows_per_group = first_rows[1] - first_rows[0]
    return rows_per_group * (prefix_padding + length_padding) <= _GROUP_BLOCK_COST


def _is_grid(
    batch: DecodeBatch, runs: Sequence[slice], first_rows: Sequence[int], cache_rows: int
) -> bool:
    """Return True if two or more groups are a grid of cache rows; see `GroupBlock`.

    Args:
        runs: run of each group.
        first_rows: cache row in which each group began.
        cache_rows: number of rows of the cache.
    """
    for run, next_run in pairwise(runs):
        if run.stop != next_run.start:
            return False  # the batch has another row between them

    distances = {next_row - row for row, next_row in pairwise(first_rows)}
    if len(distances) > 1:
        return False
    distance = distances.pop()

    for run, first_row in zip(runs, first_rows, strict=True):
        lowest = batch.rows[run.start]
        highest = batch.rows[run.stop - 1]
        if lowest < first_row or highest >= first_row + distance:
            return False  # the group has a row outside its part of the grid
    return first_rows[-1] + distance <= cache_rows


def _additive_mask(visible: np.ndarray, device: torch.device) -> Tensor:
    """Return a float32 mask of the shape of `visible`: 0 where a key is visible, and -inf elsewhere."""
    return torch.from_numpy(np.where(visible, np.float32(0), np.float32("-inf"))).to(device)
