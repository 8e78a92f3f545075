"""Where every stretch of a rank's shards lies in the Hugging Face tensors, however parallelism cuts them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mcore_mas.megatron.state.names import Entry
from mcore_mas.megatron.state.sources import Source
from rollout.models.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a Hugging Face tensor, which a shard holds row by row in one stretch of its memory."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]  # the rectangle's first index, by dimension
    size: tuple[int, ...]
    offset: int  # in the flat shard, of the first element

    @property
    def key(self) -> str:
        """The rectangle as text, `tensor[rows, columns]`."""
        ranges = (f"{first}:{first + length}" for first, length in zip(self.start, self.size, strict=True))
        return f"{self.tensor}[{','.join(ranges)}]"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.size)

    def of(self, flat: Tensor, first: int = 0) -> Tensor:
        """The rectangle as a view of `flat`, which holds the shard's elements from `first` on."""
        return flat[self.offset - first : self.offset - first + self.numel].view(self.size)

    def common(self, other: Piece) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """What two rectangles of a tensor have in common, as indices into the one and into the other."""
        mine, theirs = [], []
        for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            mine.append(slice(low - a, high - a))
            theirs.append(slice(low - b, high - b))
        return tuple(mine), tuple(theirs)


def pieces_of(
    entry: Entry, shard: Sequence[int], architecture: Architecture, tp: int, rank: int, span: tuple[int, int]
) -> list[Piece]:
    """The rectangles that elements [first, last) = `span` of a flat shard hold; padding is in none.

    Args:
        shard: shape of tensor-parallel rank `rank`'s shard of the parameter, one of `tp`.
    """
    return [part for block in _blocks(entry, shard, architecture, tp, rank) for part in _within(block, *span)]


def _blocks(entry: Entry, shard: Sequence[int], architecture: Architecture, tp: int, rank: int) -> Iterator[Piece]:
    """The shard's blocks of neighbouring rows, found by cutting tensors of numbers as the real ones are cut.

    The tensors' rows are counted through; a row of a matrix is `tp` numbers, as it is cut into so many parts at most.
    """
    shapes = entry.shapes(shard, architecture, tp)
    parts = tp if len(shapes[0]) == 2 else 1
    heads = list(accumulate((shape[0] for shape in shapes), initial=0))
    numbers = [
        torch.arange(head * parts + 1, (head + shape[0]) * parts + 1).view(-1, *[parts] * (len(shape) - 1))
        for head, shape in zip(heads, shapes, strict=False)
    ]
    cut = torch.zeros(shard[0], shard[1] * parts // shapes[0][1] if len(shard) == 2 else 1, dtype=torch.int64)
    own = cut if len(shard) == 2 else cut[:, 0]
    entry.cut.fill(own, [Source.of(tensor) for tensor in numbers], architecture, tp, rank)
    rows = (cut[:, 0] - 1) // parts  # -1 is padding
    column = int(cut[0, 0] - 1) % parts
    breaks = (rows[1:] != rows[:-1] + 1) | torch.isin(rows[1:], torch.tensor(heads))
    edges = [0, *(breaks.nonzero()[:, 0] + 1).tolist(), len(rows)]
    for first, last in pairwise(edges):
        row = int(rows[first])
        if row < 0:
            continue
        which = bisect_right(heads, row) - 1
        shape = shapes[which]
        width = math.prod(shape[1:]) * cut.shape[1] // parts
        yield Piece(
            tensor=entry.tensors[which],
            shape=shape,
            start=(row - heads[which], column * width)[: len(shape)],
            size=(last - first, width)[: len(shape)],
            offset=first * width,
        )


def _within(block: Piece, first: int, last: int) -> Iterator[Piece]:
    """What [first, last) of the flat shard has of a block: a row's end, whole rows, a row's beginning."""
    width = block.size[1] if len(block.size) == 2 else 1
    low, high = max(first - block.offset, 0), min(last - block.offset, block.numel)
    while low < high:
        row, column = divmod(low, width)
        whole = column == 0 and high - low >= width
        end = high // width * width if whole else min(high, (row + 1) * width)
        start = (block.start[0] + row, *(at + column for at in block.start[1:]))
        size = ((end - low) // width, *block.size[1:]) if whole else (1, end - low)
        yield Piece(tensor=block.tensor, shape=block.shape, start=start, size=size, offset=block.offset + low)
        low = end
