"""Operators between the matrix products of layers on a CPU: norm, SwiGLU, rotation, exponentials.

Both directions are written out in torch's operations, so that they pass over memory less often than
autograd would. Norms and rotations of bfloat16 tensors are computed in float32 and rounded once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LOG2_E = 1.4426950408889634


class Normed(torch.autograd.Function):
    """`apply(x, weight, eps)`: x / √(mean x² + eps) · weight, along the last dimension.

    The method is arXiv 1910.07467.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (x * scale).mul_(weight)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        x = x.float()
        grad = grad_out.float()
        factor = weight.float()
        x_grad = (x * grad).flatten(0, -2)
        # With n = x / rms: d/dx = (g w − n · mean(g w n)) / rms.
        mean = torch.mv(x_grad, factor).view(scale.shape).mul_(scale.pow(3)).div_(x.shape[-1])
        # sum() adds pairwise; a matrix product would add token by token, with a larger error.
        grad_weight = x_grad.mul_(scale.view(-1, 1)).sum(0)
        grad_x = (grad * factor).mul_(scale).addcmul_(x, mean, value=-1)
        return grad_x.to(grad_out.dtype), grad_weight.to(weight.dtype), None


class Gated(torch.autograd.Function):
    """`apply(gate_and_up)`: silu(gate) · up [..., f] of [..., 2 f] (SwiGLU, arXiv 2002.05202)."""

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


class _Rotated(torch.autograd.Function):
    """`apply(x, turns)`: see `turned`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor) -> Tensor:
        ctx.save_for_backward(turns)
        ctx.dtype = x.dtype
        return _turn(x.float(), turns, back=False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        (turns,) = ctx.saved_tensors
        return _turn(grad_out, turns, back=True).to(ctx.dtype), None


def _turn(x: Tensor, turns: Tensor, *, back: bool) -> Tensor:
    cos, sin = turns.chunk(2, dim=-1)
    first_half, second_half = x.chunk(2, dim=-1)
    swapped = torch.cat([second_half, first_half], dim=-1).mul_(sin)
    return torch.mul(x, cos).add_(swapped, alpha=-1 if back else 1)


def turned(x: Tensor, turns: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys by position (RoPE, arXiv 2104.09864), in float32 as attention is.

    Args:
        x: [T, 1, heads, d].
        turns: [T, 1, 1, 2 d] from `TreeRotary` on a CPU: the cosines of d angles, of which the
            second half repeats the first, and the factors of the swapped halves, −sin and sin.
        interleaved: False; no supported model pairs neighbouring elements.
    """
    assert not interleaved, "no supported model pairs neighbouring elements"
    out: Tensor = _Rotated.apply(x, turns)
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
