"""Weight buffers in one storage, each filled from the tensor of its name in a weight stream."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.models.tensors import (
    WEIGHT_UPDATE,
    RowBlocks,
    WeightStream,
    blocks_of,
    check_stream,
    split_like,
)

# Storage of buffers that have shapes, but no memory: to count the elements that they need.
META_STORAGE = torch.empty(0, device="meta")

_ALIGNMENT = 16  # float32 numbers: every buffer starts on a cache line of the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBuffer:
    """Buffer of one tensor of a weight stream.

    Attributes:
        shape: shape of the tensor in the stream.
        view: the buffer with its elements in the stream's order; its own shape may differ.
    """

    shape: torch.Size
    view: Tensor


class NamedBuffers:
    """Buffers that are filled from a stream of named tensors.

    Attributes:
        buffers: buffers by the name of the tensor.
        elements: number of float32 elements of their storage.
    """

    buffers: Mapping[str, NamedBuffer]
    elements: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the full tensor of each buffer, as a stream would fill it."""
        for name, buffer in self.buffers.items():
            yield name, buffer.view.reshape(buffer.shape)

    def fill(self, stream: WeightStream, where: str = WEIGHT_UPDATE) -> None:
        """Copy a full set of named tensors into the buffers, and convert them to float32.

        Args:
            stream: stream of the tensors.
            where: folder or other source of the stream, for errors.

        Raises:
            EngineError: see `with_destinations`. The buffers are then a mixture of old and new.
        """
        for _, rows, destination in self.with_destinations(stream, where):
            blocks = blocks_of(rows)
            for block, part in zip(blocks, split_like(destination, blocks), strict=True):
                part.copy_(block.detach().reshape(part.shape))

    def with_destinations(
        self, stream: WeightStream, where: str = WEIGHT_UPDATE
    ) -> Iterator[tuple[str, RowBlocks, Tensor]]:
        """Yield each tensor of a stream as (name, tensor, destination).

        The destination is the view of a buffer: it has the tensor's elements in the same order.

        Args:
            stream: stream of the tensors.
            where: folder or other source of the stream, for errors.

        Raises:
            EngineError: a tensor is missing, unknown, repeated or of another shape.
        """
        shapes = {name: buffer.shape for name, buffer in self.buffers.items()}
        for name, rows in check_stream(stream, shapes, where):
            yield name, rows, self.buffers[name].view


class BufferAllocator:
    """Divider of one storage into consecutive, aligned buffers.

    Attributes:
        used: number of elements of the storage that buffers have, including padding.
    """

    def __init__(self, storage: Tensor) -> None:
        """Divide `storage`, a flat tensor; `META_STORAGE` gives buffers without memory."""
        self.used = 0
        self._storage = storage

    def allocate(self, *size: int) -> Tensor:
        """Return the next buffer of the storage, in this size."""
        count = math.prod(size)
        first = self.used
        self.used += _ALIGNMENT * math.ceil(count / _ALIGNMENT)
        if self._storage.is_meta:
            return torch.empty(size, device="meta")
        return self._storage[first : first + count].view(size)


def in_hugging_face_order(buffer: Tensor, head_dim: int) -> Tensor:
    """View rows of queries or keys [heads · D, …] in Hugging Face's order, [heads, 2, D / 2, …].

    Hugging Face rotates dimension i of a head together with i + D / 2. In the buffers these two
    dimensions are neighbours, so that a rotation is one product of complex numbers.
    """
    pairs: Tensor = buffer.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2)
