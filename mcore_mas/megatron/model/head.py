"""Heads of the model: log-probabilities and entropies of a policy, and values of a critic."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_mas.megatron.device import use_triton
from mcore_mas.megatron.main_grad import HeadWeightGrad
from mcore_mas.megatron.model.column_masks import FORBIDDEN_LOGIT, ColumnMasks
from mcore_mas.megatron.model.cpu_ops import exponential
from mcore_mas.megatron.model.head_ops import KernelHead, OnePassHead, RowGradients
from mcore_mas.megatron.model.linear import linear_product
from rollout.models.batch_invariant import row_product


class OutputWeight(torch.nn.Module):
    """Weight of the output layer; a call returns it.

    The weight is read through a call, so that the forward hooks of the distributed optimizer first
    wait until all of it has been gathered.
    """

    def __init__(self, weight: torch.nn.Parameter | None) -> None:
        """Register the weight of Megatron's output layer.

        Args:
            weight: None where it is tied to the embedding of this stage.
        """
        super().__init__()
        self.register_parameter("weight", weight)

    def forward(self) -> Tensor:
        """Return the weight, [padded vocabulary / tp, hidden]."""
        return self.weight  # type: ignore[return-value]  # registered as a parameter


class ValueHead(torch.nn.Module):
    """Linear layer of a critic, with one output; the same on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # Small weights make values start near 0 at any width. The fixed seed makes them equal on
        # all ranks.
        generator = torch.Generator().manual_seed(0)
        initial = torch.randn(1, config.hidden_size, generator=generator) / (config.hidden_size + 1)
        self.value = torch.nn.Parameter(initial.to(config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32 values [N] of hidden states [N, hidden]."""
        return (hidden @ self.value.t())[:, 0].float()


# Bytes of float32 logits that exist at a time. On a GPU a chunk of a bfloat16 model needs 1.5 times as
# much memory, because the gradient of its logits, in bfloat16, exists beside the logits. Few large
# chunks are faster: each chunk reads the whole weight two or three times, and reads and writes the whole
# gradient of the weight.
CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}

# On the CPU a chunk should fit into the cache of a core, unless the matrix products would then have
# too few rows. As many of the last chunks as fit into CHUNK_BYTES are kept for the backward pass.
_CPU_CACHE_BYTES = 4 << 20
_MIN_CPU_ROWS = 128


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    vocab: int,
    *,
    is_embedding: bool,
    exact: bool,
    masks: Tensor | None = None,
    mask_rows: Tensor | None = None,
    row_gradients: RowGradients | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of `labels` and entropies of the policy, in float32.

    The policy is softmax(hidden · weightᵀ / temperature) over the tokens that a row's mask allows.
    Both results are differentiable; an entropy that no loss uses costs nothing in the backward pass. Logits
    are computed in chunks of rows, so that they never exist for all rows at once. The backward pass
    computes them again, except for the last chunks, which are kept. On a GPU with `row_gradients`,
    they are computed only once.

    Args:
        hidden: [N, hidden], the same on every tensor-parallel rank. So is its gradient.
        weight: [padded vocabulary / tp, hidden], this rank's rows.
        labels: [N] global token ids.
        temperatures: [N], all > 0.
        vocab: tokens of the vocabulary; padding rows beyond it get no probability.
        is_embedding: True if the weight is also the embedding of this pipeline stage, so that
            autograd adds the embedding's gradient of the weight to the head's.
        exact: True if the bits of a row's logits must not depend on the other rows. Not used
            on a GPU.
        masks, mask_rows: sampling masks, as in `Microbatch`; None allows all tokens.
        row_gradients: returns the gradients that the backward pass will be given for a chunk of rows;
            None if they cannot be known in the forward pass. Not used on a CPU.

    Returns:
        Natural log-probabilities [N]; entropies [N] in nats.
    """
    first_column = len(weight) * parallel_state.get_tensor_model_parallel_rank()
    columns = max(0, min(len(weight), vocab - first_column))
    local_labels = labels - first_column
    column_masks = None
    if masks is not None and mask_rows is not None:
        column_masks = ColumnMasks(
            masks=masks, rows=mask_rows, first_column=first_column, columns=columns
        )
    if use_triton(weight.device):
        chunks = list(_chunks(len(labels), weight))
        arguments = (
            hidden,
            weight,
            local_labels,
            temperatures,
            columns,
            is_embedding,
            chunks,
            column_masks,
        )
        if row_gradients is None:
            logprobs, entropy = KernelHead.apply(*arguments)
        else:
            logprobs, entropy = OnePassHead.apply(*arguments, row_gradients)
    else:
        logprobs, entropy = ChunkedHead.apply(
            hidden, weight, local_labels, temperatures, columns, is_embedding, exact, column_masks
        )
    return logprobs, entropy


class ChunkedHead(torch.autograd.Function):
    """Log-probabilities and entropies, in chunks of rows; see `logprobs_and_entropy`.

    `apply(hidden, weight, labels, temperatures, columns, is_embedding, exact, masks)`: `labels` are
    counted from this rank's first column; a label outside its columns belongs to another rank.
    `columns` is the number of this rank's columns without padding, and `masks` are the rows'
    `ColumnMasks`, or None.
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
        exact: bool,
        masks: ColumnMasks | None,
    ) -> tuple[Tensor, Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        # `peak` is the largest logit of each row. The others are computed from z = logits − peak:
        # the partition function Z = Σ e^z, the expected logit E[z], and the label's z.
        peak, partition, expected_logit, label_logit = torch.zeros(
            4, len(labels), device=hidden.device
        )

        chunks = list(_chunks(len(labels), weight))
        chunk_rows = max((chunk.stop - chunk.start for chunk in chunks), default=1)
        # Exponentials of the last chunks, as many as may exist at a time.
        max_retained = max(1, _chunk_bytes(weight) // (4 * len(weight) * chunk_rows))
        exponentials: deque[Tensor] = deque(maxlen=max_retained)
        for chunk in chunks:
            if len(exponentials) == max_retained:
                exponentials.popleft()  # free the memory before the next chunk needs it

            logits = _logits(hidden[chunk], weight, temperatures[chunk], columns, exact)
            if masks is not None:
                masks.apply(logits, chunk)
            peak[chunk] = logits.amax(dim=-1)
            dist.all_reduce(peak[chunk], op=dist.ReduceOp.MAX, group=group)
            logits.sub_(peak[chunk, None])
            exponentials.append(exponential(logits, exact))

            is_local, column = _local_columns(labels[chunk], len(weight))
            chunk_label_logit = torch.where(is_local, logits.gather(1, column)[:, 0], 0.0)
            sum_of_exponentials = exponentials[-1].sum(-1)
            weighted_sum_of_logits = logits.mul_(exponentials[-1]).sum(-1)
            sums = torch.stack([sum_of_exponentials, weighted_sum_of_logits, chunk_label_logit])
            del logits
            dist.all_reduce(sums, group=group)
            partition[chunk] = sums[0]
            expected_logit[chunk] = sums[1] / sums[0]
            label_logit[chunk] = sums[2]

        log_partition = partition.log()
        entropy = log_partition - expected_logit  # H = log Z − E[z]

        ctx.set_materialize_grads(False)
        ctx.columns = columns
        ctx.is_embedding = is_embedding
        ctx.exact = exact
        ctx.masks = masks
        ctx.exponentials = exponentials
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.save_for_backward(hidden, weight, labels, temperatures, peak, partition, entropy)
        return label_logit - log_partition, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, temperatures, peak, partition, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        weight_grad = HeadWeightGrad(
            weight,
            main_grad=ctx.main_grad,
            is_trained=ctx.needs_input_grad[1],
            is_embedding=ctx.is_embedding,
        )

        # d log p_l/dz_j = [j = l] − p_j;  dH/dz_j = −p_j log p_j − p_j H
        label_factor: Any = 0.0 if grad_logprobs is None else grad_logprobs / temperatures
        entropy_factor: Any = 0.0 if grad_entropy is None else grad_entropy / temperatures
        probability_factor = -(label_factor + entropy_factor * entropy)

        chunks = list(_chunks(len(labels), weight))
        recomputed_chunks = len(chunks) - len(ctx.exponentials)
        for number, chunk in enumerate(chunks):
            # `gradient` holds exponentials first, and is turned into the gradient of the logits in
            # place.
            if number >= recomputed_chunks:
                gradient = ctx.exponentials.popleft()
            else:
                logits = _logits(hidden[chunk], weight, temperatures[chunk], ctx.columns, ctx.exact)
                if ctx.masks is not None:
                    ctx.masks.apply(logits, chunk)
                gradient = exponential(logits.sub_(peak[chunk, None]), ctx.exact)
                del logits

            if grad_entropy is None:
                gradient.mul_((probability_factor[chunk] / partition[chunk])[:, None])
            else:
                minus_p_log_p = torch.special.entr(gradient.div_(partition[chunk, None]))
                gradient.mul_(probability_factor[chunk, None])
                gradient.add_(minus_p_log_p.mul_(entropy_factor[chunk, None]))
                del minus_p_log_p
            if grad_logprobs is not None:
                is_local, column = _local_columns(labels[chunk], len(weight))
                gradient.scatter_add_(1, column, (label_factor[chunk] * is_local)[:, None])

            grad_logits = gradient.to(weight.dtype)
            grad_hidden[chunk] = linear_product(grad_logits, weight.t())
            weight_grad.add(grad_logits, hidden[chunk])
            del gradient, grad_logits  # free the memory before the next chunk needs it

        # Every rank has computed the part of its own columns.
        dist.all_reduce(grad_hidden, group=parallel_state.get_tensor_model_parallel_group())
        return grad_hidden, weight_grad.result(), None, None, None, None, None, None


def _chunks(rows: int, weight: Tensor) -> Iterator[slice]:
    """Yield the row ranges whose logits are computed together."""
    row_bytes = 4 * len(weight)
    size = max(1, _chunk_bytes(weight) // row_bytes)
    if weight.device.type == "cpu":
        size = min(size, max(_MIN_CPU_ROWS, _CPU_CACHE_BYTES // row_bytes))
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def _chunk_bytes(weight: Tensor) -> int:
    return CHUNK_BYTES["cpu" if weight.device.type == "cpu" else "cuda"]


def _logits(
    hidden: Tensor, weight: Tensor, temperatures: Tensor, columns: int, exact: bool
) -> Tensor:
    """Compute float32 logits after temperature; padding columns are `FORBIDDEN_LOGIT`."""
    multiply = row_product if exact else linear_product
    logits = multiply(hidden, weight).float()
    # On a GPU the test for 1 would make the host wait.
    if logits.device.type != "cpu" or (temperatures != 1).any():
        logits.div_(temperatures[:, None])
    logits[:, columns:] = FORBIDDEN_LOGIT
    return logits


def _local_columns(labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Find the labels among the columns of this rank.

    Args:
        labels: [rows], counted from this rank's first column.
        width: number of this rank's columns.

    Returns:
        is_local: [rows] True if this rank has the label's column.
        column: [rows, 1] the label's column; if another rank has it, any column of this rank, so
            that it is a valid index.
    """
    is_local = (labels >= 0) & (labels < width)
    return is_local, labels.clamp(0, width - 1)[:, None]
