"""Log-probabilities and entropy over a vocabulary that is cut across tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def select_logprobs(logits: Tensor, labels: Tensor, temperatures: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels`, and the entropy, of softmax(logits / temperature).

    Args:
        logits: [N, padded vocabulary / tp], this rank's columns.
        labels: [N] global token ids.
        temperatures: [N], all > 0.
        vocab: tokens of the vocabulary; padding columns beyond it get no probability.

    Returns:
        log-probabilities [N], natural log, differentiable; entropies [N] in nats, without gradient.
    """
    scaled = logits.float() / temperatures[:, None]
    width = scaled.shape[-1]
    first = width * parallel_state.get_tensor_model_parallel_rank()
    if first + width > vocab:
        scaled = torch.cat([scaled[:, : vocab - first], torch.full_like(scaled[:, vocab - first :], -1e30)], dim=-1)
    entropy = _entropy(scaled.detach())
    return -vocab_parallel_cross_entropy(scaled, labels), entropy


def _entropy(logits: Tensor) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    peak = logits.amax(dim=-1)
    if parallel:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak[:, None]
    weights = shifted.exp()
    sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
    if parallel:
        dist.all_reduce(sums, group=group)
    # H = log Z − E[z]
    return sums[0].log() - sums[1] / sums[0]
