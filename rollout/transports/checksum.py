"""A checksum of a tensor's bytes, also while they are copied or written: XXH3 with 128 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from rollout.transports.blocks import Rows, blocks_of, cut

_PART = 1 << 19  # bytes: what is summed is still in the processor's cache after it was copied


class Checksum:
    """Of a tensor's shape, and of its bytes in the order of its indices, as they come."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._digest = xxhash.xxh3_128(str(list(shape)).encode())

    def add(self, data: np.ndarray) -> None:
        """Take the next bytes."""
        self._digest.update(data.data)

    def text(self) -> str:
        """32 hexadecimal digits."""
        return str(self._digest.hexdigest())


def checksum(tensor: Tensor) -> str:
    """The checksum of a tensor that is all there."""
    digest = Checksum(tensor.shape)
    digest.add(flat_bytes(tensor.detach().cpu().contiguous()))
    return digest.text()


def copy(rows: Rows, target: Tensor, digest: Checksum) -> Iterator[int]:
    """Copy into the float32 `target`, part by part, what the digest takes too; yields how many bytes lie there by then.

    Args:
        rows: of the same elements in the same order.
    """
    blocks, written = blocks_of(rows), 0
    for block, place in zip(blocks, cut(target, blocks), strict=True):
        data = block.detach().to("cpu", torch.float32).contiguous()
        source = flat_bytes(data)
        if place.is_contiguous():
            goal = flat_bytes(place)
            for first in range(0, len(source), _PART):
                part = source[first : first + _PART]
                goal[first : first + _PART] = part
                digest.add(part)
                yield written + first + len(part)
        else:
            place.copy_(data.view(place.shape))
            digest.add(source)
        written += len(source)
        yield written


def flat_bytes(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor on the CPU that lies in one piece."""
    flat: np.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    return flat
