"""Linear layers that multiply with oneDNN on a CPU, where matrix products are most of an update.

oneDNN is faster than the library behind `torch.matmul` if one factor is a weight: in the forward
pass, and in the backward pass to the inputs. The gradient of a weight is accumulated directly in
Megatron's buffer. On a GPU the layers compute as Megatron's do, except that `LastLinear` skips a product
in full recomputation.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from mcore_mas.megatron.main_grad import add_product, mark_grad_as_added
from rollout.models.batch_invariant import row_product

# The operator behind Inductor's linear layers; None if torch is built without oneDNN. Its relative
# error is 3e-7 to 6e-7, however long the sums are.
_one_dnn_linear: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

# Smallest number of multiplications for which oneDNN is used. It compiles a kernel for every new
# shape, in about 0.6 ms. Measured on an update whose micro-batches all differ in length: if oneDNN
# makes all products, a model of width 384 takes 7 % less CPU time, and one of width 64 takes 26 %
# more.
_MIN_MULTIPLICATIONS = 1 << 26


def linear_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x weightᵀ of x [..., inputs] and a weight [outputs, inputs].

    It is for the methods of an `autograd.Function`, which computes the gradients itself.
    """
    is_float32_on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    is_large = x.numel() * len(weight) >= _MIN_MULTIPLICATIONS
    if is_float32_on_cpu and is_large and _one_dnn_linear is not None:
        return _one_dnn_linear(x, weight, None, "none", [], "")
    return x @ weight.t()


class ColumnLinear(ColumnParallelLinear):
    """Layer whose output features are split over tensor-parallel ranks, computed by `trained_linear`."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        exact = self.config.deterministic_mode
        return trained_linear(super()._forward_impl, input, weight, exact=exact, **kwargs)


class RowLinear(RowParallelLinear):
    """Layer whose input features are split over tensor-parallel ranks, computed by `trained_linear`."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        exact = self.config.deterministic_mode
        return trained_linear(super()._forward_impl, input, weight, exact=exact, **kwargs)


class LastLinear(RowLinear):
    """Last linear layer of a transformer layer, for full recomputation.

    Full recomputation computes a layer again to restore what its backward pass reads. The backward
    pass does not read the layer's output, so this product is not computed again.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        # Megatron runs the forward pass of a layer without autograd, and recomputes it with autograd.
        is_recomputed = self.training and torch.is_grad_enabled()
        if is_recomputed and weight.requires_grad:
            out: Tensor = _TrainedLinear.apply(input, weight, None)
            return out
        return super()._forward_impl(input, weight, **kwargs)


def trained_linear(
    megatron_forward: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    exact: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    **options: Any,
) -> Tensor:
    """Compute a linear layer on a CPU; elsewhere, call Megatron's implementation.

    Megatron's is also called where the ranks communicate during the product, and for frozen weights
    unless `exact`.

    Args:
        megatron_forward: Megatron's implementation, called with all other arguments but `exact`.
        x: [..., inputs].
        weight: [outputs, inputs].
        bias: [outputs].
        exact: a row of the output has the same bits whatever the other rows are.
        allreduce_dgrad: the gradient of `x` is summed over ranks.
        sequence_parallel: the tokens of `x` are split over ranks.
        options: further arguments of Megatron.

    Returns:
        [..., outputs]
    """
    ranks_communicate = allreduce_dgrad or sequence_parallel
    is_frozen = not weight.requires_grad
    if x.device.type != "cpu" or ranks_communicate or (is_frozen and not exact):
        return megatron_forward(
            x,
            weight,
            bias=bias,
            allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=sequence_parallel,
            **options,
        )

    out: Tensor = _TrainedLinear.apply(x, weight, row_product if exact else linear_product)
    return out if bias is None else out + bias


class _TrainedLinear(torch.autograd.Function):
    """`apply(x, weight, multiply)`: x weightᵀ.

    `multiply` computes the product; if it is None, the output is left uninitialised, because nothing
    reads it (see `LastLinear`). The gradient of the weight is added to Megatron's float32 buffer, if
    there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = getattr(weight, "main_grad", None)
        if multiply is None:
            return x.new_empty(*x.shape[:-1], len(weight))
        return multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_x = linear_product(grad_out, weight.t())
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None

        grad_rows = grad_out.flatten(0, -2)
        x_rows = x.flatten(0, -2)
        if ctx.main_grad is None:
            return grad_x, grad_rows.t() @ x_rows, None
        add_product(ctx.main_grad, grad_rows.t(), x_rows)
        return grad_x, mark_grad_as_added(weight), None
