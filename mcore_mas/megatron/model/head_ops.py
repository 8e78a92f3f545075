"""Head of a policy on a GPU: two Triton launches for each chunk of float32 logits.

`KernelHead` computes logits in the forward pass, and those of all chunks but the last again in the
backward pass. `OnePassHead` computes them once: it needs the gradients of the results while the
chunk's logits exist, and thus a loss that is a sum over rows. The fake implementations of
`head_row_statistics` and `head_logits_gradient` give torch the shapes of results without a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_mas.megatron.main_grad import HeadWeightGrad
from mcore_mas.megatron.model.column_masks import ColumnMasks

# Function of (log-probabilities [n], entropies [n], rows) that returns the gradients [n] of the loss in
# both; the second is None if the loss does not depend on entropies. `rows` is the range of the n rows
# among all rows.
RowGradients: TypeAlias = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor | None]]

# Columns of logits that a program reads at a time, and its warps.
_HEAD_BLOCK = 4096
_HEAD_WARPS = 8


@torch.library.custom_op("mcore_mas::head_rows", mutates_args=())
def head_row_statistics(
    logits: Tensor, labels: Tensor, temperatures: Tensor, columns: int
) -> Tensor:
    """Compute the softmax statistics of each row of a chunk of logits.

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

    `apply(hidden, weight, labels, temperatures, columns, is_embedding, chunks, masks)`: `hidden` is
    [N, hidden]. `weight` is [columns with padding, hidden]: the rows of the head that this rank holds,
    each of which gives one column of the rank's logits. `columns` is the number of these columns without
    padding, and `labels` are counted from the first of them. `is_embedding` is True if the weight is also
    the embedding of this pipeline stage. `chunks` are the row ranges that are computed together. `masks`
    are the rows' `ColumnMasks`, or None. The gradient of the weight is added to Megatron's float32
    buffer, if there is one. Logits are float32, and never rounded to the factors' bfloat16.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        columns: int,
        is_embedding: bool,
        chunks: Sequence[slice],
        masks: ColumnMasks | None,
    ) -> tuple[Tensor, Tensor]:
        statistics = torch.empty(4, len(labels), dtype=torch.float32, device=hidden.device)
        logits = hidden.new_empty(0)  # deleted at once, unless there are no chunks
        for chunk in chunks:
            del logits  # free the memory before the next chunk needs it
            logits = _float32_logits(hidden[chunk], weight, masks, chunk)
            statistics[:, chunk] = head_row_statistics(
                logits, labels[chunk], temperatures[chunk], columns
            )
        logprobs, entropy, log_partition = _combine_over_ranks(statistics)

        ctx.set_materialize_grads(False)
        ctx.columns = columns
        ctx.is_embedding = is_embedding
        ctx.chunks = chunks
        ctx.masks = masks
        ctx.main_grad = getattr(weight, "main_grad", None)
        # The last chunk's logits are kept, the others' computed again.
        ctx.last_logits = logits
        ctx.save_for_backward(hidden, weight, labels, temperatures, log_partition, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, temperatures, log_partition, entropy = ctx.saved_tensors
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
            is_embedding=ctx.is_embedding,
        )
        # The last chunk comes first, so that the memory of its logits is free for the others.
        logits, ctx.last_logits = ctx.last_logits, None
        for chunk in reversed(ctx.chunks):
            if logits is None:
                logits = _float32_logits(hidden[chunk], weight, ctx.masks, chunk)
            grad_logits = head_logits_gradient(
                logits,
                labels[chunk],
                row_values[:, chunk].contiguous(),
                ctx.columns,
                weight.dtype,
            )
            logits = None
            grad_hidden[chunk] = grad_logits @ weight
            weight_grad.add(grad_logits, hidden[chunk])
            del grad_logits  # free the memory before the next chunk needs it

        # Every rank has computed the part of its own columns.
        dist.all_reduce(grad_hidden, group=parallel_state.get_tensor_model_parallel_group())
        return grad_hidden, weight_grad.result(), None, None, None, None, None, None


class OnePassHead(torch.autograd.Function):
    """`KernelHead` that computes its gradients in the forward pass, while a chunk's logits exist.

    `apply(hidden, weight, labels, temperatures, columns, is_embedding, chunks, masks, row_gradients)`:
    `row_gradients` returns the gradients of a chunk's results. The backward pass must be given the
    same gradients; it does not read them. The gradient of the weight is added to Megatron's float32
    buffer in the forward pass, so every forward pass must be followed by its backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        columns: int,
        is_embedding: bool,
        chunks: Sequence[slice],
        masks: ColumnMasks | None,
        row_gradients: RowGradients,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = torch.empty(2, len(labels), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        weight_grad = HeadWeightGrad(
            weight,
            main_grad=getattr(weight, "main_grad", None),
            is_trained=ctx.needs_input_grad[1],
            is_embedding=is_embedding,
        )
        for chunk in chunks:
            logits = _float32_logits(hidden[chunk], weight, masks, chunk)
            statistics = head_row_statistics(logits, labels[chunk], temperatures[chunk], columns)
            logprobs[chunk], entropy[chunk], log_partition = _combine_over_ranks(statistics)

            grad_logprobs, grad_entropy = row_gradients(logprobs[chunk], entropy[chunk], chunk)
            if grad_entropy is None:
                grad_entropy = torch.zeros_like(grad_logprobs)
            row_values = torch.stack(
                [temperatures[chunk], log_partition, entropy[chunk], grad_logprobs, grad_entropy]
            )
            grad_logits = head_logits_gradient(
                logits, labels[chunk], row_values, columns, weight.dtype
            )
            del logits
            grad_hidden[chunk] = grad_logits @ weight
            weight_grad.add(grad_logits, hidden[chunk])
            del grad_logits  # free the memory before the next chunk needs it

        # Every rank has computed the part of its own columns.
        dist.all_reduce(grad_hidden, group=parallel_state.get_tensor_model_parallel_group())
        ctx.set_materialize_grads(False)
        ctx.weight_grad = weight_grad
        ctx.save_for_backward(grad_hidden)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, _grad_logprobs: Tensor | None, _grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return grad_hidden, ctx.weight_grad.result(), *[None] * 7


def _float32_logits(
    hidden: Tensor, weight: Tensor, masks: ColumnMasks | None, rows: slice
) -> Tensor:
    """Compute logits [n, columns with padding] in float32, and apply the masks of the rows.

    Args:
        hidden: [n, hidden].
        weight: [columns with padding, hidden].
        masks: sampling masks of all rows; None allows all tokens.
        rows: range of the n rows among all rows.
    """
    if hidden.dtype == torch.float32:
        logits = hidden @ weight.t()
    else:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    if masks is not None:
        masks.apply(logits, rows)
    return logits


def _combine_over_ranks(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the statistics of all tensor-parallel ranks.

    Args:
        statistics: [4, n] of this rank, from `head_row_statistics`.

    Returns:
        Log-probabilities, entropies and log Z, each [n].
    """
    peak, sum_of_exponentials, weighted_sum, label_logit = statistics
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        group = parallel_state.get_tensor_model_parallel_group()
        local_peak = peak
        peak = local_peak.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        rescale = (local_peak - peak).exp()
        sums = torch.stack([sum_of_exponentials * rescale, weighted_sum * rescale, label_logit])
        dist.all_reduce(sums, group=group)
        sum_of_exponentials, weighted_sum, label_logit = sums
    log_partition = peak + sum_of_exponentials.log()
    entropy = log_partition - weighted_sum / sum_of_exponentials  # H = log Z − E[z]
    return label_logit - log_partition, entropy, log_partition
