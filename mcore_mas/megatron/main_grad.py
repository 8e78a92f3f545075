"""Gradients of weights that are accumulated directly in Megatron's float32 buffer (`main_grad`)."""

import torch
from torch import Tensor


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product a @ b to `total` in place, accumulating in the precision of `total`.

    Args:
        total: [m, n], for example a float32 gradient buffer.
        a: [m, k], float32 or bfloat16.
        b: [k, n], as `a`.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cpu":
        total += a @ b
    else:  # cuBLAS adds the product of bfloat16 factors to a float32 matrix without rounding
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def placeholder_grad(weight: Tensor) -> Tensor:
    """Return an empty gradient for a weight whose gradient is in `main_grad` already.

    Megatron's hooks need some tensor as the gradient, and skip it because of
    `grad_added_to_main_grad`.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def head_weight_grad(
    weight: Tensor, total: Tensor | None, *, main_grad: Tensor | None, embeds: bool
) -> Tensor | None:
    """Return what the backward pass of a head hands to autograd as the gradient of its weight.

    Args:
        total: the gradient of the weight; None: the weight is frozen.
        main_grad: buffer that `total` was accumulated in; None: `total` is a tensor of its own.
        embeds: the embedding shares the weight and passes on a gradient itself.
    """
    if total is None:
        return None
    if main_grad is None:
        return total.to(weight.dtype)
    if embeds:
        return None
    return placeholder_grad(weight)
