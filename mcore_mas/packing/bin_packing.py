"""Bin packing of prefix trees into micro-batches of limited size and about equal work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from mcore_mas.megatron.batch import CostModel
from mcore_mas.packing.prefix_tree import PrefixForest

# If the work of the fullest micro-batch is over this multiple of the mean, its largest item is split.
_BALANCE_FACTOR = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingItem:
    """Consecutive sequences of a forest that stay in one micro-batch.

    Attributes:
        first, end: range [first, end) of sequences.
        tokens: stored tokens.
        work: estimated work, in the unit of `CostModel.work`.
    """

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
    """Distribute the sequences of a forest over micro-batches.

    Trees larger than `max_tokens` are cut, and each part stores its own copy of the common prefix.
    Items are placed first-fit decreasing. If several data-parallel ranks or pipeline stages work at
    once, other numbers of micro-batches with about equal work are also tried (see
    `CostModel.batch_counts`). The distribution with the lowest estimated time is returned.

    Args:
        forest: n sequences.
        rows: [n] number of trained tokens of each sequence, summed over the samples that share it.
        max_tokens: limit of a micro-batch in tokens; only a single longer sequence may exceed it.
        cost: estimates work and time.

    Returns:
        Items of each micro-batch.
    """
    estimator = _WorkEstimator(forest, rows, cost)
    items: list[PackingItem] = []
    for tree in estimator.trees():
        items += estimator.cut(tree, max_tokens)
    best = _pack_first_fit(items, max_tokens)
    for count in cost.batch_counts(len(best)):
        balanced = _balance(items, count, max_tokens, estimator)
        if _makespan(balanced, cost) < _makespan(best, cost):
            best = balanced
    return [packed.items for packed in best]


def _makespan(bins: Sequence[_Bin], cost: CostModel) -> float:
    return cost.makespan([packed.work for packed in bins])


class _WorkEstimator:
    """Estimator of the tokens and the work of a range of consecutive sequences, by prefix sums over the forest.

    Work depends on stored tokens, (query, key) pairs of the attention, and rows: trained tokens, for
    which logits are computed.
    """

    def __init__(self, forest: PrefixForest, rows: Sequence[int], cost: CostModel) -> None:
        self._shared = [*forest.shared, 0]  # the 0 ends the last tree
        lengths = [len(ids) for ids in forest.sequences]
        stored = [length - shared for length, shared in zip(lengths, forest.shared, strict=True)]
        pairs = [
            _causal_pairs(length) - _causal_pairs(shared)
            for length, shared in zip(lengths, forest.shared, strict=True)
        ]
        self._tokens = [0, *accumulate(stored)]
        self._pairs = [0, *accumulate(pairs)]
        self._rows = [0, *accumulate(rows)]
        self._cost = cost

    def item(self, first: int, end: int) -> PackingItem:
        """Return the item of sequences [first, end).

        It includes a copy of the prefix that sequence `first` shares with the sequence before it.
        """
        prefix = self._shared[first]
        tokens = self._tokens[end] - self._tokens[first] + prefix
        pairs = self._pairs[end] - self._pairs[first] + _causal_pairs(prefix)
        rows = self._rows[end] - self._rows[first]
        work = self._cost.work(tokens, pairs, rows)
        return PackingItem(first=first, end=end, tokens=tokens, work=work)

    def trees(self) -> Iterator[PackingItem]:
        """Yield every tree of the forest as an item."""
        starts = [i for i, shared in enumerate(self._shared) if not shared]
        for first, end in pairwise(starts):
            yield self.item(first, end)

    def cut(self, tree: PackingItem, max_tokens: int) -> Iterator[PackingItem]:
        """Yield the parts of a tree: from its first sequence on, the longest ranges that fit `max_tokens`."""
        first = tree.first
        for end in range(tree.first + 1, tree.end + 1):
            if end == tree.end or self.item(first, end + 1).tokens > max_tokens:
                yield self.item(first, end)
                first = end

    def split(self, item: PackingItem) -> tuple[PackingItem, PackingItem]:
        """Split an item in two such that the part with more work has as little work as possible."""
        splits = (
            (self.item(item.first, i), self.item(i, item.end))
            for i in range(item.first + 1, item.end)
        )
        return min(splits, key=lambda parts: max(part.work for part in parts))


def _causal_pairs(tokens: int) -> int:
    """Return the number of (query, key) pairs of causal attention."""
    return tokens * (tokens + 1) // 2


def _pack_first_fit(items: Sequence[PackingItem], max_tokens: int) -> list[_Bin]:
    """Pack first-fit decreasing: the largest item first, each into the first bin with space for it."""
    bins: list[_Bin] = []
    for item in sorted(items, key=lambda item: (-item.tokens, item.first)):
        target = next((candidate for candidate in bins if candidate.fits(item, max_tokens)), None)
        if target is None:
            target = _Bin()
            bins.append(target)
        target.add(item)
    return bins


def _balance(
    items: Sequence[PackingItem], count: int, max_tokens: int, estimator: _WorkEstimator
) -> list[_Bin]:
    """Pack into about `count` bins of similar work; split the largest item of the fullest bin while that helps."""
    best = _pack_least_loaded(items, count, max_tokens)
    while _is_unbalanced(best):
        fullest = best[0]
        largest = max(fullest.items, key=lambda item: item.work)
        if largest.end - largest.first == 1:  # a single sequence cannot be split
            break
        others = [item for item in items if item is not largest]
        finer = [*others, *estimator.split(largest)]
        candidate = _pack_least_loaded(finer, count, max_tokens)
        # The bins are sorted by work, so the fullest of both are compared first.
        if [packed.work for packed in candidate] >= [packed.work for packed in best]:
            break
        items = finer
        best = candidate
    return [packed for packed in best if packed.items]


def _is_unbalanced(bins: Sequence[_Bin]) -> bool:
    """Return True if the first bin, which has the most work, has over `_BALANCE_FACTOR` times the mean work."""
    total = sum(packed.work for packed in bins)
    return bins[0].work * len(bins) > _BALANCE_FACTOR * total


def _pack_least_loaded(items: Sequence[PackingItem], count: int, max_tokens: int) -> list[_Bin]:
    """Place the items with most work first, each into the fitting bin with the least work.

    Returns:
        At least `count` bins, the one with the most work first; a bin is added for an item that fits
        none of the others.
    """
    bins = [_Bin() for _ in range(count)]
    for item in sorted(items, key=lambda item: (-item.work, item.first)):
        fitting = [candidate for candidate in bins if candidate.fits(item, max_tokens)]
        if not fitting:
            fitting = [_Bin()]
            bins += fitting
        min(fitting, key=lambda candidate: candidate.work).add(item)
    return sorted(bins, key=lambda packed: packed.work, reverse=True)
