"""Operators between the matrix products of layers and head on a GPU, one Triton launch each.

They are norms, SwiGLU, queries and keys, and two passes over each chunk of the head's
float32 logits. torch knows their shapes and gradients without a GPU.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_mas.megatron.main_grad import HeadWeightGrad, mark_grad_as_added
from mcore_mas.megatron.model.column_masks import ColumnMasks

# Smallest number of elements in a block of a norm.
_NORM_BLOCK = 2048

# Warps of all programs of a norm's gradient: as many as an H200 runs at a time. The number is the
# same on every GPU, so that sums have the same order.
_NORM_WARPS = 16 * 132


def _norm_blocks(rows: int, width: int) -> tuple[int, int, dict[str, int]]:
    """Return the number of row blocks, that of the gradient kernel's programs, and options of both kernels.

    A thread computes 16 elements of a block.
    """
    padded_width = 1 << (width - 1).bit_length()
    block_rows = max(1, _NORM_BLOCK // padded_width)
    warps = min(32, block_rows * padded_width // 512)
    blocks = -(-rows // block_rows)
    gradient_programs = min(blocks, _NORM_WARPS // warps)
    options = {"block_rows": block_rows, "block_columns": padded_width, "num_warps": warps}
    return blocks, gradient_programs, options


@torch.library.custom_op("mcore_mas::norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from mcore_mas.megatron.model import layer_kernels as kernels

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks, _, options = _norm_blocks(*x.shape)
    sizes = (*x.shape, x.stride(0))
    kernels.norm_kernel[(blocks,)](x, weight, out, sizes, eps, **options)
    return out


@torch.library.custom_op("mcore_mas::norm_gradient", mutates_args=())
def _norm_gradient(
    x: Tensor, weight: Tensor, grad_out: Tensor, eps: float, trains_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and the partial sums [programs, width] of the weight's gradient.

    Each program of the kernel computes one partial sum. For a frozen weight there are none.
    """
    from mcore_mas.megatron.model import layer_kernels as kernels

    _, programs, options = _norm_blocks(*x.shape)
    grad_x, weight_parts = _empty_norm_gradients(x, trains_weight)
    results = (grad_x, weight_parts if trains_weight else None)
    sizes = (*x.shape, x.stride(0))
    kernels.norm_gradient_kernel[(programs,)](x, weight, grad_out, results, sizes, eps, **options)
    return grad_x, weight_parts


def _empty_norm_gradients(x: Tensor, trains_weight: bool) -> tuple[Tensor, Tensor]:
    programs = _norm_blocks(*x.shape)[1] if trains_weight else 0
    return x.new_empty(x.shape), x.new_empty(programs, x.shape[1], dtype=torch.float32)


_norm.register_fake(lambda x, *_: x.new_empty(x.shape))
_norm_gradient.register_fake(
    lambda x, weight, grad_out, eps, trains_weight: _empty_norm_gradients(x, trains_weight)
)


class KernelNorm(torch.autograd.Function):
    """`apply(x, weight, eps)`: x [..., width] over its root mean square, times the weight.

    The method is arXiv 1910.07467. The gradient of the weight is added to Megatron's float32
    buffer, if there is one, without being rounded before.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.flatten(0, -2)  # a view even if keys lie between queries and values
        assert rows.stride(1) == 1, "elements of a row must be neighbours"
        ctx.save_for_backward(rows, weight)
        ctx.eps = eps
        ctx.main_grad = getattr(weight, "main_grad", None)
        return cast(Tensor, _norm(rows, weight, eps)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        trains_weight = ctx.needs_input_grad[1]
        grad_rows, weight_parts = _norm_gradient(
            rows, weight, grad_out.contiguous(), ctx.eps, trains_weight
        )
        grad_x = grad_rows.view(grad_out.shape)
        if not trains_weight:
            return grad_x, None, None
        return grad_x, _add_to_main_grad(weight, ctx.main_grad, weight_parts.sum(0)), None


def _add_to_main_grad(weight: Tensor, main_grad: Tensor | None, gradient: Tensor) -> Tensor:
    """Add a float32 gradient to Megatron's buffer, if there is one; return the gradient for autograd."""
    if main_grad is None:
        return gradient.to(weight.dtype)
    main_grad.add_(gradient)
    return mark_grad_as_added(weight)


