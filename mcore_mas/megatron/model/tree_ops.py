"""Tree attention by Triton as two operators of torch, which know shapes without a GPU, and their autograd function."""

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from mcore_mas.megatron.model.layout import BlockPlan

_LOG2_E = 1.4426950408889634
WARPS, STAGES, STAGES_BACKWARD = 8, 3, 2  # of each program, and of the pipelines that fetch tiles


def _pointer(x: Tensor) -> tuple[Tensor, int, int]:
    assert x.stride(2) == 1, "elements of a head must be neighbours"
    return x, x.stride(0), x.stride(1)


def _shape(head_dim: int, group: int, rows: int, keys: int) -> tuple[Any, ...]:
    """The kernels' `shape`; its elements are constants to Triton, which of a tuple of numbers it does not know."""
    from triton.language import constexpr  # Triton comes with torch for CUDA only

    # float32 factors take three passes of tensor cores: "ieee" compiles for minutes, spills, and runs on none of them
    numbers = (group, head_dim, max(16, 1 << (head_dim - 1).bit_length()), rows, keys, "tf32x3")
    return tuple(map(constexpr, numbers))


def _plan(q: Tensor, plan: list[Tensor], scale: float) -> tuple[Any, ...]:
    return (*plan, *q.shape[:2], scale * _LOG2_E, scale)


@torch.library.custom_op("mcore_mas::tree_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], sizes: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    from mcore_mas.megatron.model import tree_kernels as kernels

    out, lse = (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        q.new_empty(q.shape[:2], dtype=torch.float32),
    )
    group, rows, keys, *_ = sizes
    tensors, shape = [_pointer(x) for x in (q, k, v, out)], _shape(q.shape[2], group, rows, keys)
    kernels.forward_kernel[len(plan[3]), k.shape[1]](
        *tensors, lse, _plan(q, plan, scale), shape, num_warps=WARPS, num_stages=STAGES
    )
    return out, lse


_attention.register_fake(
    lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32))
)


@torch.library.custom_op("mcore_mas::tree_attention_backward", mutates_args=())
def _attention_backward(
    of_out: Tensor, forward: list[Tensor], plan: list[Tensor], sizes: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from mcore_mas.megatron.model import tree_kernels as kernels

    q, k, v, out, lse = forward
    delta = torch.empty_like(lse)
    of_q, of_k, of_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    group, rows, keys, rows_kv, keys_kv = sizes
    q_, k_, v_, out_, of_out_ = (_pointer(x) for x in (q, k, v, out, of_out))
    numbers, how = _plan(q, plan, scale), {"num_warps": WARPS, "num_stages": STAGES_BACKWARD}
    shape = _shape(q.shape[2], group, rows, keys)
    kernels.backward_q_kernel[len(plan[3]), k.shape[1]](
        q_, k_, v_, (out_, lse, delta), of_out_, _pointer(of_q), numbers, shape, **how
    )
    shape = _shape(q.shape[2], group, rows_kv, keys_kv)
    kernels.backward_kv_kernel[len(plan[4]), k.shape[1]](
        (q_, lse, delta), k_, v_, of_out_, _pointer(of_k), _pointer(of_v), numbers, shape, **how
    )
    return of_q, of_k, of_v


_attention_backward.register_fake(
    lambda of_out, forward, *_: tuple(x.new_empty(x.shape) for x in forward[:3])
)


class KernelAttention(torch.autograd.Function):
    """`apply(q, k, v, plan, scale)`: [T, heads, d] of q [T, heads, d] and k, v [T, kv_heads, d], for any forest.

    Three launches in all: forward, gradient of queries, gradients of keys and values. The same bits every time.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float) -> Tensor:
        out: Tensor
        out, lse = _attention(q, k, v, _tensors(plan), list(astuple(plan.sizes)), scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        gradients = _attention_backward(
            of_out.contiguous(),
            list(ctx.saved_tensors),
            _tensors(plan),
            list(astuple(plan.sizes)),
            ctx.scale,
        )
        return *gradients, None, None


def _tensors(plan: BlockPlan) -> list[Tensor]:
    return [plan.ends, plan.seen, plan.begin, plan.masked, plan.nearest, plan.farthest]
