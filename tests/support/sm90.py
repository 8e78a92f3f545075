"""Compilation of the Triton kernels for an H200 on a machine without one, with figures of ptxas.

Triton specialises a kernel to the arguments of a launch and compiles it for a fake driver, but does
not launch it. This needs a process in which Triton does not interpret its kernels.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from mcore_mas.megatron.batch import Segment
from mcore_mas.megatron.model import head_ops
from mcore_mas.megatron.model.experts import add_grouped
from mcore_mas.megatron.model.layer_ops import (
    KernelNorm,
    KernelQueriesAndKeys,
    KernelSumAndNorm,
    swiglu,
)
from mcore_mas.megatron.model.layout import PackedTrees, TileSizes
from mcore_mas.megatron.model.tree_ops import KernelAttention
from rollout.engines.embedded import gpu_ops

# Columns of a wgmma instruction of bfloat16 factors, which multiplies [64, 16] and [16, columns]
_WGMMA_COLUMNS = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16")


class FakeDriver:
    """Triton driver of a GPU with this compute capability, which the machine lacks."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # Triton caches compiled kernels by device

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compiled(work: Callable[[], object], capability: int = 90) -> list[dict[str, int]]:
    """Return the figures of each kernel that `work` would launch.

    They are registers, bytes spilled, KiB of shared memory, wgmma instructions, and the multiplications
    of these in one run through the code, by all groups of four warps.
    """
    triton.runtime.driver.set_active(FakeDriver(capability))
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(kernel, *arguments, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    try:
        work()
    finally:
        JITFunction.run = run
    gpu = "sm_90a" if capability == 90 else f"sm_{capability}"
    return [_figures(kernel, gpu) for kernel in kernels]


def _figures(kernel: Any, gpu: str) -> dict[str, int]:
    ptx = kernel.asm["ptx"]
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        command = [
            str(ptxas),
            "-v",
            "--gpu-name",
            gpu,
            str(path),
            "-o",
            str(path.with_suffix(".cubin")),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return {
        "registers": int(re.findall(r"Used (\d+) registers", result.stderr)[0]),
        "spilled": sum(
            int(size) for size in re.findall(r"(\d+) bytes spill stores", result.stderr)
        ),
        "shared": -(-kernel.metadata.shared // 1024),
        "wgmma": ptx.count("wgmma.mma_async"),
        "multiplications": sum(64 * int(columns) * 16 for columns in _WGMMA_COLUMNS.findall(ptx))
        * (kernel.metadata.num_warps // 4),
    }


def tree_kernels(
    group: int, head_dim: int, capability: int = 90, shared_memory_kib: int = 227
) -> list[dict[str, int]]:
    """Compile tree attention in bfloat16: forward, gradient of queries, gradients of keys and values.

    Args:
        group: query heads per key/value head.
        shared_memory_kib: shared memory of the GPU for a block.
    """
    sizes = TileSizes.of(group, head_dim, bf16=True, shared_memory_kib=shared_memory_kib)
    segments = [Segment(tokens=300), Segment(tokens=77, parent=0)]
    plan = PackedTrees.of(segments, sizes=sizes).block_plan

    def attend() -> None:
        whole = torch.zeros(377, 2 * (group + 2), head_dim, dtype=torch.bfloat16)
        q, k, v = (x.requires_grad_() for x in whole.split([2 * group, 2, 2], dim=1))
        out: Tensor = KernelAttention.apply(q, k, v, plan, 0.1)
        out.backward(torch.zeros_like(out))

    return compiled(attend, capability)


def head_kernels() -> list[dict[str, int]]:
    """Compile the two kernels of the head, for bfloat16 weights."""

    def rows() -> None:
        logits = torch.zeros(8, 151_936)
        labels = torch.zeros(8, dtype=torch.int64)
        numbers = torch.zeros(5, 8)
        head_ops.head_row_statistics(logits, labels, numbers[0], 151_669)
        head_ops.head_logits_gradient(logits, labels, numbers, 151_669, torch.bfloat16)

    return compiled(rows)


def layer_kernels() -> list[dict[str, int]]:
    """Compile, in bfloat16, SwiGLU, and queries and keys of Qwen3 4B, each with its gradient."""

    def compute() -> None:
        options = {"dtype": torch.bfloat16, "requires_grad": True}
        angles = torch.zeros(8, 1, 1, 128)
        mixed = swiglu(torch.zeros(8, 1, 2 * 9728, **options))
        mixed.backward(torch.zeros_like(mixed))
        packed = torch.zeros(8, 1, 48 * 128, **options)
        weights = [torch.ones(128, **options) for _ in range(2)]
        heads = (4, 8, 128)
        queries, *_ = KernelQueriesAndKeys.apply(packed, *weights, angles, heads, 1e-6)
        queries.backward(torch.zeros_like(queries))

    return compiled(compute)


def norm_kernels(width: int) -> list[dict[str, int]]:
    """Compile a norm in bfloat16 of a strided input and its gradients, then with a frozen weight."""

    def compute() -> None:
        options = {"dtype": torch.bfloat16, "requires_grad": True}
        for weight in (torch.ones(width, **options), torch.ones(width, dtype=torch.bfloat16)):
            x = torch.zeros(64, 2, width, **options)[:, :1]
            out: Tensor = KernelNorm.apply(x, weight, 1e-6)
            out.backward(torch.zeros_like(out))

    return compiled(compute)


def sum_kernels(width: int) -> list[dict[str, int]]:
    """Compile a sum and its norm in bfloat16, and their gradient."""

    def compute() -> None:
        options = {"dtype": torch.bfloat16, "requires_grad": True}
        x, residual = (torch.zeros(64, 1, width, **options) for _ in range(2))
        total, normed = KernelSumAndNorm.apply(x, residual, torch.ones(width, **options), 1e-6)
        torch.autograd.backward([total, normed], [torch.zeros_like(total)] * 2)

    return compiled(compute)


def expert_kernels() -> list[dict[str, int]]:
    """Compile kernels of the experts of Qwen3 30B-A3B.

    They are the gradient of the experts' first weights in bfloat16, weighted SwiGLU, its gradient,
    and the gradient of the first weights in float32.
    """

    def compute() -> None:
        ends = torch.tensor([3, 8], dtype=torch.int32)
        total = torch.zeros(2, 1536, 2048)
        left = torch.zeros(8, 1536, dtype=torch.bfloat16)
        right = torch.zeros(8, 2048, dtype=torch.bfloat16)
        add_grouped(total, left, right, ends)
        gate_up = torch.zeros(8, 1536, dtype=torch.bfloat16, requires_grad=True)
        scale = torch.zeros(8, requires_grad=True)
        out: Tensor = swiglu(gate_up, scale)
        out.backward(torch.zeros_like(out))
        add_grouped(total, left.float(), right.float(), ends)

    return compiled(compute)


def engine_kernels(heads: int, kv_heads: int, head_dim: int, hidden: int) -> list[dict[str, int]]:
    """Compile the embedded engine's kernels in bfloat16.

    They are the norm, SwiGLU, the rotation with norms of queries and keys, attention in decoding,
    attention in decoding with splits and the sum of the splits, and attention in prefill.
    """

    def compute() -> None:
        options = {"dtype": torch.bfloat16}
        keys = torch.zeros(2, kv_heads, 64, head_dim, **options)
        delta = torch.zeros(3, hidden, **options)
        gpu_ops.add_norm(torch.zeros(3, hidden), delta, delta[0], 1e-6, torch.bfloat16)
        gpu_ops.fused_silu_and_mul(torch.zeros(3, 2 * hidden, **options), torch.bfloat16)
        q = gpu_ops.rotate_and_store(
            torch.zeros(3, (heads + 2 * kv_heads) * head_dim, **options),
            keys[0, 0, 0],
            keys[0, 0, 0],
            torch.zeros(64, head_dim // 2, 2),
            torch.zeros(3, 2, dtype=torch.int32),
            keys,
            keys,
            1e-6,
        )
        blocks = torch.zeros(3, 4, dtype=torch.int32)
        decoding_rows = gpu_ops.decoding_tile_rows(heads // kv_heads)
        for tile_rows, splits in ((decoding_rows, 1), (decoding_rows, 32), (128, 1)):
            gpu_ops.attend_to_cache(q, keys, keys, blocks, tile_rows, splits)

    return compiled(compute)
