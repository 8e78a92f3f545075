"""What layers and head compute between their products on a GPU, by a launch of Triton each.

Norms, SwiGLU, the rotation by position, and two passes over each chunk of the head's logits, which cuBLAS makes in
float32.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_mas.megatron.main_grad import add_product, head_weight_grad, placeholder_grad

# Elements that a program of a norm has at least at a time, and warps of all programs of its gradient: what is resident
# on an H200 at a time, but as many on any GPU, so that sums have one order
_NORM_BLOCK, _NORM_WARPS = 2048, 16 * 132


def _norm_blocks(rows: int, width: int) -> tuple[int, int, dict[str, int]]:
    """Blocks of rows, programs of the gradient, and how a block is computed: 16 elements by each thread."""
    power = 1 << (width - 1).bit_length()
    size = max(1, _NORM_BLOCK // power)
    warps, blocks = min(32, size * power // 512), -(-rows // size)
    return (
        blocks,
        min(blocks, _NORM_WARPS // warps),
        {"rows": size, "width": power, "num_warps": warps},
    )


@torch.library.custom_op("mcore_mas::norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from mcore_mas.megatron.model import layer_kernels as kernels

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks, _, how = _norm_blocks(*x.shape)
    kernels.norm_kernel[(blocks,)](x, weight, out, (*x.shape, x.stride(0)), eps, **how)
    return out


@torch.library.custom_op("mcore_mas::norm_gradient", mutates_args=())
def _norm_gradient(
    x: Tensor, weight: Tensor, of_out: Tensor, eps: float, trains: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and in parts [programs, width] that of the weight, or [0, width] of one that is frozen."""
    from mcore_mas.megatron.model import layer_kernels as kernels

    _, programs, how = _norm_blocks(*x.shape)
    of_x, parts = _norm_gradient_results(x, trains)
    made, sizes = (of_x, parts if trains else None), (*x.shape, x.stride(0))
    kernels.norm_gradient_kernel[(programs,)](x, weight, of_out, made, sizes, eps, **how)
    return of_x, parts


def _norm_gradient_results(x: Tensor, trains: bool) -> tuple[Tensor, Tensor]:
    parts = _norm_blocks(*x.shape)[1] if trains else 0
    return x.new_empty(x.shape), x.new_empty(parts, x.shape[1], dtype=torch.float32)


_norm.register_fake(lambda x, *_: x.new_empty(x.shape))
_norm_gradient.register_fake(
    lambda x, weight, of_out, eps, trains: _norm_gradient_results(x, trains)
)


class KernelNorm(torch.autograd.Function):
    """`apply(x, weight, eps)`: x [..., width] over its root mean square, times the weight (arXiv 1910.07467).

    The weight's gradient is added to Megatron's float32 buffer where there is one, never rounded before.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.flatten(0, -2)  # a view also where keys lie between queries and values
        assert rows.stride(1) == 1, "elements of a row must be neighbours"
        ctx.save_for_backward(rows, weight)
        ctx.eps, ctx.total = eps, getattr(weight, "main_grad", None)
        return cast(Tensor, _norm(rows, weight, eps)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        of_x, parts = _norm_gradient(
            rows, weight, of_out.contiguous(), ctx.eps, ctx.needs_input_grad[1]
        )
        of_x = of_x.view(of_out.shape)
        if not ctx.needs_input_grad[1]:
            return of_x, None, None
        if ctx.total is None:
            return of_x, parts.sum(0).to(weight.dtype), None
        ctx.total.add_(parts.sum(0))
        return of_x, placeholder_grad(weight), None


LAYER_BLOCK, _LAYER_WARPS = 1024, 4  # columns of a row that a program of SwiGLU computes


@torch.library.custom_op("mcore_mas::swiglu", mutates_args=())
def swiglu(wide: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) · up [..., f] of contiguous `wide` [..., 2 f], gate first (arXiv 2002.05202), times `scale` [...]."""
    from mcore_mas.megatron.model import layer_kernels as kernels

    width = wide.shape[-1] // 2
    out = wide.new_empty(*wide.shape[:-1], width)
    kernels.swiglu_kernel[_grid(out)](wide, scale, out, width, LAYER_BLOCK, num_warps=_LAYER_WARPS)
    return out


