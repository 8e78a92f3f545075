"""Checksums of tensors: XXH3 over their bytes, and SGLang's own hash, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from rollout.models.tensors import RowBlocks, blocks_of, cut

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


def copy(rows: RowBlocks, target: Tensor, digest: Checksum) -> Iterator[int]:
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


_TILE = 8192  # words whose sum is mixed once more
_TILES = 512  # at once: bounds the memory
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))  # what a word's place is multiplied with, and rotated by
_WORD, _LONG = (1 << 32) - 1, (1 << 64) - 1


def gpu_hash(tensor: Tensor) -> int:
    """What `gpu_tensor_hash` of SGLang 0.5.23 (kernels/ops/memory/gpu_tensor_hash.py) gives: 64 bits of the memory.

    The bytes, filled up with zeros, are words of 32 bits. A word is xored with its place and mixed as in MurmurHash3
    (Appleby), in two ways; the sums of every 8192 are mixed with the size, and added up as numbers of 64 bits.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total = 0
    for first in range(0, len(data), _TILE * _TILES):
        words = data[first : first + _TILE * _TILES]
        at = torch.arange(first, first + len(words), device=data.device).to(torch.int32)
        high, low = (
            _tiles(_mix(words ^ (at * _signed(factor) + _signed(seed)) ^ _rotated(at, by)), 4 * len(data))
            for seed, (factor, by) in zip(_SEEDS, _PLACES, strict=True)
        )
        total += (int(high.sum()) << 32) + int(low.sum())
    return _finish(total & _LONG) if len(data) else 0


def _tiles(words: Tensor, size: int) -> Tensor:
    """The mixed sum of every tile, as int64."""
    whole = torch.nn.functional.pad(words, (0, -len(words) % _TILE)).view(-1, _TILE)
    sums = whole.sum(1, dtype=torch.int64) & _WORD
    return _mix((sums ^ (size & _WORD)).to(torch.int32)).to(torch.int64) & _WORD


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's fmix32 of int32, whose products wrap."""
    x = (x ^ _shifted(x, 16)) * _signed(0x85EBCA6B)
    x = (x ^ _shifted(x, 13)) * _signed(0xC2B2AE35)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in."""
    return (x >> by) & (_WORD >> by)


def _rotated(x: Tensor, by: int) -> Tensor:
    return (x << by) | _shifted(x, 32 - by)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _finish(x: int) -> int:
    """The end of SplitMix64 (Steele et al. 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LONG
    return x ^ (x >> 31)