# Columns of a row that a program of SwiGLU computes.
SWIGLU_BLOCK = 1024

# Warps of a program of SwiGLU.
_LAYER_WARPS = 4


@torch.library.custom_op("mcore_mas::swiglu", mutates_args=())
def swiglu(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute SwiGLU, silu(gate) · up (arXiv 2002.05202).

    Args:
        gate_and_up: [..., 2 f] contiguous, the gate first.
        scale: [...] factor of each row; None: 1.

    Returns:
        [..., f]
    """
    from mcore_mas.megatron.model import layer_kernels as kernels

    out = _empty_swiglu_output(gate_and_up)
    width = out.shape[-1]
    grid = _swiglu_grid(out)
    kernels.swiglu_kernel[grid](
        gate_and_up, scale, out, width, SWIGLU_BLOCK, num_warps=_LAYER_WARPS
    )
    return out


def _empty_swiglu_output(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    return gate_and_up.new_empty(*gate_and_up.shape[:-1], gate_and_up.shape[-1] // 2)


@torch.library.custom_op("mcore_mas::swiglu_gradient", mutates_args=())
def _swiglu_gradient(
    gate_and_up: Tensor, scale: Tensor | None, grad_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate_and_up`, and of `scale` in one part of each block [..., blocks].

    Without a scale the second result is [0].
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
        num_warps=_LAYER_WARPS,
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
    return grad_gate_and_up, None if scale is None else scale_parts.sum(-1).to(scale.dtype)


swiglu.register_fake(_empty_swiglu_output)
swiglu.register_autograd(
    _swiglu_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
_swiglu_gradient.register_fake(_empty_swiglu_gradients)


# Warps of a program of queries and keys, and of their gradient. A program computes all heads of a token.
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
    packed: Tensor, weights: list[Tensor], angles: Tensor, heads: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """Return queries [T, kv_heads · group, d] and keys [T, kv_heads, d]; see `KernelQueriesAndKeys`."""
    from mcore_mas.megatron.model import layer_kernels as kernels

    results = _empty_queries_and_keys(packed, weights, angles, heads, eps)
    kernels.queries_and_keys_kernel[(len(packed),)](
        packed,
        tuple(weights) or None,
        angles,
        results,
        (packed.stride(0), angles.stride(0)),
        eps,
        num_warps=_HEADS_WARPS,
        **_heads_options(*heads),
    )
    return results


def _empty_queries_and_keys(
    packed: Tensor, weights: list[Tensor], angles: Tensor, heads: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    group, kv_heads, dim = heads
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
    heads: list[int],
    eps: float,
    trains_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `packed`, and partial sums [programs, 2, d] of those of the weights.

    For frozen weights there are none. Without norms `packed` is None.
    """
    from mcore_mas.megatron.model import layer_kernels as kernels

    grad_packed, weight_parts = _empty_packed_gradients(gradients[0], heads, trains_weights)
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
        **_heads_options(*heads),
    )
    return grad_packed, weight_parts


