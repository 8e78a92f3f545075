"""What a layer computes between its products, on a GPU by one launch each: SwiGLU, and the rotation by position."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from torch import Tensor

BLOCK, WARPS = 1024, 4  # columns of a row that a program of SwiGLU computes


def kernels_run(device: torch.device) -> bool:
    """Whether Triton's kernels compute on a device."""
    return device.type != "cpu" and importlib.util.find_spec("triton") is not None


@torch.library.custom_op("mcore_mas::swiglu", mutates_args=())
def _swiglu(wide: Tensor) -> Tensor:
    from mcore_mas.megatron.model import layer_kernels as kernels

    width = wide.shape[-1] // 2
    out = wide.new_empty(*wide.shape[:-1], width)
    kernels.swiglu_kernel[_grid(out)](wide, out, width, BLOCK, num_warps=WARPS)
    return out


@_swiglu.register_fake
def _(wide: Tensor) -> Tensor:
    return wide.new_empty(*wide.shape[:-1], wide.shape[-1] // 2)


@torch.library.custom_op("mcore_mas::swiglu_gradient", mutates_args=())
def _swiglu_gradient(wide: Tensor, of_out: Tensor) -> Tensor:
    from mcore_mas.megatron.model import layer_kernels as kernels

    of_wide = torch.empty_like(wide)
    width = wide.shape[-1] // 2
    kernels.swiglu_gradient_kernel[_grid(of_out)](wide, of_out, of_wide, width, BLOCK, num_warps=WARPS)
    return of_wide


@_swiglu_gradient.register_fake
def _(wide: Tensor, of_out: Tensor) -> Tensor:
    return torch.empty_like(wide)


def _grid(narrow: Tensor) -> tuple[int, int]:
    return narrow.numel() // narrow.shape[-1], -(-narrow.shape[-1] // BLOCK)


class KernelSwiGLU(torch.autograd.Function):
    """`apply(wide)`: silu(gate) · up [..., f] of contiguous `wide` [..., 2 f], gate first (arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        out: Tensor = _swiglu(wide)
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> Tensor:
        of_wide: Tensor = _swiglu_gradient(*ctx.saved_tensors, of_out.contiguous())
        return of_wide


@torch.library.custom_op("mcore_mas::rotate", mutates_args=())
def _rotate(x: Tensor, angles: Tensor, back: bool) -> Tensor:
    from mcore_mas.megatron.model import layer_kernels as kernels

    tokens, _, heads, dim = x.shape
    assert x.stride(3) == 1, "elements of a head must be neighbours"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = (heads, dim // 2, x.stride(0), x.stride(2), angles.stride(0))
    powers = [1 << (size - 1).bit_length() for size in sizes[:2]]
    kernels.rotate_kernel[(tokens,)](x, angles, out, sizes, back, *powers, num_warps=WARPS)
    return out


@_rotate.register_fake
def _(x: Tensor, angles: Tensor, back: bool) -> Tensor:
    return x.new_empty(x.shape)


class KernelRotation(torch.autograd.Function):
    """`apply(x, angles)`: queries or keys [T, 1, heads, d] rotated by angles [T, 1, 1, d] (RoPE, arXiv 2104.09864)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        out: Tensor = _rotate(x, angles, False)
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, None]:
        of_x: Tensor = _rotate(of_out.contiguous(), *ctx.saved_tensors, True)
        return of_x, None


def rotated(x: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """`KernelRotation`, called as Transformer Engine's."""
    assert not interleaved, "no supported model pairs neighbouring elements"
    out: Tensor = KernelRotation.apply(x, angles)
    return out


class GatedMLP(MLP):
    """Megatron's MLP as all these models have it, of a layer or an expert: two halves, SwiGLU, no biases.

    With selective recomputation SwiGLU's product is freed once it is multiplied, and made again in the backward pass.
    """

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> Any:
        """(output [..., hidden], None) of hidden states of that shape; an expert's [T] scales are of its tokens."""
        wide, _bias = self.linear_fc1(hidden_states)
        if self.config.recompute_granularity != "selective":
            return self.linear_fc2(gated(wide, per_token_scale))
        product = CheckpointWithoutOutput()
        out = self.linear_fc2(product.checkpoint(gated, wide, per_token_scale))
        product.discard_output_and_register_recompute(out[0])
        return out


def gated(wide: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) · up [..., f] of `wide` [..., 2 f], gate first; times the `scale` of each row, if there is one."""
    if kernels_run(wide.device):
        out: Tensor = KernelSwiGLU.apply(wide)
    else:
        gate, up = wide.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out if scale is None else (out * scale.unsqueeze(-1)).to(out.dtype)
