"""Compile the Triton kernels for an H200 without one, as they are launched, and say what ptxas says of them.

Triton takes the arguments of a launch, specialises the kernel to them and compiles it, for a driver that is not there;
then it does not launch. So this runs all of a launch but the launch, in a process whose Triton does not interpret.
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
from mcore_mas.megatron.model import layer_ops
from mcore_mas.megatron.model.experts import add_grouped
from mcore_mas.megatron.model.layer_ops import KernelNorm, rotate_with_kernel, swiglu
from mcore_mas.megatron.model.layout import PackedTrees, TileSizes
from mcore_mas.megatron.model.tree_ops import KernelAttention


class Absent:
    """The driver of an H200, or of a GPU of another capability, that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # Triton has a compiler for each device

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compiled(work: Callable[[], object], capability: int = 90) -> list[dict[str, int]]:
    """Of each launch of `work`: registers, bytes spilled, KiB of shared memory, wgmma instructions."""
    triton.runtime.driver.set_active(Absent(capability))
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(run(kernel, *arguments, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    try:
        work()
    finally:
        JITFunction.run = run
    return [
        _figures(kernel, "sm_90a" if capability == 90 else f"sm_{capability}") for kernel in found
    ]


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
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=300
        ).stderr
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", said)),
        "shared": -(-kernel.metadata.shared // 1024),
        "wgmma": ptx.count("wgmma.mma_async"),
    }


def tree_kernels(
    group: int, head_dim: int, capability: int = 90, room: int = 227
) -> list[dict[str, int]]:
    """The three kernels of tree attention in bfloat16: forward, gradient of queries, gradients of keys and values."""
    sizes = TileSizes.of(group, head_dim, bf16=True, shared_memory_kib=room)
    plan = PackedTrees.of(
        [Segment(tokens=300), Segment(tokens=77, parent=0)], sizes=sizes
    ).block_plan

    def attend() -> None:
        whole = torch.zeros(377, 2 * (group + 2), head_dim, dtype=torch.bfloat16)
        q, k, v = (x.requires_grad_() for x in whole.split([2 * group, 2, 2], dim=1))
        out: Tensor = KernelAttention.apply(q, k, v, plan, 0.1)
        out.backward(torch.zeros_like(out))

    return compiled(attend, capability)


def head_kernels() -> list[dict[str, int]]:
    """The two kernels of the head, of bfloat16 weights."""

    def rows() -> None:
        logits, labels, numbers = (
            torch.zeros(8, 151_936),
            torch.zeros(8, dtype=torch.int64),
            torch.zeros(5, 8),
        )
        layer_ops.head_row_statistics(logits, labels, numbers[0], 151_669)
        layer_ops.head_logits_gradient(logits, labels, numbers, 151_669, torch.bfloat16)

    return compiled(rows)


def layer_kernels() -> list[dict[str, int]]:
    """Compile, in bfloat16, SwiGLU and the rotation of queries of Qwen3 4B, each with its gradient."""

    def compute() -> None:
        angles, given = torch.zeros(8, 1, 1, 128), {"dtype": torch.bfloat16, "requires_grad": True}
        for out in (
            swiglu(torch.zeros(8, 1, 2 * 9728, **given)),
            rotate_with_kernel(torch.zeros(8, 1, 32, 128, **given), angles),
        ):
            out.backward(torch.zeros_like(out))

    return compiled(compute)


def norm_kernels(width: int) -> list[dict[str, int]]:
    """A norm in bfloat16 and its gradient, of an x that lies between others; then the gradient of a frozen weight."""

    def compute() -> None:
        given = {"dtype": torch.bfloat16, "requires_grad": True}
        for weight in (torch.ones(width, **given), torch.ones(width, dtype=torch.bfloat16)):
            x = torch.zeros(64, 2, width, **given)[:, :1]
            out: Tensor = KernelNorm.apply(x, weight, 1e-6)
            out.backward(torch.zeros_like(out))

    return compiled(compute)


def expert_kernels() -> list[dict[str, int]]:
    """Of Qwen3 30B-A3B the gradient of its experts' first weights, weighed SwiGLU and its gradient; then float32's."""

    def compute() -> None:
        ends, given = torch.tensor([3, 8], dtype=torch.int32), {"dtype": torch.bfloat16}
        add_grouped(
            torch.zeros(2, 1536, 2048),
            torch.zeros(8, 1536, **given),
            torch.zeros(8, 2048, **given),
            ends,
        )
        wide, scale = (
            torch.zeros(8, 1536, **given, requires_grad=True),
            torch.zeros(8, requires_grad=True),
        )
        out: Tensor = swiglu(wide, scale)
        out.backward(torch.zeros_like(out))
        add_grouped(torch.zeros(2, 1536, 2048), torch.zeros(8, 1536), torch.zeros(8, 2048), ends)

    return compiled(compute)
