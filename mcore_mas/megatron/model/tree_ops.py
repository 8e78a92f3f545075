"""Tree attention in Triton: an operator for each direction, and `KernelAttention`, which calls them.

The operators' fake implementations give torch the shapes of results and gradients without a GPU.
"""

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from mcore_mas.megatron.model.layout import BlockPlan

_LOG2_E = 1.4426950408889634

# Warps of each program, and stages of the software pipelines that fetch tiles.
WARPS = 8
STAGES = 3
STAGES_BACKWARD = 2


def _with_strides(x: Tensor) -> tuple[Tensor, int, int]:
    """Return a tensor [T, heads, d] and its first two strides, as the kernels take it."""
    assert x.stride(2) == 1, "elements of a head must be neighbours"
    return x, x.stride(0), x.stride(1)


def _kernel_shape(head_dim: int, group: int, rows: int, keys: int) -> tuple[Any, ...]:
    """Return the kernels' argument `shape`, whose elements are compile-time constants."""
    # Triton comes with torch for CUDA only.
    from triton.language import constexpr

    padded_dim = max(16, 1 << (head_dim - 1).bit_length())
    # float32 factors take three passes of the tensor cores. "ieee" would compile for minutes, spill
    # registers and not use the tensor cores.
    precision = "tf32x3"
    # Triton does not see by itself that numbers in a tuple are constants.
    return tuple(map(constexpr, (group, head_dim, padded_dim, rows, keys, precision)))


def _kernel_plan(q: Tensor, plan: list[Tensor], scale: float) -> tuple[Any, ...]:
    """Return the kernels' argument `plan` for q [T, heads, d] and the tensors of a plan."""
    tokens, heads, _ = q.shape
    return (*plan, tokens, heads, scale * _LOG2_E, scale)


def _query_blocks(plan: list[Tensor]) -> int:
    """Return the number of blocks of queries in a plan."""
    return len(plan[3])  # length of `first_masked`


@torch.library.custom_op("mcore_mas::tree_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], sizes: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention over a forest.

    Args:
        q: [T, heads, d].
        k, v: [T, kv_heads, d].
        plan: tensors of a `BlockPlan`, from `_plan_tensors`.
        sizes: values of its `TileSizes`.
        scale: factor of the scores.

    Returns:
        Output [T, heads, d], and log-sum-exps of the scores [T, heads] in float32.
    """
    from mcore_mas.megatron.model import tree_kernels as kernels

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    group, rows, keys, *_ = sizes
    query_blocks = _query_blocks(plan)
    kv_heads = k.shape[1]
    kernels.forward_kernel[query_blocks, kv_heads](
        _with_strides(q),
        _with_strides(k),
        _with_strides(v),
        _with_strides(out),
        lse,
        _kernel_plan(q, plan, scale),
        _kernel_shape(q.shape[2], group, rows, keys),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out, lse


_attention.register_fake(
    lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32))
)


@torch.library.custom_op("mcore_mas::tree_attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor, forward: list[Tensor], plan: list[Tensor], sizes: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v.

    Args:
        grad_out: gradient of the output.
        forward: q, k, v, output and log-sum-exps of `_attention`.
        plan, sizes, scale: arguments of `_attention`.
    """
    from mcore_mas.megatron.model import tree_kernels as kernels

    q, k, v, out, lse = forward
    delta = torch.empty_like(lse)
    grad_q, grad_k, grad_v = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    group, rows, keys, rows_kv, keys_kv = sizes
    query_blocks = _query_blocks(plan)
    key_blocks = len(plan[4])  # length of `smallest_end_kv`
    kv_heads = k.shape[1]
    kernel_plan = _kernel_plan(q, plan, scale)
    options = {"num_warps": WARPS, "num_stages": STAGES_BACKWARD}
    # The first kernel writes `delta`, and the second one reads it.
    kernels.backward_q_kernel[query_blocks, kv_heads](
        _with_strides(q),
        _with_strides(k),
        _with_strides(v),
        _with_strides(out),
        lse,
        delta,
        _with_strides(grad_out),
        _with_strides(grad_q),
        kernel_plan,
        _kernel_shape(q.shape[2], group, rows, keys),
        **options,
    )
    kernels.backward_kv_kernel[key_blocks, kv_heads](
        _with_strides(q),
        _with_strides(k),
        _with_strides(v),
        lse,
        delta,
        _with_strides(grad_out),
        _with_strides(grad_k),
        _with_strides(grad_v),
        kernel_plan,
        _kernel_shape(q.shape[2], group, rows_kv, keys_kv),
        **options,
    )
    return grad_q, grad_k, grad_v


_attention_backward.register_fake(
    lambda grad_out, forward, *_: tuple(x.new_empty(x.shape) for x in forward[:3])
)


class KernelAttention(torch.autograd.Function):
    """`apply(q, k, v, plan, scale)`: attention over any forest with Triton's kernels.

    q is [T, heads, d], k and v are [T, kv_heads, d], and the result is [T, heads, d]. There are
    three launches: forward, gradient of queries, and gradients of keys and values. The results have
    the same bits every time.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float) -> Tensor:
        out: Tensor
        out, lse = _attention(q, k, v, _plan_tensors(plan), list(astuple(plan.sizes)), scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        grad_q, grad_k, grad_v = _attention_backward(
            grad_out.contiguous(),
            list(ctx.saved_tensors),
            _plan_tensors(plan),
            list(astuple(plan.sizes)),
            ctx.scale,
        )
        return grad_q, grad_k, grad_v, None, None


def _plan_tensors(plan: BlockPlan) -> list[Tensor]:
    """Return the tensors of a plan, in the order in which the kernels' argument `plan` has them."""
    return [
        plan.ends,
        plan.key_blocks,
        plan.key_block_offsets,
        plan.first_masked,
        plan.smallest_end_kv,
        plan.largest_end_kv,
    ]
