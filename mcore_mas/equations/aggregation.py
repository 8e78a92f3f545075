"""How much each token counts in a policy's loss, as a number on the token.

The loss of an update is Σ_i Σ_t weight_i · loss_it over all tokens of all its samples, so it does not depend on how
samples are cut into micro-batches or spread over ranks. A sequence is a sample: one reply of one agent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AggregationName = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """One way to make a loss of all tokens."""

    weights: Callable[[Tensor, float], Tensor]  # (lengths [n] float64, norm) -> weight of a token of each sample [n]
    source: str
    normed: bool = False  # divides by a configured length


def _token_mean(lengths: Tensor, norm: float) -> Tensor:
    # 1 / Σ_j |y_j|
    return torch.ones_like(lengths) / lengths.sum()


def _seq_mean_token_sum(lengths: Tensor, norm: float) -> Tensor:
    # 1 / n
    return torch.ones_like(lengths) / (lengths > 0).sum()


def _seq_mean_token_mean(lengths: Tensor, norm: float) -> Tensor:
    # 1 / (n |y_i|)
    return 1.0 / ((lengths > 0).sum() * lengths)


def _seq_mean_token_sum_norm(lengths: Tensor, norm: float) -> Tensor:
    # 1 / (n L)
    return torch.ones_like(lengths) / ((lengths > 0).sum() * norm)


AGGREGATIONS: dict[AggregationName, Aggregation] = {
    "token_mean": Aggregation(weights=_token_mean, source="DAPO, arXiv 2503.14476; verl token-mean"),
    "seq_mean_token_sum": Aggregation(weights=_seq_mean_token_sum, source="REINFORCE's; verl seq-mean-token-sum"),
    "seq_mean_token_mean": Aggregation(
        weights=_seq_mean_token_mean, source="GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071; verl seq-mean-token-mean"
    ),
    "seq_mean_token_sum_norm": Aggregation(
        weights=_seq_mean_token_sum_norm,
        source="Dr. GRPO, arXiv 2503.20783, with a constant length; verl seq-mean-token-sum-norm",
        normed=True,
    ),
}


def token_weights(lengths: Tensor, *, mode: AggregationName = "token_mean", norm: float | None = None) -> Tensor:
    """The weight [n] float64 of each single token of sample i, the update's denominator included.

    Args:
        lengths: [n] trained tokens of every sample of the update. A sample without any is no sequence: it gets
            weight 0 and does not count in n.
        mode: name in `AGGREGATIONS`.
        norm: the constant length L in tokens, for modes that divide by one; None for the others.
    """
    lengths = lengths.double()
    return torch.where(lengths > 0, AGGREGATIONS[mode].weights(lengths, norm or 1.0), 0.0)