@torch.library.custom_op("mcore_mas::swiglu_gradient", mutates_args=())
def _swiglu_gradient(wide: Tensor, scale: Tensor | None, of_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `wide`, and in parts [..., blocks] that of the scale, or [0] where there is none."""
    from mcore_mas.megatron.model import layer_kernels as kernels

    grid, of_wide = _grid(of_out), torch.empty_like(wide)
    of_scale = wide.new_empty(
        (*wide.shape[:-1], grid[1]) if scale is not None else 0, dtype=torch.float32
    )
    sizes = of_out.shape[-1], LAYER_BLOCK
    kernels.swiglu_gradient_kernel[grid](
        wide, scale, of_out, of_wide, of_scale, *sizes, num_warps=_LAYER_WARPS
    )
    return of_wide, of_scale


def _grid(narrow: Tensor) -> tuple[int, int]:
    return narrow.numel() // narrow.shape[-1], -(-narrow.shape[-1] // LAYER_BLOCK)


def _swiglu_backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, Tensor | None]:
    wide, scale = ctx.saved_tensors
    of_wide, of_scale = _swiglu_gradient(wide, scale, of_out.contiguous())
    return of_wide, None if scale is None else of_scale.sum(-1).to(scale.dtype)


swiglu.register_fake(lambda wide, scale=None: wide.new_empty(*wide.shape[:-1], wide.shape[-1] // 2))
swiglu.register_autograd(
    _swiglu_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
_swiglu_gradient.register_fake(
    lambda wide, scale, of_out: (
        torch.empty_like(wide),
        wide.new_empty(
            (*wide.shape[:-1], _grid(of_out)[1]) if scale is not None else 0, dtype=torch.float32
        ),
    )
)


@torch.library.custom_op("mcore_mas::rotate", mutates_args=())
def _rotate(x: Tensor, angles: Tensor, back: bool) -> Tensor:
    from mcore_mas.megatron.model import layer_kernels as kernels

    tokens, _, heads, dim = x.shape
    assert x.stride(3) == 1, "elements of a head must be neighbours"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = (heads, dim // 2, x.stride(0), x.stride(2), angles.stride(0))
    powers = [1 << (size - 1).bit_length() for size in sizes[:2]]
    kernels.rotate_kernel[(tokens,)](x, angles, out, sizes, back, *powers, num_warps=_LAYER_WARPS)
    return out


_rotate.register_fake(lambda x, angles, back: x.new_empty(x.shape))
_rotate.register_autograd(
    lambda ctx, of_out: (_rotate(of_out.contiguous(), *ctx.saved_tensors, True), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def rotated(x: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Queries or keys [T, 1, heads, d] by angles [T, 1, 1, d] (RoPE, arXiv 2104.09864), as Transformer Engine's."""
    assert not interleaved, "no supported model pairs neighbouring elements"
    return cast(Tensor, _rotate(x, angles, False))


_HEAD_BLOCK, _HEAD_WARPS = 4096, 8  # columns that a program reads at a time


@torch.library.custom_op("mcore_mas::head_rows", mutates_args=())
def _rows(logits: Tensor, labels: Tensor, temperatures: Tensor, columns: int) -> Tensor:
    from mcore_mas.megatron.model import layer_kernels as kernels

    found = torch.empty(4, len(logits), dtype=torch.float32, device=logits.device)
    sizes = (columns, logits.shape[1], logits.stride(0))
    kernels.rows_kernel[(len(logits),)](
        logits, labels, temperatures, found, sizes, _HEAD_BLOCK, num_warps=_HEAD_WARPS
    )
    return found


_rows.register_fake(lambda logits, *_: logits.new_empty(4, len(logits), dtype=torch.float32))


@torch.library.custom_op("mcore_mas::head_gradient", mutates_args=())
def _gradient(
    logits: Tensor, labels: Tensor, numbers: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    from mcore_mas.megatron.model import layer_kernels as kernels

    gradient = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    sizes = (columns, logits.shape[1], logits.stride(0))
    blocks = -(-logits.shape[1] // _HEAD_BLOCK)
    kernels.gradient_kernel[len(logits), blocks](
        logits, labels, numbers, gradient, sizes, _HEAD_BLOCK, num_warps=_HEAD_WARPS
    )
    return gradient


_gradient.register_fake(
    lambda logits, labels, numbers, columns, dtype: logits.new_empty(logits.shape, dtype=dtype)
)


class KernelHead(torch.autograd.Function):
    """`apply(hidden, weight, labels, temperatures, columns, embeds, parts)`: as `logprobs_and_entropy`.

    Labels count from this rank's first column. The weight's gradient is added to Megatron's float32 buffer where there
    is one. Logits are float32, never rounded to the factors' bfloat16.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        columns: int,
        embeds: bool,
        parts: Sequence[slice],
    ) -> tuple[Tensor, Tensor]:
        found = torch.empty(4, len(labels), dtype=torch.float32, device=hidden.device)
        logits = hidden.new_empty(0)
        for part in parts:
            del logits  # before the next are made
            logits = _logits(hidden[part], weight)
            found[:, part] = _rows(logits, labels[part], temperatures[part], columns)
        group = parallel_state.get_tensor_model_parallel_group()
        peak = found[0].clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shrink = (found[0] - peak).exp()
        sums = torch.stack([found[1] * shrink, found[2] * shrink, found[3]])
        dist.all_reduce(sums, group=group)
        log_z = peak + sums[0].log()
        # H = log Z − E[z]
        entropy = log_z - sums[1] / sums[0]
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.embeds, ctx.parts = columns, embeds, parts
        ctx.total = getattr(weight, "main_grad", None)
        ctx.save_for_backward(hidden, weight, labels, temperatures, log_z, entropy, logits)
        return sums[2] - log_z, entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, temperatures, log_z, entropy, kept = ctx.saved_tensors
        given = [torch.zeros_like(log_z) if x is None else x for x in (of_logprobs, of_entropy)]
        numbers = torch.stack([temperatures, log_z, entropy, *given])
        of_hidden, total = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            total = (
                torch.zeros(weight.shape, device=weight.device) if ctx.total is None else ctx.total
            )
        for part in ctx.parts:
            logits = kept if part is ctx.parts[-1] else _logits(hidden[part], weight)
            gradient = _gradient(
                logits, labels[part], numbers[:, part].contiguous(), ctx.columns, weight.dtype
            )
            del logits
            of_hidden[part] = gradient @ weight
            if total is not None:
                add_product(total, gradient.t(), hidden[part])
            del gradient  # before the next is made
        # every rank has the part of its own columns
        dist.all_reduce(of_hidden, group=parallel_state.get_tensor_model_parallel_group())
        return of_hidden, head_weight_grad(weight, total, ctx), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[rows, columns] float32."""
    if hidden.dtype == torch.float32:
        return hidden @ weight.t()
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
