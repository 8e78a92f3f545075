"""Compile the Triton kernels for an H200 without one, and say what ptxas says of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ARCHITECTURE = "sm_90a"


def compiled(
    kernel: Any, signature: dict[str, Any], shape: tuple[Any, ...] | int, *, warps: int, stages: int
) -> dict[str, int]:
    """Registers, bytes spilled, KiB of shared memory and wgmma instructions of a kernel whose last is `shape`.

    Args:
        signature: types by parameter, tuples for tuples; "stride" is an i32 that 16 divides, as it does pointers.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {**signature, names[-1]: ("constexpr",) * len(shape) if isinstance(shape, tuple) else "constexpr"}
    last = len(names) - 1
    constants = {(last, i): value for i, value in enumerate(shape)} if isinstance(shape, tuple) else {(last,): shape}
    source = ASTSource(
        kernel,
        signature={name: _plain(kind) for name, kind in types.items()},
        constexprs=constants,
        attrs=dict(_divisible([types[name] for name in names])),
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    ptx = built.asm["ptx"]
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        command = [str(ptxas), "-v", "--gpu-name", ARCHITECTURE, str(path), "-o", str(path.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", said)),
        "shared": built.metadata.shared // 1024,
        "wgmma": ptx.count("wgmma.mma_async"),
    }


def _plain(kind: Any) -> Any:
    return tuple(map(_plain, kind)) if isinstance(kind, tuple) else kind.replace("stride", "i32")


def _divisible(types: Any, at: tuple[int, ...] = ()) -> Any:
    for number, kind in enumerate(types):
        here = (*at, number)
        if isinstance(kind, tuple):
            yield from _divisible(kind, here)
        elif kind.startswith("*") or kind == "stride":
            yield here, [["tt.divisibility", 16]]


def tree_kernels(group: int, head_dim: int) -> list[dict[str, int]]:
    """The three kernels of tree attention in bfloat16, with the tiles that a GPU gets."""
    from mcore_mas.megatron.layout import TileSizes
    from mcore_mas.megatron.model import tree_kernels as kernels
    from mcore_mas.megatron.model import tree_ops as ops

    sizes = TileSizes.of(group, head_dim, bf16=True)
    x, f = ("*bf16", "stride", "stride"), "*fp32"
    plan = (*["*i32"] * 6, "i32", "i32", "fp32", "fp32")
    queries = ops.padded_shape(head_dim, group, sizes.rows, sizes.keys)
    keys = ops.padded_shape(head_dim, group, sizes.rows_kv, sizes.keys_kv)
    backward = {"warps": ops.WARPS, "stages": ops.STAGES_BACKWARD}
    of_q = {"q": x, "k": x, "v": x, "forward": (x, f, f), "of_out": x, "of_q": x, "plan": plan}
    of_kv = {"q": (x, f, f), "k": x, "v": x, "of_out": x, "of_k": x, "of_v": x, "plan": plan}
    out = {"q": x, "k": x, "v": x, "out": x, "lse": f, "plan": plan}
    return [
        compiled(kernels.forward_kernel, out, queries, warps=ops.WARPS, stages=ops.STAGES),
        compiled(kernels.backward_q_kernel, of_q, queries, **backward),
        compiled(kernels.backward_kv_kernel, of_kv, keys, **backward),
    ]


def head_kernels() -> list[dict[str, int]]:
    """The two kernels of the head, of bfloat16 weights."""
    from mcore_mas.megatron.model import head_kernels as kernels
    from mcore_mas.megatron.model import head_ops as ops

    f, sizes, how = "*fp32", ("i32", "i32", "stride"), {"warps": ops.WARPS, "stages": 3}
    rows = {"logits": f, "labels": "*i64", "temperatures": f, "found": f, "sizes": sizes}
    gradient = {"logits": f, "labels": "*i64", "numbers": f, "gradient": "*bf16", "sizes": sizes}
    return [
        compiled(kernels.rows_kernel, rows, ops.BLOCK, **how),
        compiled(kernels.gradient_kernel, gradient, ops.BLOCK, **how),
    ]
