"""Memory that tensors are copied to for a while: reused blocks on the host or on a device, and page-locked buffers."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_BLOCK_BYTES = 64 << 20  # a power of two, see `BlockMemory`


class BlockMemory:
    """Memory in blocks of one size that grows as needed; page-locked host memory, or memory of a device.

    Page-locked memory takes long to allocate, and torch rounds an allocation up to a power of two. Blocks of one such
    size waste nothing and are reused by every later copy.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Create an empty memory; `slots` allocates its blocks.

        Args:
            device: device of the blocks; None: the host, page-locked if there is a GPU.
        """
        self._blocks: list[Tensor] = []
        self._options: dict[str, Any]
        if device is None:
            self._options = {"pin_memory": torch.cuda.is_available()}
        else:
            self._options = {"device": device}

    def slots(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of a part of a tensor and its slot in this memory, both flat and as bytes.

        Called again with tensors of the same sizes, it yields the same slots, with the bytes that were written to them.

        Args:
            tensors: contiguous; one that does not fit into a block is cut into several parts.
        """
        position = 0
        for tensor in tensors:
            rest = tensor.detach().view(-1).view(torch.uint8)
            while len(rest):
                block, offset = divmod(position, _BLOCK_BYTES)
                if block == len(self._blocks):
                    self._blocks.append(
                        torch.empty(_BLOCK_BYTES, dtype=torch.uint8, **self._options)
                    )
                slot = self._blocks[block][offset:][: len(rest)]
                yield rest[: len(slot)], slot
                rest = rest[len(slot) :]
                position += len(slot)

    def swap(self, tensors: Iterable[Tensor]) -> None:
        """Swap the values of tensors with those in their slots; the host does not wait for the device."""
        for part, slot in self.slots(tensors):
            old_part = part.clone()
            part.copy_(slot, non_blocking=True)
            slot.copy_(old_part, non_blocking=True)


def pinned_buffers(sizes: Iterable[int]) -> list[Tensor]:
    """Allocate page-locked byte buffers, in descending order of size.

    torch rounds each page-locked allocation up to a power of two. So blocks of such sizes are allocated, and the
    buffers are cut from them. For the Adam moments of dense Qwen3 models, less than 1 % of the memory is wasted; for
    a few buffers of odd sizes it can be much more.
    """
    descending = sorted(sizes, reverse=True)
    remaining = sum(descending)
    block = torch.empty(0, dtype=torch.uint8)
    buffers = []
    for size in descending:
        if size > len(block):
            # Take the largest block that the remaining buffers can fill. If this buffer does not fit
            # into it, take the smallest block that it fits into.
            filled_bytes = 1 << (remaining.bit_length() - 1)
            sufficient_bytes = 1 << (size - 1).bit_length()
            block_bytes = max(filled_bytes, sufficient_bytes)
            block = torch.empty(
                block_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )
        buffers.append(block[:size])
        block = block[size:]
        remaining -= size
    return buffers


def flat_storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the storages of tensors as flat byte tensors, each non-empty storage once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage._cdata] = storage
    return [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for storage in storages.values()
    ]
