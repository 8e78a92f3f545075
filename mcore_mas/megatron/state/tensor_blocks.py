"""Rectangles of Hugging Face tensors in a flat shard, for checkpoints of any layout."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mcore_mas.megatron.state.tensor_sources import LazyTensor
from mcore_mas.megatron.state.weight_import import WeightMapping
from rollout.models.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBlock:
    """Rectangle of a Hugging Face tensor whose elements are contiguous in a flat shard, row by row.

    Attributes:
        tensor: name of the tensor.
        shape: shape of the whole tensor.
        start: first index of the rectangle, by dimension.
        size: size of the rectangle, by dimension.
        offset: index of the first element in the flat shard.
    """

    tensor: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int

    @property
    def key(self) -> str:
        """The rectangle as text, `tensor[rows,columns]`."""
        ranges = (
            f"{first}:{first + length}" for first, length in zip(self.start, self.size, strict=True)
        )
        return f"{self.tensor}[{','.join(ranges)}]"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def view_in(self, flat: Tensor, first: int = 0) -> Tensor:
        """Return the rectangle as a view of `flat`, the shard's elements from `first` on."""
        begin = self.offset - first
        return flat[begin : begin + self.numel].view(self.size)

    def intersection(
        self, other: TensorBlock
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return the intersection with another rectangle of the same tensor, or None if it is empty.

        The intersection is a pair: its index into this rectangle, and its index into the other one.
        """
        own_ranges = []
        other_ranges = []
        dimensions = zip(self.start, self.size, other.start, other.size, strict=True)
        for own_start, own_size, other_start, other_size in dimensions:
            low = max(own_start, other_start)
            high = min(own_start + own_size, other_start + other_size)
            if low >= high:
                return None
            own_ranges.append(slice(low - own_start, high - own_start))
            other_ranges.append(slice(low - other_start, high - other_start))
        return tuple(own_ranges), tuple(other_ranges)


def tensor_blocks(
    mapping: WeightMapping,
    shard_shape: Sequence[int],
    architecture: Architecture,
    tp: int,
    rank: int,
    span: tuple[int, int],
) -> list[TensorBlock]:
    """Return the rectangles that a span of a flat shard holds; padding is in none of them.

    Args:
        mapping: weight mapping of the parameter.
        shard_shape: shape of tensor-parallel rank `rank`'s shard of the parameter.
        architecture: architecture of the model.
        tp: number of tensor-parallel ranks.
        rank: number of the tensor-parallel rank.
        span: first element, and the one after the last.
    """
    first, end = span
    blocks: list[TensorBlock] = []
    for block in _shard_blocks(mapping, shard_shape, architecture, tp, rank):
        blocks += _clip_block(block, first, end)
    return blocks


def _shard_blocks(
    mapping: WeightMapping,
    shard_shape: Sequence[int],
    architecture: Architecture,
    tp: int,
    rank: int,
) -> Iterator[TensorBlock]:
    """Yield the blocks of neighbouring rows of a whole shard.

    They are found by sharding small tensors of labels in the way that the real tensors are sharded.
    A row of a matrix is cut into `tp` parts, each of which has a label; a row of a vector has one
    label. The labels count through all tensors from 1 on, and 0 is padding.
    """
    shapes = list(mapping.shapes(shard_shape, architecture, tp).values())
    parts_per_row = tp if len(shapes[0]) == 2 else 1
    # First row of each tensor, if the rows of all tensors are counted through.
    first_rows = list(accumulate((shape[0] for shape in shapes), initial=0))
    labels = []
    for first_row, shape in zip(first_rows, shapes, strict=False):
        first_label = first_row * parts_per_row + 1
        tensor_labels = torch.arange(first_label, first_label + shape[0] * parts_per_row)
        labels.append(tensor_labels.view(-1, *[parts_per_row] * (len(shape) - 1)))

    # Number of parts of a row that this shard has: all of them, or one if columns are split.
    shard_parts = 1
    if len(shard_shape) == 2:
        shard_parts = shard_shape[1] * parts_per_row // shapes[0][1]
    sharded = torch.zeros(shard_shape[0], shard_parts, dtype=torch.int64)
    target = sharded if len(shard_shape) == 2 else sharded[:, 0]
    sources = [LazyTensor.of(tensor) for tensor in labels]
    mapping.sharding.fill(target, sources, architecture, tp, rank)

    rows = (sharded[:, 0] - 1) // parts_per_row  # -1 is padding
    column_part = int(sharded[0, 0] - 1) % parts_per_row
    is_break = (rows[1:] != rows[:-1] + 1) | torch.isin(rows[1:], torch.tensor(first_rows))
    breaks = (is_break.nonzero()[:, 0] + 1).tolist()
    for first, end in pairwise([0, *breaks, len(rows)]):
        row = int(rows[first])
        if row < 0:
            continue
        tensor_index = bisect_right(first_rows, row) - 1
        shape = shapes[tensor_index]
        width = math.prod(shape[1:]) * shard_parts // parts_per_row
        yield TensorBlock(
            tensor=mapping.tensors[tensor_index],
            shape=shape,
            start=(row - first_rows[tensor_index], column_part * width)[: len(shape)],
            size=(end - first, width)[: len(shape)],
            offset=first * width,
        )


def _clip_block(block: TensorBlock, first: int, end: int) -> Iterator[TensorBlock]:
    """Yield the parts of a block within [first, end) of the flat shard.

    They are rectangles: the end of a row, whole rows, the beginning of a row.
    """
    width = block.size[1] if len(block.size) == 2 else 1
    low = max(first - block.offset, 0)
    high = min(end - block.offset, block.numel)
    while low < high:
        row, column = divmod(low, width)
        has_whole_rows = column == 0 and high - low >= width
        if has_whole_rows:
            part_end = high // width * width
            size = ((part_end - low) // width, *block.size[1:])
        else:
            part_end = min(high, (row + 1) * width)
            size = (1, part_end - low)
        yield TensorBlock(
            tensor=block.tensor,
            shape=block.shape,
            start=(block.start[0] + row, *(start + column for start in block.start[1:])),
            size=size,
            offset=block.offset + low,
        )
        low = part_end
