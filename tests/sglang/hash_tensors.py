"""Prints, as JSON, what SGLang's Triton kernels make of the bytes of each line of its input, interpreted by Triton."""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined

import torch
from sglang.kernels.ops.memory import gpu_tensor_hash as kernels

TILE, CHUNK, SEED, WORD = (
    8192,
    1024,
    0x243F6A88,
    (1 << 32) - 1,
)  # `gpu_tensor_hash` has them as defaults


def hashed(data: bytes) -> int:
    """`gpu_tensor_hash`, which asks for a GPU before it launches these."""
    words = torch.frombuffer(bytearray(data + bytes(-len(data) % 4)), dtype=torch.uint8).view(
        torch.uint32
    )
    sums = torch.empty(-(-len(words) // TILE), dtype=torch.uint64)
    kernels.hash_tiles32_kernel_blocked[(len(sums),)](
        words,
        sums,
        len(words),
        seed1=SEED,
        seed2=((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & WORD,
        FM_C1=kernels.FMIX32_C1,
        FM_C2=kernels.FMIX32_C2,
        POS_A=kernels.POS_C1,
        POS_B=kernels.POS_C2,
        TILE=TILE,
        BLOCK=256,
        USE_CG=True,
    )
    while len(sums) > 1:
        fewer = torch.empty(-(-len(sums) // CHUNK), dtype=torch.uint64)
        kernels.add_tree_reduce_u64_kernel[(len(fewer),)](sums, fewer, len(sums), CHUNK=CHUNK)
        sums = fewer
    return int(kernels._final_splitmix64(int(sums.item())))


if __name__ == "__main__":
    print(json.dumps([hashed(bytes.fromhex(line)) for line in sys.stdin.read().splitlines()]))
