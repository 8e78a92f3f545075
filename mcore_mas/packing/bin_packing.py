"""A forest of sequences dealt to micro-batches: none above a number of tokens, all of about the same work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mcore_mas.megatron.batch import CostModel
from mcore_mas.packing.prefix_tree import PrefixForest

_LEVEL = 1.05  # of the mean, from which on the largest micro-batch is worth cutting


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingItem:
    """A stretch of a forest's sequences that stay together, and what they cost together."""

    first: int
    end: int
    tokens: int
    work: float


def bin_pack(forest: PrefixForest, rows: Sequence[int], max_tokens: int, shares: CostModel) -> list[list[PackingItem]]:
    """Pieces of the forest by micro-batch.

    Trees that are too large are cut, each part with a stem of its own; then the largest comes first, into the first
    micro-batch that has room. Where several ranks or stages work at once, that many micro-batches or a few more are
    made, if that is faster in spite of the stems that are stored several times.

    Args:
        rows: of each sequence, how many of its tokens are trained, however often.
        max_tokens: of a micro-batch; only a sequence that is longer by itself may be.
    """
    costs = _Costs(forest, rows, shares)
    pieces = [part for tree in costs.trees() for part in costs.cut(tree, max_tokens)]
    best = _first_fit(pieces, max_tokens)
    for bins in shares.counts(len(best)):
        dealt = _level(pieces, bins, max_tokens, costs)
        if _makespan(dealt, shares) < _makespan(best, shares):
            best = dealt
    return best


class _Costs:
    """Sums over stretches of a forest's sequences."""

    def __init__(self, forest: PrefixForest, rows: Sequence[int], shares: CostModel) -> None:
        self._shared = [*forest.shared, 0]
        self._lengths = [len(ids) for ids in forest.sequences]
        own = list(zip(self._lengths, forest.shared, strict=True))
        self._tokens = [0, *accumulate(length - shared for length, shared in own)]
        self._pairs = [0.0, *accumulate((length**2 - shared**2) / 2 for length, shared in own)]
        self._rows = [0, *accumulate(rows)]
        self._shares = shares

    def piece(self, first: int, end: int) -> PackingItem:
        stem = self._shared[first]
        tokens = self._tokens[end] - self._tokens[first] + stem
        pairs = self._pairs[end] - self._pairs[first] + stem**2 / 2
        work = self._shares.work(tokens, pairs, self._rows[end] - self._rows[first])
        return PackingItem(first=first, end=end, tokens=tokens, work=work)

    def trees(self) -> Iterator[PackingItem]:
        starts = [i for i, shared in enumerate(self._shared) if not shared]
        for first, end in pairwise(starts):
            yield self.piece(first, end)

    def cut(self, tree: PackingItem, max_tokens: int) -> Iterator[PackingItem]:
        """The tree in stretches as long as fit."""
        first = tree.first
        for end in range(tree.first + 1, tree.end + 1):
            if end == tree.end or self.piece(first, end + 1).tokens > max_tokens:
                yield self.piece(first, end)
                first = end

    def halves(self, piece: PackingItem) -> tuple[PackingItem, PackingItem]:
        """The two parts of a piece whose larger one is smallest."""
        cuts = ((self.piece(piece.first, i), self.piece(i, piece.end)) for i in range(piece.first + 1, piece.end))
        return min(cuts, key=lambda parts: max(part.work for part in parts))


def _first_fit(pieces: Sequence[PackingItem], max_tokens: int) -> list[list[PackingItem]]:
    bins: list[list[PackingItem]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda p: (-p.tokens, p.first)):
        found = next((i for i, left in enumerate(room) if left >= piece.tokens), None)
        if found is None:
            bins.append([])
            room.append(max_tokens)
            found = len(bins) - 1
        bins[found].append(piece)
        room[found] -= piece.tokens
    return bins


def _level(pieces: Sequence[PackingItem], bins: int, max_tokens: int, costs: _Costs) -> list[list[PackingItem]]:
    """`bins` micro-batches of about the same work; the largest piece of the fullest is halved while that helps."""
    best = _deal(pieces, bins, max_tokens)
    while best[0] and _load(best[0]) * len(best) > _LEVEL * sum(map(_load, best)):
        widest = max(best[0], key=lambda piece: piece.work)
        if widest.end - widest.first == 1:
            break
        finer = [*(piece for piece in pieces if piece is not widest), *costs.halves(widest)]
        dealt = _deal(finer, bins, max_tokens)
        if list(map(_load, dealt)) >= list(map(_load, best)):
            break
        pieces, best = finer, dealt
    return [own for own in best if own]


def _deal(pieces: Sequence[PackingItem], bins: int, max_tokens: int) -> list[list[PackingItem]]:
    """The dearest first, each to the micro-batch with least work that has room; the fullest comes first."""
    dealt: list[list[PackingItem]] = [[] for _ in range(bins)]
    tokens = [0] * bins
    loads = [0.0] * bins
    for piece in sorted(pieces, key=lambda p: (-p.work, p.first)):
        fitting = [i for i in range(len(dealt)) if not dealt[i] or tokens[i] + piece.tokens <= max_tokens]
        if not fitting:
            dealt.append([])
            tokens.append(0)
            loads.append(0.0)
            fitting = [len(dealt) - 1]
        place = min(fitting, key=lambda i: loads[i])
        dealt[place].append(piece)
        tokens[place] += piece.tokens
        loads[place] += piece.work
    return sorted(dealt, key=_load, reverse=True)


def _load(pieces: Sequence[PackingItem]) -> float:
    return sum(piece.work for piece in pieces)


def _makespan(bins: Sequence[Sequence[PackingItem]], shares: CostModel) -> float:
    return shares.makespan([_load(own) for own in bins])
