"""Gradients of weights that are accumulated directly in Megatron's float32 buffer (`main_grad`)."""

import torch
from torch import Tensor


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product a @ b to `total` in place, accumulating in the precision of `total`.

    On a CPU, the product of bfloat16 factors is rounded to bfloat16 before it is added.

    Args:
        total: [m, n], for example a float32 gradient buffer.
        a: [m, k], float32 or bfloat16.
        b: [k, n], of the same type as `a`.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cpu":
        total += a @ b
    else:  # cuBLAS adds a product of bfloat16 factors to a float32 matrix without rounding it first
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def mark_grad_as_added(weight: Tensor) -> Tensor:
    """Mark a weight's gradient as added to `main_grad`; return an uninitialised tensor of its shape.

    Autograd gets this tensor as the gradient. Megatron's hooks need one, and ignore its values
    because of the mark.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


class HeadWeightGrad:
    """Gradient of the head's weight, computed in chunks of rows and summed in float32."""

    def __init__(
        self, weight: Tensor, *, main_grad: Tensor | None, is_trained: bool, is_embedding: bool
    ) -> None:
        """Sum into Megatron's buffer, which has the gradients of earlier micro-batches, or into a new tensor.

        Args:
            weight: [columns, hidden].
            main_grad: Megatron's buffer of the weight, if there is one.
            is_trained: False if the weight is frozen and needs no gradient.
            is_embedding: True if the weight is also the embedding of this pipeline stage, so that
                autograd adds the embedding's gradient of the weight to the head's.
        """
        self._weight = weight
        self._is_in_buffer = main_grad is not None
        self._is_embedding = is_embedding
        self._total: Tensor | None = None
        if is_trained:
            self._total = main_grad
            if main_grad is None:
                self._total = torch.zeros(weight.shape, device=weight.device)

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add a chunk's grad_logitsᵀ · hidden to the gradient, unless the weight is frozen.

        Args:
            grad_logits: [rows, columns].
            hidden: [rows, hidden].
        """
        if self._total is not None:
            add_product(self._total, grad_logits.t(), hidden)

    def result(self) -> Tensor | None:
        """Return the gradient that the head's backward pass returns to autograd; None for a frozen weight.

        If the gradient is already in Megatron's buffer, autograd gets a placeholder, whose values
        Megatron's hook ignores. If the weight is also the embedding, the hook must still add the
        embedding's gradient to the buffer. Autograd then gets None, because it would add a
        placeholder to that gradient.
        """
        if self._total is None:
            return None
        if not self._is_in_buffer:
            return self._total.to(self._weight.dtype)
        if self._is_embedding:
            return None
        return mark_grad_as_added(self._weight)
