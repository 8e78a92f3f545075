"""Bin packing: sequences of a prefix tree dealt to micro-batches of limited size and about equal work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from mcore_mas.megatron.batch import CostModel
from mcore_mas.packing.prefix_tree import PrefixForest

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


def bin_pack(forest: PrefixForest, rows: Sequence[int], max_tokens: int, cost: CostModel) -> list[list[PackingItem]]:
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
        own = [(len(ids), shared) for ids, shared in zip(forest.sequences, forest.shared, strict=True)]
        self._tokens = [0, *accumulate(length - shared for length, shared in own)]
        self._pairs = [0.0, *accumulate((length**2 - shared**2) / 2 for length, shared in own)]
        self._rows = [0, *accumulate(rows)]
        self._cost = cost

    def item(self, first: int, end: int) -> PackingItem:
        stem = self._shared[first]
        tokens = self._tokens[end] - self._tokens[first] + stem
        pairs = self._pairs[end] - self._pairs[first] + stem**2 / 2
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
        cuts = ((self.item(item.first, i), self.item(i, item.end)) for i in range(item.first + 1, item.end))
        return min(cuts, key=lambda parts: max(part.work for part in parts))


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
