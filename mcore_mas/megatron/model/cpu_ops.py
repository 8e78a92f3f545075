"""What layers compute between their products on a CPU: norm, SwiGLU, rotation by position, exponentials.

By torch's operations, in fewer passes over memory than those that autograd would take: each direction is written out.
What norm and rotation make of bfloat16 tensors is made in float32 and rounded once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LOG2_E = 1.4426950408889634


class Normed(torch.autograd.Function):
    """`apply(x, weight, eps)`: x / √(mean x² + eps) · weight (arXiv 1910.07467), along the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (x * scale).mul_(weight)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        x, slope, factor = x.float(), of_out.float(), weight.float()
        along = (x * slope).flatten(0, -2)
        # with n = x / rms: d/dx = (g w − n · mean(g w n)) / rms
        mean = torch.mv(along, factor).view(scale.shape).mul_(scale.pow(3)).div_(x.shape[-1])
        of_weight = along.mul_(scale.view(-1, 1)).sum(
            0
        )  # pairwise: a product would add token by token
        of_x = (slope * factor).mul_(scale).addcmul_(x, mean, value=-1)
        return of_x.to(of_out.dtype), of_weight.to(weight.dtype), None


class Gated(torch.autograd.Function):
    """`apply(wide)`: silu(gate) · up [..., f] of [..., 2 f], gate first (SwiGLU, arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> Tensor:
        gate, up = wide.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(wide, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> Tensor:
        wide, activated = ctx.saved_tensors
        of_wide = torch.empty_like(wide)
        (gate, up), (of_gate, of_up) = wide.chunk(2, dim=-1), of_wide.chunk(2, dim=-1)
        torch.mul(of_out, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(of_out * up, gate, grad_input=of_gate)
        return of_wide


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor) -> Tensor:
        ctx.save_for_backward(turns)
        ctx.dtype = x.dtype
        return _turn(x.float(), turns, back=False)

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, None]:
        return _turn(of_out, *ctx.saved_tensors, back=True).to(ctx.dtype), None


def _turn(x: Tensor, turns: Tensor, *, back: bool) -> Tensor:
    cos, sin = turns.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    across = torch.cat([second, first], dim=-1).mul_(sin)
    return torch.mul(x, cos).add_(across, alpha=-1 if back else 1)


def turned(x: Tensor, turns: Tensor, interleaved: bool = False) -> Tensor:
    """Queries or keys [T, 1, heads, d], rotated by position (RoPE, arXiv 2104.09864), in float32 as attention is.

    Args:
        turns: [T, 1, 1, 2 d] as `TreeRotary` makes them on a CPU: cosines of d angles, which are d / 2 twice, and what
            multiplies the other half: their sines, of the first half less than none.
        interleaved: False; no supported model pairs neighbouring elements.
    """
    assert not interleaved, "no supported model pairs neighbouring elements"
    out: Tensor = _Rotated.apply(x, turns)
    return out


def exponential(x: Tensor, exact: bool) -> Tensor:
    """e^x, new. If not `exact`, by powers of two: torch makes three on an AMD in the time of one of e.

    Their relative error is 3e-8 and 6e-8 |x|, and their last bit depends on where in memory a number lies.
    """
    return x.exp() if exact else (x * _LOG2_E).exp2_()
