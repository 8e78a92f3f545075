"""Prefix tree of token sequences: what they begin with in common is one segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mcore_mas.megatron.batch import Segment

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
        return sum(len(ids) - shared for ids, shared in zip(self.sequences, self.shared, strict=True))

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
                parent, path = len(segments) - 1, torch.cat([path, torch.arange(stored, stored + own)])
                stored += own
            if end - first == 1:
                places.append(path)
                continue
            starts = [first, *(i for i in range(first + 1, end) if self.shared[i] == common), end]
            children = list(pairwise(starts))
            open_stretches += [(a, b, parent, path) for a, b in reversed(children)]
        return segments, places


def prefix_forest(sequences: Sequence[Tensor]) -> tuple[PrefixForest, list[int]]:
    """The forest of some sequences, and which of its sequences each of them is a beginning of."""
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
    return PrefixForest(sequences=kept, shared=_worthwhile(shared)), holder


def unshared_forest(sequences: Sequence[Tensor]) -> tuple[PrefixForest, list[int]]:
    """The same as a forest of lone sequences in their order, which share nothing."""
    return PrefixForest(sequences=sequences, shared=[0] * len(sequences)), list(range(len(sequences)))


def _common(a: Tensor, b: Tensor) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(a), len(b))
    different = (a[:length] != b[:length]).nonzero()
    return int(different[0, 0]) if len(different) else length


def _worthwhile(shared: Sequence[int]) -> list[int]:
    """What neighbours share, without stretches that save less than `MIN_SAVED` tokens."""
    kept = list(shared)
    open_stretches = [(0, len(shared), 0)]  # stretches of sequences, and how many tokens of theirs are segments above
    while open_stretches:
        first, end, depth = open_stretches.pop()
        if end - first < 2:
            continue
        common = min(shared[first + 1 : end])
        starts = [first, *(i for i in range(first + 1, end) if shared[i] == common), end]
        if (common - depth) * (len(starts) - 2) >= MIN_SAVED:
            depth = common
        for i in starts[1:-1]:
            kept[i] = depth
        open_stretches += [(a, b, depth) for a, b in pairwise(starts)]
    return kept
