"""The tiles of `gpu_hash` as one Triton launch, where torch takes about forty for every 16 MiB."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, BLOCK, WARPS = 8192, 1024, 8


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def tiles_kernel(words, sums, count, size, seeds, tile: tl.constexpr, block: tl.constexpr):
    """Of each tile of `words` [count] int32 the mixed sums of both ways, one above the other, in `sums` int64."""
    first = tl.program_id(0).to(tl.int64) * tile
    high, low = tl.zeros([block], tl.uint32), tl.zeros([block], tl.uint32)
    for start in range(0, tile, block):
        place = first + start + tl.arange(0, block)
        there = place < count
        word = tl.load(words + place, mask=there, other=0).to(tl.uint32, bitcast=True)
        at = place.to(tl.uint32)
        one = _mixed(word ^ (at * 0x27D4EB2D + seeds[0].to(tl.uint32)) ^ ((at << 15) | (at >> 17)))
        other = _mixed(
            word ^ (at * 0x165667B1 + seeds[1].to(tl.uint32)) ^ ((at << 13) | (at >> 19))
        )
        high += tl.where(there, one, 0)
        low += tl.where(there, other, 0)
    bytes_ = size.to(tl.uint32)
    above = _mixed(tl.sum(high, 0) ^ bytes_).to(tl.uint64) << 32
    below = _mixed(tl.sum(low, 0) ^ bytes_).to(tl.uint64)
    tl.store(sums + tl.program_id(0), (above + below).to(tl.int64, bitcast=True))


def sum_of_tiles(words: Tensor, seeds: tuple[int, int]) -> int:
    """The sum, modulo 2^64 and with a sign, of all tiles of `words` [n] int32."""
    sums = torch.empty(-(-len(words) // TILE), dtype=torch.int64, device=words.device)
    tiles_kernel[(len(sums),)](
        words, sums, len(words), 4 * len(words), seeds, TILE, BLOCK, num_warps=WARPS
    )
    return int(sums.sum())
