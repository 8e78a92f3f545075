"""Prefix trees of token sequences, and bin packing of them into micro-batches.

What sequences begin with in common is one segment, stored once. Trees are dealt to micro-batches of limited size and
about equal work; one that is too large is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mcore_mas.megatron.batch import CostModel, Segment

# Tokens that sharing a stretch must save; other stretches are repeated. Splitting a segment costs calls of attention
# kernels in every layer, measured on the CPU with pairs of ragged sequences that have their first tokens in common: as
# much as 7 to 10 tokens of a model 64 wide in whole updates (4 in common lost, 8 gained); in attention against the
# products of a layer, as much as 4 tokens at a width of 384 and 1 at 896. On a GPU it is not measured
MIN_SAVED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixForest:
    """Prefix trees, as sequences in lexicographic order, none a beginning of another, and what neighbours share.

    Any stretch of them is a forest again: of sequence i, its first `shared[i]` tokens are those of its predecessor,
    and are stored with it once more where the predecessor is elsewhere.
    """

    sequences: Sequence[Tensor]  # each [tokens] int64
    shared: Sequence[int]  # [n]; 0 for the first

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, stretch: slice) -> PrefixForest:
        shared = list(self.shared[stretch])
        shared[:1] = [0] * len(shared[:1])
        return PrefixForest(sequences=self.sequences[stretch], shared=shared)

    @property
    def tokens(self) -> int:
        """Tokens of all segments."""
        return sum(
            len(ids) - shared for ids, shared in zip(self.sequences, self.shared, strict=True)
        )

    def segments(self) -> tuple[list[Segment], list[Tensor]]:
        """The segments, depth first, and of each sequence where its tokens are in them."""
        segments: list[Segment] = []
        places: list[Tensor] = []
        stored = 0
        # stretches of sequences, the segment they continue, where its path's tokens are, and their number
        nothing = torch.empty(0, dtype=torch.int64)
        open_stretches = [(0, len(self), -1, nothing)] if len(self) else []
        while open_stretches:
            first, end, parent, path = open_stretches.pop()
            common = min(self.shared[first + 1 : end], default=len(self.sequences[first]))
            if own := common - len(path):
                segments.append(Segment(tokens=own, parent=parent))
                parent, path = (
                    len(segments) - 1,
                    torch.cat([path, torch.arange(stored, stored + own)]),
                )
                stored += own
            if end - first == 1:
                places.append(path)
                continue
            starts = [first, *(i for i in range(first + 1, end) if self.shared[i] == common), end]
            children = list(pairwise(starts))
            open_stretches += [(a, b, parent, path) for a, b in reversed(children)]
        return segments, places


def prefix_forest(
    sequences: Sequence[Tensor], per_shared: float = 0.0
) -> tuple[PrefixForest, list[int]]:
    """The forest of some sequences, and which of its sequences each of them is a beginning of.

    Args:
        per_shared: as `CostModel` has it; what is shared must save at least as much.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    kept: list[Tensor] = []
    shared: list[int] = []
    holder = [0] * len(sequences)
    for i in order:
        common = _common(kept[-1], sequences[i]) if kept else 0
        if kept and common == len(kept[-1]):  # the last one is where this one begins
            kept[-1] = sequences[i]
        else:
            kept.append(sequences[i])
            shared.append(common)
        holder[i] = len(kept) - 1
    return PrefixForest(sequences=kept, shared=_worthwhile(kept, shared, per_shared)), holder


def unshared_forest(sequences: Sequence[Tensor]) -> tuple[PrefixForest, list[int]]:
    """The same as a forest of lone sequences in their order, which share nothing."""
    return PrefixForest(sequences=sequences, shared=[0] * len(sequences)), list(
        range(len(sequences))
    )


def _common(a: Tensor, b: Tensor) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(a), len(b))
    different = (a[:length] != b[:length]).nonzero()
    return int(different[0, 0]) if len(different) else length


def _worthwhile(sequences: Sequence[Tensor], shared: Sequence[int], per_shared: float) -> list[int]:
    """What neighbours share, without stretches that save less than `MIN_SAVED` tokens, or than they take."""
    kept = list(shared)
    # tokens of all sequences before one, each without what it shares
    before = list(
        accumulate(
            (len(ids) - common for ids, common in zip(sequences, shared, strict=True)), initial=0
        )
    )
    open_stretches = [
        (0, len(shared), 0)
    ]  # stretches of sequences, and how many tokens of theirs are segments above
    while open_stretches:
        first, end, depth = open_stretches.pop()
        if end - first < 2:
            continue
        common = min(shared[first + 1 : end])
        starts = [first, *(i for i in range(first + 1, end) if shared[i] == common), end]
        behind = before[end] - before[first] + shared[first] - common
        if (common - depth) * (len(starts) - 2) >= max(MIN_SAVED, per_shared * behind):
            depth = common
        for i in starts[1:-1]:
            kept[i] = depth
        open_stretches += [(a, b, depth) for a, b in pairwise(starts)]
    return kept


_LEVEL = 1.05  # of the mean, from which on the largest micro-batch is worth cutting


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingItem:
    """Neighbouring sequences [first, end) of a forest that stay together, and what they cost together."""

    first: int
    end: int
    tokens: int
    work: float


