"""SGLang's hash of a tensor on a GPU, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

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
