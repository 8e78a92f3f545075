"""Log-probabilities and entropy of hidden states, over a vocabulary that is cut across tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_mas.megatron.model.linear import add_product, product

# Of the float32 logits that exist at a time; computing with them takes about three times as much
_CHUNK_BYTES = 64 << 20


def logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperatures: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels`, and the entropy, of softmax(hidden · weightᵀ / temperature), in float32.

    Both carry the gradient; an entropy that no loss uses costs nothing in the backward pass. Logits are made in chunks
    of rows, and but for the last chunk's made again in the backward pass, so that all of them never exist.

    Args:
        hidden: [N, hidden] the same on every tensor-parallel rank, as its gradient will be.
        weight: [padded vocabulary / tp, hidden], this rank's rows.
        labels: [N] global token ids.
        temperatures: [N], all > 0.
        vocab: tokens of the vocabulary; padding rows beyond it get no probability.

    Returns:
        log-probabilities [N], natural; entropies [N] in nats.
    """
    first = len(weight) * parallel_state.get_tensor_model_parallel_rank()
    columns = max(0, min(len(weight), vocab - first))
    logprobs, entropy = _Head.apply(hidden, weight, labels - first, temperatures, columns)
    return logprobs, entropy


class _Head(torch.autograd.Function):
    """Labels count from this rank's first column; one outside its columns is another rank's."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperatures: Tensor, columns: int
    ) -> tuple[Tensor, Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        peak, log_z, expected, label = torch.zeros(4, len(labels), device=hidden.device)
        shifted = hidden.new_empty(0)
        for part in _chunks(len(labels), len(weight)):
            del shifted  # before the next is made
            shifted = _logits(hidden[part], weight, temperatures[part], columns)
            peak[part] = shifted.amax(dim=-1)
            dist.all_reduce(peak[part], op=dist.ReduceOp.MAX, group=group)
            shifted.sub_(peak[part, None])
            mine, column = _mine(labels[part], len(weight))
            weights = shifted.exp()
            sums = torch.stack(
                [
                    weights.sum(-1),
                    torch.linalg.vecdot(weights, shifted),
                    torch.where(mine, shifted.gather(1, column)[:, 0], 0.0),
                ]
            )
            del weights
            dist.all_reduce(sums, group=group)
            log_z[part], expected[part], label[part] = sums[0].log(), sums[1] / sums[0], sums[2]
            shifted.sub_(log_z[part, None])
        # H = log Z − E[z]
        entropy = log_z - expected
        ctx.set_materialize_grads(False)
        ctx.columns = columns
        ctx.save_for_backward(hidden, weight, labels, temperatures, peak, log_z, entropy, shifted)
        return label - log_z, entropy

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, temperatures, peak, log_z, entropy, kept = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros(weight.shape, device=weight.device) if ctx.needs_input_grad[1] else None
        parts = list(_chunks(len(labels), len(weight)))
        for part in parts:
            if part is parts[-1]:
                logp = kept
            else:
                logp = _logits(hidden[part], weight, temperatures[part], ctx.columns)
                logp.sub_(peak[part, None]).sub_(log_z[part, None])
            gradient = logp.exp()
            if of_entropy is not None:
                # dH/dz_j = −p_j (log p_j + H); d log p_l/dz_j = [j = l] − p_j
                factor = (logp + entropy[part, None]).mul_(of_entropy[part, None])
                gradient.mul_(factor if of_logprobs is None else factor.add_(of_logprobs[part, None])).neg_()
            else:
                assert of_logprobs is not None
                gradient.mul_(-of_logprobs[part, None])
            if of_logprobs is not None:
                mine, column = _mine(labels[part], len(weight))
                gradient.scatter_add_(1, column, (of_logprobs[part] * mine)[:, None])
            of_logits = gradient.div_(temperatures[part, None]).to(weight.dtype)
            of_hidden[part] = product(of_logits, weight.t())
            if of_weight is not None:
                add_product(of_weight, of_logits.t(), hidden[part])
            del logp, gradient, of_logits  # before the next are made
        # every rank has the part of its own columns
        dist.all_reduce(of_hidden, group=parallel_state.get_tensor_model_parallel_group())
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    size = max(1, _CHUNK_BYTES // (4 * columns))
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor, columns: int) -> Tensor:
    """[rows, columns of this rank] float32, after temperature."""
    logits = product(hidden, weight).float().div_(temperatures[:, None])
    logits[:, columns:] = -1e30
    return logits


def _mine(labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Whether each label is in this rank's columns, and its column [rows, 1], or any."""
    return (labels >= 0) & (labels < width), labels.clamp(0, width - 1)[:, None]
