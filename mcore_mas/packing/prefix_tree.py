"""Prefix trees of token sequences: a common prefix of several sequences is one segment, stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mcore_mas.megatron.batch import Segment

# Number of tokens that sharing a prefix must save; shorter shared prefixes are stored repeatedly.
# Splitting a segment adds calls of attention kernels in every layer. Measured on a CPU with pairs
# of ragged sequences, in whole updates of a model of width 64, a call costs as much as 7 to 10
# tokens (sharing 4 tokens lost time, 8 gained). In attention against the products of a layer it
# costs 4 tokens at width 384, and 1 at width 896. Not measured on a GPU.
MIN_SAVED_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixForest:
    """Prefix trees of n token sequences.

    `prefix_forest` sorts the sequences lexicographically, so that sequences with a common prefix are
    neighbours, and leaves out those that are a prefix of another. A slice of a forest is a forest again. A
    prefix shared with a sequence outside the slice is then stored once more.

    Attributes:
        sequences: each [tokens] int64.
        shared: [n] number of first tokens that are stored once for a sequence and its predecessor; 0 for the first
            sequence. Their longest common prefix may have more tokens.
    """

    sequences: Sequence[Tensor]
    shared: Sequence[int]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, selected: slice) -> PrefixForest:
        shared = list(self.shared[selected])
        if shared:
            shared[0] = 0
        return PrefixForest(sequences=self.sequences[selected], shared=shared)

    @property
    def tokens(self) -> int:
        """Number of stored tokens."""
        return sum(
            len(ids) - shared for ids, shared in zip(self.sequences, self.shared, strict=True)
        )

    def segments(self) -> tuple[list[Segment], list[Tensor]]:
        """Return the segments depth first.

        Also return, for each sequence, the indices of its tokens in the concatenated segments.
        """
        segments: list[Segment] = []
        token_indices: list[Tensor] = []
        stored = 0
        no_tokens = torch.empty(0, dtype=torch.int64)
        # A stack of nodes still to visit: a range of sequences, their parent segment, and the
        # indices of all tokens from the root to the end of that segment.
        stack = [(0, len(self), -1, no_tokens)] if len(self) else []
        while stack:
            first, end, parent, path = stack.pop()
            common = min(self.shared[first + 1 : end], default=len(self.sequences[first]))
            new_tokens = common - len(path)
            if new_tokens:
                segments.append(Segment(tokens=new_tokens, parent=parent))
                parent = len(segments) - 1
                path = torch.cat([path, torch.arange(stored, stored + new_tokens)])
                stored += new_tokens
            if end - first == 1:
                token_indices.append(path)
                continue
            branches = [i for i in range(first + 1, end) if self.shared[i] == common]
            children = list(pairwise([first, *branches, end]))
            stack += [(start, stop, parent, path) for start, stop in reversed(children)]
        return segments, token_indices


def prefix_forest(
    sequences: Sequence[Tensor], sharing_cost: float = 0.0
) -> tuple[PrefixForest, list[int]]:
    """Build the prefix forest of sequences.

    Args:
        sequences: each [tokens] int64, in any order.
        sharing_cost: extra cost of each token after a shared prefix, as a share of the cost of a token;
            see `CostModel.sharing_cost`.

    Returns:
        The forest, and for each sequence the index of the forest's sequence that it is a prefix of
        (or equal to).
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    leaves: list[Tensor] = []
    shared: list[int] = []
    leaf_of = [0] * len(sequences)
    for i in order:
        common = _common_prefix_length(leaves[-1], sequences[i]) if leaves else 0
        if leaves and common == len(leaves[-1]):  # the previous leaf is a prefix of this sequence
            leaves[-1] = sequences[i]
        else:
            leaves.append(sequences[i])
            shared.append(common)
        leaf_of[i] = len(leaves) - 1
    worthwhile = _reduce_sharing(leaves, shared, sharing_cost)
    return PrefixForest(sequences=leaves, shared=worthwhile), leaf_of


def unshared_forest(sequences: Sequence[Tensor]) -> tuple[PrefixForest, list[int]]:
    """Build a forest in which every sequence is a tree of its own, in the order of `sequences`.

    Returns:
        The forest, and for each sequence its index, as `prefix_forest` returns them.
    """
    forest = PrefixForest(sequences=sequences, shared=[0] * len(sequences))
    return forest, list(range(len(sequences)))


def _common_prefix_length(a: Tensor, b: Tensor) -> int:
    length = min(len(a), len(b))
    different = (a[:length] != b[:length]).nonzero()
    return int(different[0, 0]) if len(different) else length


def _reduce_sharing(
    sequences: Sequence[Tensor], shared: Sequence[int], sharing_cost: float
) -> list[int]:
    """Return `shared` (see `PrefixForest`), reduced where storing a prefix once does not pay.

    A prefix is shared only if that saves at least `MIN_SAVED_TOKENS` tokens, and at least `sharing_cost` tokens for
    each token after the prefix. Otherwise the sequences with this prefix share only the next shorter
    prefix that is shared.
    """
    result = list(shared)
    new_tokens = [len(ids) - common for ids, common in zip(sequences, shared, strict=True)]
    tokens_before = list(accumulate(new_tokens, initial=0))
    # A stack of nodes still to visit: a range of sequences, and the length of the prefix that is
    # shared above them.
    stack = [(0, len(shared), 0)]
    while stack:
        first, end, depth = stack.pop()
        if end - first < 2:
            continue
        common = min(shared[first + 1 : end])
        branches = [i for i in range(first + 1, end) if shared[i] == common]
        saved = (common - depth) * len(branches)
        # The new tokens of the first sequence begin at shared[first]; those before `common` belong to the prefix.
        new_prefix_tokens = common - shared[first]
        tokens_after = tokens_before[end] - tokens_before[first] - new_prefix_tokens
        if saved >= max(MIN_SAVED_TOKENS, sharing_cost * tokens_after):
            depth = common
        for i in branches:
            result[i] = depth
        stack += [(start, stop, depth) for start, stop in pairwise([first, *branches, end])]
    return result