def _heads_programs(tokens: int) -> int:
    return min(tokens, _NORM_WARPS // _HEADS_GRADIENT_WARPS)


def _empty_packed_gradients(
    grad_queries: Tensor, heads: list[int], trains_weights: bool
) -> tuple[Tensor, Tensor]:
    group, kv_heads, dim = heads
    tokens = len(grad_queries)
    programs = _heads_programs(tokens) if trains_weights else 0
    weight_parts = grad_queries.new_empty(programs, 2, dim, dtype=torch.float32)
    return grad_queries.new_empty(tokens, kv_heads * (group + 2) * dim), weight_parts


_queries_and_keys_gradient.register_fake(
    lambda packed, weights, angles, gradients, heads, eps, trains_weights: _empty_packed_gradients(
        gradients[0], heads, trains_weights
    )
)


class KernelQueriesAndKeys(torch.autograd.Function):
    """`apply(packed, query_weight, key_weight, angles, heads, eps)`: queries, keys and values.

    `packed` is [T, 1, kv_heads (group + 2) d], the result of the linear layer, with the queries of a
    group, the key and the value of each key/value head. `heads` is (group, kv_heads, d). Queries and
    keys are normalized by `KernelNorm`'s formula, unless the weights are None, and then rotated by
    `angles` [T, 1, 1, d] (RoPE, arXiv 2104.09864). The results are [T, 1, heads, d]; the values are
    a view. Gradients of the weights are added to Megatron's float32 buffers, if there are some.
    """

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        angles: Tensor,
        heads: tuple[int, int, int],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = packed.squeeze(1)
        assert rows.stride(1) == 1, "elements of a token must be neighbours"
        token_angles = angles.flatten(1)
        weights = []
        if query_weight is not None and key_weight is not None:
            weights = [query_weight, key_weight]
        queries, keys = _queries_and_keys(rows, weights, token_angles, list(heads), eps)

        group, kv_heads, dim = heads
        values = packed.view(len(rows), 1, kv_heads, (group + 2) * dim)[..., (group + 1) * dim :]
        # Without norms, the gradient does not depend on the rows.
        ctx.save_for_backward(rows if weights else None, token_angles, *weights)
        ctx.heads = heads
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
            list(ctx.heads),
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


# Columns of logits that a program reads at a time, and its warps.
_HEAD_BLOCK = 4096
_HEAD_WARPS = 8


@torch.library.custom_op("mcore_mas::head_rows", mutates_args=())
def head_row_statistics(
    logits: Tensor, labels: Tensor, temperatures: Tensor, columns: int
) -> Tensor:
    """Reduce the rows of a chunk of logits.

    Args:
        logits: [rows, padded columns] float32.
        labels: [rows] columns; one that is out of range belongs to another rank.
        temperatures: [rows].
        columns: number of columns without padding.

    Returns:
        [4, rows] float32, of z = logits / temperature: the largest z, Σ e^(z − largest),
        Σ z e^(z − largest), and the label's z, or 0 if the label belongs to another rank.
    """
    from mcore_mas.megatron.model import layer_kernels as kernels

    statistics = torch.empty(4, len(logits), dtype=torch.float32, device=logits.device)
    sizes = (columns, logits.shape[1], logits.stride(0))
    kernels.head_statistics_kernel[(len(logits),)](
        logits, labels, temperatures, statistics, sizes, _HEAD_BLOCK, num_warps=_HEAD_WARPS
    )
    return statistics


head_row_statistics.register_fake(
    lambda logits, *_: logits.new_empty(4, len(logits), dtype=torch.float32)
)


@torch.library.custom_op("mcore_mas::head_gradient", mutates_args=())
def head_logits_gradient(
    logits: Tensor, labels: Tensor, row_values: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    """Compute the gradient of a chunk of logits.

    Args:
        logits, labels, columns: arguments of `head_row_statistics`.
        row_values: [5, rows] temperatures, log Z, entropies, and the gradients of the
            log-probabilities and of the entropies.
        dtype: type of the result.

    Returns:
        [rows, padded columns]
    """
    from mcore_mas.megatron.model import layer_kernels as kernels

    gradient = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    sizes = (columns, logits.shape[1], logits.stride(0))
    blocks = -(-logits.shape[1] // _HEAD_BLOCK)
    kernels.head_gradient_kernel[len(logits), blocks](
        logits, labels, row_values, gradient, sizes, _HEAD_BLOCK, num_warps=_HEAD_WARPS
    )
    return gradient


head_logits_gradient.register_fake(
    lambda logits, labels, row_values, columns, dtype: logits.new_empty(logits.shape, dtype=dtype)
)


class KernelHead(torch.autograd.Function):
    """Log-probabilities and entropies with Triton's kernels; see `logprobs_and_entropy`.

    `apply(hidden, weight, labels, temperatures, columns, embeds, chunks, masks)`: `labels` are
    counted from this rank's first column, `columns` is the number of its columns without padding,
    `embeds` is True if the embedding shares the weight and passes on a gradient itself, `chunks`
    are the row ranges that are computed together, and `masks` are the rows' `ColumnMasks`, or
    None. The gradient of the weight is added to Megatron's float32 buffer, if there is one. Logits
    are float32, and never rounded to the factors' bfloat16.
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
        chunks: Sequence[slice],
        masks: ColumnMasks | None,
    ) -> tuple[Tensor, Tensor]:
        # Of z = logits / temperature in this rank's columns: max z, Σ e^(z − max),
        # Σ z e^(z − max), and the label's z (0 on other ranks).
        statistics = torch.empty(4, len(labels), dtype=torch.float32, device=hidden.device)
        logits = hidden.new_empty(0)
        for chunk in chunks:
            del logits  # free the memory before the next chunk needs it
            logits = _float32_logits(hidden[chunk], weight)
            if masks is not None:
                masks.apply(logits, chunk)
            statistics[:, chunk] = head_row_statistics(
                logits, labels[chunk], temperatures[chunk], columns
            )

        group = parallel_state.get_tensor_model_parallel_group()
        local_peak, local_sum, local_weighted, local_label = statistics
        peak = local_peak.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        rescale = (local_peak - peak).exp()
        sums = torch.stack([local_sum * rescale, local_weighted * rescale, local_label])
        dist.all_reduce(sums, group=group)
        log_partition = peak + sums[0].log()
        entropy = log_partition - sums[1] / sums[0]  # H = log Z − E[z]

        ctx.set_materialize_grads(False)
        ctx.columns = columns
        ctx.embeds = embeds
        ctx.chunks = chunks
        ctx.masks = masks
        ctx.main_grad = getattr(weight, "main_grad", None)
        # The last chunk's logits are kept, the others' computed again.
        ctx.save_for_backward(hidden, weight, labels, temperatures, log_partition, entropy, logits)
        return sums[2] - log_partition, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, temperatures, log_partition, entropy, last_logits = (
            ctx.saved_tensors
        )
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_partition)
        if grad_entropy is None:
            grad_entropy = torch.zeros_like(log_partition)
        row_values = torch.stack(
            [temperatures, log_partition, entropy, grad_logprobs, grad_entropy]
        )

        grad_hidden = torch.empty_like(hidden)
        weight_grad = HeadWeightGrad(
            weight,
            main_grad=ctx.main_grad,
            is_trained=ctx.needs_input_grad[1],
            embeds=ctx.embeds,
        )
        for chunk in ctx.chunks:
            is_last = chunk is ctx.chunks[-1]
            logits = last_logits if is_last else _float32_logits(hidden[chunk], weight)
            if ctx.masks is not None and not is_last:
                ctx.masks.apply(logits, chunk)
            grad_logits = head_logits_gradient(
                logits,
                labels[chunk],
                row_values[:, chunk].contiguous(),
                ctx.columns,
                weight.dtype,
            )
            del logits
            grad_hidden[chunk] = grad_logits @ weight
            weight_grad.add(grad_logits, hidden[chunk])
            del grad_logits  # free the memory before the next chunk needs it

        # Every rank has computed the part of its own columns.
        dist.all_reduce(grad_hidden, group=parallel_state.get_tensor_model_parallel_group())
        return grad_hidden, weight_grad.result(), None, None, None, None, None, None


def _float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute hidden · weightᵀ [rows, columns] in float32."""
    if hidden.dtype == torch.float32:
        return hidden @ weight.t()
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
