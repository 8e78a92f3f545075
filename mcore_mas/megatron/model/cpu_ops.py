"""Operators between the matrix products of layers on a CPU: norm, SwiGLU, rotation, exponentials.

Forward and backward passes are written out in torch's operations, and pass over memory less often
than autograd would. Norms and rotations of bfloat16 tensors, and their gradients, are computed in
float32 and rounded once, at the end. Only rotated queries and keys stay in float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LOG2_E = 1.4426950408889634


class CPUNorm(torch.autograd.Function):
    """`apply(x, weight, eps)`: x / √(mean x² + eps) · weight, along the last dimension.

    The method is arXiv 1910.07467.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (x * scale).mul_(weight)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        x = x.float()
        grad = grad_out.float()
        weight_float32 = weight.float()
        x_times_grad = (x * grad).flatten(0, -2)  # [rows, width]
        # With r = 1 / rms and n = x r: dx = r (w g − n mean(w g n)) = r w g − x · r³ mean(w g x).
        weighted_sum = torch.mv(x_times_grad, weight_float32).view(scale.shape)
        x_factor = weighted_sum.mul_(scale.pow(3)).div_(x.shape[-1])
        # sum() adds pairwise; a matrix product would add token by token, with a larger error.
        grad_weight = x_times_grad.mul_(scale.view(-1, 1)).sum(0)
        grad_x = (grad * weight_float32).mul_(scale).addcmul_(x, x_factor, value=-1)
        return grad_x.to(grad_out.dtype), grad_weight.to(weight.dtype), None


class CPUSwiGLU(torch.autograd.Function):
    """`apply(gate_and_up)`: silu(gate) · up [..., f] of [..., 2 f], the gate first.

    The method is SwiGLU, arXiv 2002.05202.
    """

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_and_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Tensor:
        gate_and_up, activated = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_and_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(grad_out, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_out * up, gate, grad_input=grad_gate)
        return grad


class _CPURotation(torch.autograd.Function):
    """`apply(x, cos_and_sin)`: see `rotate_on_cpu`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_and_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos_and_sin)
        ctx.dtype = x.dtype
        return _rotate(x.float(), cos_and_sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        (cos_and_sin,) = ctx.saved_tensors
        return _rotate(grad_out, cos_and_sin, back=True).to(ctx.dtype), None


def _rotate(x: Tensor, cos_and_sin: Tensor, *, back: bool) -> Tensor:
    """Rotate x, or rotate it back; see `rotate_on_cpu`."""
    cos, sin = cos_and_sin.chunk(2, dim=-1)
    first_half, second_half = x.chunk(2, dim=-1)
    swapped = torch.cat([second_half, first_half], dim=-1).mul_(sin)
    return torch.mul(x, cos).add_(swapped, alpha=-1 if back else 1)


def rotate_on_cpu(x: Tensor, cos_and_sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys by position (RoPE, arXiv 2104.09864), in float32.

    The result is not rounded to the type of x, because `TreeAttention` on a CPU takes float32.

    Args:
        x: [T, 1, heads, d]; element i is rotated together with element i + d / 2.
        cos_and_sin: [T, 1, 1, 2 d] from `TreeRotary` on a CPU: (cos, cos, −sin, sin) of d / 2
            angles. The first half is multiplied with x, the second with x whose halves are swapped.
        interleaved: False; no supported model pairs neighbouring elements.

    Returns:
        [T, 1, heads, d] float32.
    """
    assert not interleaved, "no supported model pairs neighbouring elements"
    out: Tensor = _CPURotation.apply(x, cos_and_sin)
    return out


def exponential(x: Tensor, exact: bool) -> Tensor:
    """Return e^x as a new tensor.

    Powers of two are used unless `exact`: on an AMD processor torch computes three of them in the
    time of one power of e. Their relative error is 3e-8 + 6e-8 |x|, and their last bit depends on
    the address of a number in memory.
    """
    if exact:
        return x.exp()
    return (x * _LOG2_E).exp2_()
