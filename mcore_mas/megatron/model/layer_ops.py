"""Operators between the matrix products of layers on a GPU, one Triton launch each.

They compute norms, SwiGLU, and the norms and rotation of queries and keys. Their fake implementations
give torch the shapes of results and gradients without a GPU.
"""

from typing import Any

import torch
from torch import Tensor

from mcore_mas.megatron.main_grad import mark_grad_as_added

# Smallest number of elements in a block of a norm.
_NORM_BLOCK = 2048

# Maximum number of warps of a kernel that sums the gradient of a weight over rows, all programs
# together: 16 for each of an H200's 132 multiprocessors, which run them all at a time. The number is
# the same on every GPU, so that sums have the same order.
_MAX_GRADIENT_WARPS = 16 * 132


def _norm_blocks(rows: int, width: int) -> tuple[int, int, dict[str, int]]:
    """Return how the kernels of a norm of [rows, width] are launched.

    Returns:
        Number of blocks of rows, number of programs of the gradient kernel, and options of both
        kernels.
    """
    padded_width = 1 << (width - 1).bit_length()
    block_rows = max(1, _NORM_BLOCK // padded_width)
    warps = min(32, block_rows * padded_width // 512)  # 16 elements of a block for each thread
    blocks = -(-rows // block_rows)
    gradient_programs = min(blocks, _MAX_GRADIENT_WARPS // warps)
    options = {"block_rows": block_rows, "block_columns": padded_width, "num_warps": warps}
    return blocks, gradient_programs, options


@torch.library.custom_op("mcore_mas::write_norm", mutates_args={"out"})
def write_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Write the norm of x [rows, width] to `out`; see `KernelNorm`."""
    from mcore_mas.megatron.model import layer_kernels as kernels

    blocks, _, options = _norm_blocks(*x.shape)
    sizes = (*x.shape, x.stride(0))
    kernels.norm_kernel[(blocks,)](x, None, weight, (None, out), sizes, eps, **options)


@torch.library.custom_op("mcore_mas::sum_and_norm", mutates_args=())
def _sum_and_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum of x and residual [..., width], which are contiguous, and its norm."""
    from mcore_mas.megatron.model import layer_kernels as kernels

    total, normed = _empty_sum_and_norm(x)
    rows, width = x.flatten(0, -2).shape
    blocks, _, options = _norm_blocks(rows, width)
    sizes = (rows, width, width)
    kernels.norm_kernel[(blocks,)](x, residual, weight, (total, normed), sizes, eps, **options)
    return total, normed


def _empty_sum_and_norm(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("mcore_mas::norm_gradient", mutates_args=())
def _norm_gradient(
    x: Tensor,
    weight: Tensor,
    grad_out: Tensor,
    other_grad_x: Tensor | None,
    eps: float,
    trains_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and the partial sums [programs, width] of the weight's gradient.

    The gradient of x includes `other_grad_x`, the part from other operations, if there is one. Each
    program of the kernel computes one partial sum. For a frozen weight there are no partial sums.
    """
    from mcore_mas.megatron.model import layer_kernels as kernels

    _, programs, options = _norm_blocks(*x.shape)
    grad_x, weight_parts = _empty_norm_gradients(x, trains_weight)
    results = (grad_x, weight_parts if trains_weight else None)
    sizes = (*x.shape, x.stride(0))
    gradients = (grad_out, other_grad_x)
    kernels.norm_gradient_kernel[(programs,)](x, weight, gradients, results, sizes, eps, **options)
    return grad_x, weight_parts


def _empty_norm_gradients(x: Tensor, trains_weight: bool) -> tuple[Tensor, Tensor]:
    programs = _norm_blocks(*x.shape)[1] if trains_weight else 0
    return x.new_empty(x.shape), x.new_empty(programs, x.shape[1], dtype=torch.float32)


write_norm.register_fake(lambda *_: None)
_sum_and_norm.register_fake(_empty_sum_and_norm)
_norm_gradient.register_fake(
    lambda x, weight, grad_out, other_grad_x, eps, trains_weight: _empty_norm_gradients(
        x, trains_weight
    )
)


class KernelNorm(torch.autograd.Function):
    """`apply(x, weight, eps)`: x [..., width] over its root mean square, times the weight.

    The method is arXiv 1910.07467. The gradient of the weight is added to Megatron's float32
    buffer, if there is one, without being rounded first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # This is a view, even if x is a part of the columns of a wider tensor, whose rows lie apart.
        rows = x.flatten(0, -2)
        assert rows.stride(1) == 1, "elements of a row must be neighbours"
        ctx.save_for_backward(rows, weight)
        ctx.eps = eps
        ctx.main_grad = getattr(weight, "main_grad", None)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        write_norm(out.flatten(0, -2), rows, weight, eps)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        trains_weight = ctx.needs_input_grad[1]
        grad_rows, weight_parts = _norm_gradient(
            rows,
            weight,
            grad_out.contiguous(),
            other_grad_x=None,
            eps=ctx.eps,
            trains_weight=trains_weight,
        )
        grad_x = grad_rows.view(grad_out.shape)
        if not trains_weight:
            return grad_x, None, None
        return grad_x, _add_to_main_grad(weight, ctx.main_grad, weight_parts.sum(0)), None


class KernelSumAndNorm(torch.autograd.Function):
    """`apply(x, residual, weight, eps)`: the sum x + residual and its `KernelNorm`, in one launch.

    Both inputs are [..., width] and contiguous. The sum is rounded before it is normalized.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert x.is_contiguous() and residual.is_contiguous(), "rows must follow each other"
        total: Tensor
        normed: Tensor
        total, normed = _sum_and_norm(x, residual, weight, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.main_grad = getattr(weight, "main_grad", None)
        return total, normed

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor | None, grad_normed: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if grad_normed is None:
            return grad_total, grad_total, None, None
        total, weight = ctx.saved_tensors
        trains_weight = ctx.needs_input_grad[2]
        grad_rows, weight_parts = _norm_gradient(
            total.flatten(0, -2),
            weight,
            grad_normed.contiguous(),
            other_grad_x=None if grad_total is None else grad_total.contiguous(),
            eps=ctx.eps,
            trains_weight=trains_weight,
        )
        grad_x = grad_rows.view(total.shape)
        grad_weight = None
        if trains_weight:
            grad_weight = _add_to_main_grad(weight, ctx.main_grad, weight_parts.sum(0))
        return grad_x, grad_x, grad_weight, None


def _add_to_main_grad(weight: Tensor, main_grad: Tensor | None, gradient: Tensor) -> Tensor:
    """Add a float32 gradient to Megatron's buffer; return the tensor that autograd gets as the gradient.

    This tensor is the gradient if there is no buffer. Otherwise it is an uninitialised placeholder, see
    `mark_grad_as_added`.
    """
    if main_grad is None:
        return gradient.to(weight.dtype)
    main_grad.add_(gradient)
    return mark_grad_as_added(weight)


# Columns of a row that a program of SwiGLU computes.
SWIGLU_BLOCK = 1024

# Warps of a program of SwiGLU.
_SWIGLU_WARPS = 4


@torch.library.custom_op("mcore_mas::write_swiglu", mutates_args={"out"})
def write_swiglu(out: Tensor, gate_and_up: Tensor, scale: Tensor | None) -> None:
    """Write SwiGLU to `out`; see `swiglu`."""
    from mcore_mas.megatron.model import layer_kernels as kernels

    kernels.swiglu_kernel[_swiglu_grid(out)](
        gate_and_up, scale, out, out.shape[-1], SWIGLU_BLOCK, num_warps=_SWIGLU_WARPS
    )


@torch.library.custom_op("mcore_mas::swiglu", mutates_args=())
def swiglu(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute SwiGLU, silu(gate) · up · scale (arXiv 2002.05202).

    Args:
        gate_and_up: [..., 2 f] contiguous, the gate first.
        scale: [...] factor of each row; None: 1.

    Returns:
        [..., f]
    """
    out = _empty_swiglu_output(gate_and_up)
    write_swiglu(out, gate_and_up, scale)
    return out


def _empty_swiglu_output(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    return gate_and_up.new_empty(*gate_and_up.shape[:-1], gate_and_up.shape[-1] // 2)


@torch.library.custom_op("mcore_mas::swiglu_gradient", mutates_args=())
def _swiglu_gradient(
    gate_and_up: Tensor, scale: Tensor | None, grad_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `gate_and_up`, and partial sums [..., blocks] of the gradient of `scale`.

    There is one partial sum for each block of a row. Without a scale, the second result is empty.
    """
    from mcore_mas.megatron.model import layer_kernels as kernels

    grad_gate_and_up, scale_parts = _empty_swiglu_gradients(gate_and_up, scale, grad_out)
    kernels.swiglu_gradient_kernel[_swiglu_grid(grad_out)](
        gate_and_up,
        scale,
        grad_out,
        grad_gate_and_up,
        scale_parts,
        grad_out.shape[-1],
        SWIGLU_BLOCK,
        num_warps=_SWIGLU_WARPS,
    )
    return grad_gate_and_up, scale_parts


def _empty_swiglu_gradients(
    gate_and_up: Tensor, scale: Tensor | None, grad_out: Tensor
) -> tuple[Tensor, Tensor]:
    blocks = _swiglu_grid(grad_out)[1]
    scale_shape = (*gate_and_up.shape[:-1], blocks) if scale is not None else (0,)
    return torch.empty_like(gate_and_up), gate_and_up.new_empty(scale_shape, dtype=torch.float32)


def _swiglu_grid(out: Tensor) -> tuple[int, int]:
    """Return the number of rows, and of blocks in a row."""
    width = out.shape[-1]
    return out.numel() // width, -(-width // SWIGLU_BLOCK)


def _swiglu_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None]:
    gate_and_up, scale = ctx.saved_tensors
    grad_gate_and_up, scale_parts = _swiglu_gradient(gate_and_up, scale, grad_out.contiguous())
    grad_scale = None if scale is None else scale_parts.sum(-1).to(scale.dtype)
    return grad_gate_and_up, grad_scale


write_swiglu.register_fake(lambda *_: None)
swiglu.register_fake(_empty_swiglu_output)
swiglu.register_autograd(
    _swiglu_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
_swiglu_gradient.register_fake(_empty_swiglu_gradients)


# Warps of a program of queries and keys, and of their gradient. A program computes all heads of one
# token at a time.
_HEADS_WARPS = 8
_HEADS_GRADIENT_WARPS = 16


def _heads_options(group: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """Return the sizes of the kernels of queries and keys, which are compile-time constants."""
    # Triton comes with torch for CUDA only.
    from triton.language import constexpr

    heads = kv_heads * (group + 2)
    return {
        "sizes": tuple(map(constexpr, (group, kv_heads, dim // 2))),
        "padded_heads": 1 << (heads - 1).bit_length(),
        "padded_half": 1 << (dim // 2 - 1).bit_length(),
    }


@torch.library.custom_op("mcore_mas::queries_and_keys", mutates_args=())
def _queries_and_keys(
    packed: Tensor, weights: list[Tensor], angles: Tensor, head_sizes: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """Return queries [T, kv_heads · group, d] and keys [T, kv_heads, d]; see `KernelQueriesAndKeys`."""
    from mcore_mas.megatron.model import layer_kernels as kernels

    results = _empty_queries_and_keys(packed, weights, angles, head_sizes, eps)
    kernels.queries_and_keys_kernel[(len(packed),)](
        packed,
        tuple(weights) or None,
        angles,
        results,
        (packed.stride(0), angles.stride(0)),
        eps,
        num_warps=_HEADS_WARPS,
        **_heads_options(*head_sizes),
    )
    return results


def _empty_queries_and_keys(
    packed: Tensor, weights: list[Tensor], angles: Tensor, head_sizes: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    group, kv_heads, dim = head_sizes
    tokens = len(packed)
    queries = packed.new_empty(tokens, kv_heads * group, dim)
    return queries, packed.new_empty(tokens, kv_heads, dim)


_queries_and_keys.register_fake(_empty_queries_and_keys)


@torch.library.custom_op("mcore_mas::queries_and_keys_gradient", mutates_args=())
def _queries_and_keys_gradient(
    packed: Tensor | None,
    weights: list[Tensor],
    angles: Tensor,
    gradients: list[Tensor],
    head_sizes: list[int],
    eps: float,
    trains_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `packed`, and partial sums [programs, 2, d] of the weights' gradients.

    Each program of the kernel computes one partial sum. For frozen weights there are no partial sums.

    Args:
        packed: [T, kv_heads (group + 2) d]; None without norms, where the gradient does not depend on it.
        weights: weights [d] of the norms of queries and of keys; [] without norms.
        angles: [T, d].
        gradients: gradients of queries, keys and values.
        head_sizes: see `KernelQueriesAndKeys`.
        eps: number that is added to the mean square.
        trains_weights: False if the weights are frozen, or if there are none.
    """
    from mcore_mas.megatron.model import layer_kernels as kernels

    grad_packed, weight_parts = _empty_packed_gradients(gradients[0], head_sizes, trains_weights)
    tokens = len(grad_packed)
    packed_stride = 0 if packed is None else packed.stride(0)
    kernels.queries_and_keys_gradient_kernel[(_heads_programs(tokens),)](
        packed,
        tuple(weights) or None,
        angles,
        tuple(gradients),
        (grad_packed, weight_parts if trains_weights else None),
        (tokens, packed_stride, angles.stride(0)),
        eps,
        num_warps=_HEADS_GRADIENT_WARPS,
        **_heads_options(*head_sizes),
    )
    return grad_packed, weight_parts


def _heads_programs(tokens: int) -> int:
    """Return the number of programs of the gradient kernel of queries and keys."""
    return min(tokens, _MAX_GRADIENT_WARPS // _HEADS_GRADIENT_WARPS)


def _empty_packed_gradients(
    grad_queries: Tensor, head_sizes: list[int], trains_weights: bool
) -> tuple[Tensor, Tensor]:
    group, kv_heads, dim = head_sizes
    tokens = len(grad_queries)
    programs = _heads_programs(tokens) if trains_weights else 0
    weight_parts = grad_queries.new_empty(programs, 2, dim, dtype=torch.float32)
    return grad_queries.new_empty(tokens, kv_heads * (group + 2) * dim), weight_parts


_queries_and_keys_gradient.register_fake(
    lambda packed, weights, angles, gradients, head_sizes, eps, trains_weights: (
        _empty_packed_gradients(gradients[0], head_sizes, trains_weights)
    )
)


class KernelQueriesAndKeys(torch.autograd.Function):
    """`apply(packed, query_weight, key_weight, angles, head_sizes, eps)`: queries, keys and values.

    `packed` is [T, 1, kv_heads (group + 2) d], the result of the linear layer: for each key/value
    head, the query heads that share it, the key and the value. `head_sizes` is (group, kv_heads, d),
    where `group` is the number of query heads that share a key/value head. Queries and keys are
    normalized by `KernelNorm`'s formula, unless the weights are None, and then rotated by `angles`
    [T, 1, 1, d] (RoPE, arXiv 2104.09864). The results are [T, 1, heads, d]; the values are a view.
    Gradients of the weights are added to Megatron's float32 buffers, if there are any.
    """

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        angles: Tensor,
        head_sizes: tuple[int, int, int],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = packed.squeeze(1)
        assert rows.stride(1) == 1, "elements of a token must be neighbours"
        token_angles = angles.flatten(1)
        weights = []
        if query_weight is not None and key_weight is not None:
            weights = [query_weight, key_weight]
        queries, keys = _queries_and_keys(rows, weights, token_angles, list(head_sizes), eps)

        group, kv_heads, dim = head_sizes
        values = packed.view(len(rows), 1, kv_heads, (group + 2) * dim)[..., (group + 1) * dim :]
        # Without norms, the gradient does not depend on the rows.
        ctx.save_for_backward(rows if weights else None, token_angles, *weights)
        ctx.head_sizes = head_sizes
        ctx.eps = eps
        ctx.main_grads = [getattr(weight, "main_grad", None) for weight in weights]
        return queries[:, None], keys[:, None], values

    @staticmethod
    def backward(
        ctx: Any, grad_queries: Tensor, grad_keys: Tensor, grad_values: Tensor
    ) -> tuple[Tensor | None, ...]:
        rows, angles, *weights = ctx.saved_tensors
        trains_weights = ctx.needs_input_grad[1]
        grad_rows, weight_parts = _queries_and_keys_gradient(
            rows,
            weights,
            angles,
            [gradient.contiguous() for gradient in (grad_queries, grad_keys, grad_values)],
            list(ctx.head_sizes),
            ctx.eps,
            trains_weights,
        )
        weight_grads: list[Tensor | None] = [None, None]
        if trains_weights:
            totals = weight_parts.sum(0)
            weight_grads = [
                _add_to_main_grad(weight, main_grad, total)
                for weight, main_grad, total in zip(weights, ctx.main_grads, totals, strict=True)
            ]
        return grad_rows[:, None], *weight_grads, None, None, None
