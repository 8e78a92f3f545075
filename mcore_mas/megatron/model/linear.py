"""Linear layers on a CPU: their matrix products, which are most of an update there.

Where a weight is one factor, oneDNN multiplies faster than the library behind `torch.matmul`: forward, and backward to
a layer's inputs. The gradient of a weight is added to Megatron's buffer as it is made, instead of made and then added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

# Inductor's linear layer, where torch is built with oneDNN; its relative error is 3e-7 to 6e-7, of sums however long
_one_dnn: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
# multiplications from which on it pays: oneDNN makes a kernel for every new shape, in about 0.6 ms (measured, an update
# whose micro-batches all differ in length: 384 wide, 7 % less CPU time for all products by oneDNN; 64 wide, 26 % more)
_WORTH_A_KERNEL = 1 << 26


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weightᵀ [..., rows] of x [..., inputs] and a weight [rows, inputs]; carries no gradient."""
    suits = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() * len(weight) >= _WORTH_A_KERNEL
    if suits and _one_dnn is not None:
        return _one_dnn(x, weight, None, "none", [], "")
    return x @ weight.t()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in total's precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class ColumnLinear(ColumnParallelLinear):
    """Megatron's linear layer whose rows are cut across ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _linear(super()._forward_impl, input, weight, *args, **kwargs)


class RowLinear(RowParallelLinear):
    """Megatron's linear layer whose inputs are cut across ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _linear(super()._forward_impl, input, weight, *args, **kwargs)


def _linear(megatron: Callable[..., Tensor], x: Tensor, weight: Tensor, *, bias: Tensor | None, **how: Any) -> Tensor:
    """The product with a weight that is trained on the CPU; `megatron`'s own where ranks exchange along with it."""
    if x.device.type != "cpu" or not weight.requires_grad or how["allreduce_dgrad"] or how["sequence_parallel"]:
        return megatron(x, weight, bias=bias, **how)
    out: Tensor = _Linear.apply(x, weight)
    return out if bias is None else out + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = getattr(weight, "main_grad", None)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_out = of_out.contiguous()
        of_x = product(of_out, weight.t())
        rows, inputs = of_out.flatten(0, -2), x.flatten(0, -2)
        if ctx.total is None:
            return of_x, rows.t() @ inputs
        add_product(ctx.total, rows.t(), inputs)
        # Megatron then adds nothing more, but asks for a gradient all the same
        weight.grad_added_to_main_grad = True
        return of_x, torch.empty_like(weight)