@dataclass(slots=True)
class _Bin:
    """A micro-batch that is being filled."""

    items: list[PackingItem] = field(default_factory=list)
    tokens: int = 0
    work: float = 0.0

    def fits(self, item: PackingItem, max_tokens: int) -> bool:
        return not self.items or self.tokens + item.tokens <= max_tokens

    def add(self, item: PackingItem) -> None:
        self.items.append(item)
        self.tokens += item.tokens
        self.work += item.work


def bin_pack(
    forest: PrefixForest, rows: Sequence[int], max_tokens: int, cost: CostModel
) -> list[list[PackingItem]]:
    """The forest's sequences by micro-batch.

    Trees that are too large are cut, each part with a stem of its own; then the largest comes first, into the first
    micro-batch that has room. Where several ranks or stages work at once, that many micro-batches or a few more are
    made, if that is faster in spite of the stems that are stored several times.

    Args:
        rows: of each sequence, how many of its tokens are trained, however often.
        max_tokens: of a micro-batch; only a sequence that is longer by itself may be.
    """
    sums = _Sums(forest, rows, cost)
    items = [part for tree in sums.trees() for part in sums.cut(tree, max_tokens)]
    best = _first_fit(items, max_tokens)
    for count in cost.counts(len(best)):
        level = _level(items, count, max_tokens, sums)
        if cost.makespan([own.work for own in level]) < cost.makespan([own.work for own in best]):
            best = level
    return [own.items for own in best]


class _Sums:
    """Tokens, pairs and work of any neighbouring sequences of a forest."""

    def __init__(self, forest: PrefixForest, rows: Sequence[int], cost: CostModel) -> None:
        self._shared = [*forest.shared, 0]
        own = [
            (len(ids), shared) for ids, shared in zip(forest.sequences, forest.shared, strict=True)
        ]
        self._tokens = [0, *accumulate(length - shared for length, shared in own)]
        self._pairs = [0, *accumulate(_pairs(length) - _pairs(shared) for length, shared in own)]
        self._rows = [0, *accumulate(rows)]
        self._cost = cost

    def item(self, first: int, end: int) -> PackingItem:
        stem = self._shared[first]
        tokens = self._tokens[end] - self._tokens[first] + stem
        pairs = self._pairs[end] - self._pairs[first] + _pairs(stem)
        work = self._cost.work(tokens, pairs, self._rows[end] - self._rows[first])
        return PackingItem(first=first, end=end, tokens=tokens, work=work)

    def trees(self) -> Iterator[PackingItem]:
        starts = [i for i, shared in enumerate(self._shared) if not shared]
        for first, end in pairwise(starts):
            yield self.item(first, end)

    def cut(self, tree: PackingItem, max_tokens: int) -> Iterator[PackingItem]:
        """The tree in stretches as long as fit."""
        first = tree.first
        for end in range(tree.first + 1, tree.end + 1):
            if end == tree.end or self.item(first, end + 1).tokens > max_tokens:
                yield self.item(first, end)
                first = end

    def halves(self, item: PackingItem) -> tuple[PackingItem, PackingItem]:
        """The two parts of an item whose larger one is smallest."""
        cuts = (
            (self.item(item.first, i), self.item(i, item.end))
            for i in range(item.first + 1, item.end)
        )
        return min(cuts, key=lambda parts: max(part.work for part in parts))


def _pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _first_fit(items: Sequence[PackingItem], max_tokens: int) -> list[_Bin]:
    """First-fit decreasing: the largest first, each into the first micro-batch that has room."""
    bins: list[_Bin] = []
    for item in sorted(items, key=lambda item: (-item.tokens, item.first)):
        found = next((own for own in bins if own.fits(item, max_tokens)), None)
        if found is None:
            bins.append(found := _Bin())
        found.add(item)
    return bins


def _level(items: Sequence[PackingItem], count: int, max_tokens: int, sums: _Sums) -> list[_Bin]:
    """`count` micro-batches of about the same work; the largest item of the fullest is halved while that helps."""
    best = _least_loaded(items, count, max_tokens)
    while best[0].items and best[0].work * len(best) > _LEVEL * sum(own.work for own in best):
        widest = max(best[0].items, key=lambda item: item.work)
        if widest.end - widest.first == 1:
            break
        finer = [*(item for item in items if item is not widest), *sums.halves(widest)]
        level = _least_loaded(finer, count, max_tokens)
        if [own.work for own in level] >= [own.work for own in best]:
            break
        items, best = finer, level
    return [own for own in best if own.items]


def _least_loaded(items: Sequence[PackingItem], count: int, max_tokens: int) -> list[_Bin]:
    """The dearest first, each to the micro-batch with least work that has room; the fullest comes first."""
    bins = [_Bin() for _ in range(count)]
    for item in sorted(items, key=lambda item: (-item.work, item.first)):
        fitting = [own for own in bins if own.fits(item, max_tokens)]
        if not fitting:
            fitting = [_Bin()]
            bins += fitting
        min(fitting, key=lambda own: own.work).add(item)
    return sorted(bins, key=lambda own: own.work, reverse=True)
