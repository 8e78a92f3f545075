"""Ratios of two policies' probabilities, by token and by reply, in logarithms until the last moment."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = ("token", "sequence", "geometric")
BOUND = 20.0  # nats; only guards exp against overflow, far outside every range that anyone clips to


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """[N] exp of log-ratios [N], which are held within ±20 nats and carry no gradient beyond."""
    return log_ratio.clamp(-BOUND, BOUND).exp()


def at_level(log_ratio: Tensor, sequences: Tensor, level: str) -> Tensor:
    """Log-ratios [N] of tokens as each token sees them at a level.

    Args:
        log_ratio: [N] log π(y_t) − log μ(y_t).
        sequences: [N] tokens of one reply share a number, in any order.
        level: "token": the token's own; "sequence": of the whole reply, Σ_t, so exp of it is π(y) / μ(y);
            "geometric": the mean over the reply, so exp of it is (π(y) / μ(y))^(1/|y|).

    Raises:
        ValueError: the level is none of these.
    """
    if level not in LEVELS:
        raise ValueError(f"level is '{level}'; expected one of {', '.join(LEVELS)}")
    if level == "token":
        return log_ratio
    _, reply, size = torch.unique(sequences, return_inverse=True, return_counts=True)
    # summed in float64, so that the order in which a GPU adds does not show
    total = torch.zeros(len(size), dtype=torch.float64, device=log_ratio.device)
    total = total.index_add(0, reply, log_ratio.double())
    if level == "geometric":
        total = total / size
    return total[reply].to(log_ratio.dtype)
