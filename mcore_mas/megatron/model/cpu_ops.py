"""What layers compute between their products on a CPU: root-mean-square norm and rotation by position.

By torch's operations, in fewer passes over memory than those that autograd would take: each direction is written out.
Sums and products of bfloat16 tensors are made in float32 and rounded once.
"""

from typing import Any

import torch
from torch import Tensor


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
        normal = x * scale
        along = of_out * normal
        of_weight = along.flatten(0, -2).sum(0).to(weight.dtype)
        # with n = x / rms: d/dx = (g w − n · mean(g w n)) / rms
        mean = torch.matmul(along, weight.float()).div_(x.shape[-1]).unsqueeze(-1)
        of_x = (of_out.float() * weight).sub_(normal.mul_(mean)).mul_(scale)
        return of_x.to(x.dtype), of_weight, None


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
    out = torch.empty(x.shape)
    (first, second), (of_first, of_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    cos, sin = turns.chunk(2, dim=-1)
    torch.mul(first, cos, out=of_first)
    torch.mul(second, cos, out=of_second)
    ahead, behind = (of_first, of_second) if back else (of_second, of_first)
    ahead += (second if back else first) * sin
    behind -= (first if back else second) * sin
    return out


def turned(x: Tensor, turns: Tensor, interleaved: bool = False) -> Tensor:
    """Queries or keys [T, 1, heads, d], rotated by position (RoPE, arXiv 2104.09864), in float32 as attention is.

    Args:
        turns: [T, 1, 1, d] as `TreeRotary` makes them on a CPU: cosines, then sines, of d / 2 angles.
        interleaved: False; no supported model pairs neighbouring elements.
    """
    assert not interleaved, "no supported model pairs neighbouring elements"
    out: Tensor = _Rotated.apply(x, turns)
    return out
