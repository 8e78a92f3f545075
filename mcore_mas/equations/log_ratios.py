"""Log-ratios of two policies at sampled tokens: their exponential, and their values for whole replies."""

from __future__ import annotations

from typing import Literal

from mcore_mas.equations.tensors import Tensor, torch

LARGEST_LOG_RATIO = 20.0  # nats; guards exp against overflow, far outside any clip range

Level = Literal["token", "sequence", "geometric"]


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Exponentiate log-ratios [N], clamped to ±20 nats; there is no gradient beyond."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def at_level(log_ratio: Tensor, sequences: Tensor, level: Level) -> Tensor:
    """Aggregate log-ratios [N] of tokens to a level, and return the result for each token, [N].

    Args:
        log_ratio: [N] log π(y_t) − log μ(y_t).
        sequences: [N] id of the token's reply, in any order.
        level: "token": of the token; "sequence": the sum over the reply, whose exp is π(y) / μ(y);
            "geometric": the mean over the reply, whose exp is (π(y) / μ(y))^(1/|y|).
    """
    if level == "token":
        return log_ratio
    _, reply, size = torch.unique(sequences, return_inverse=True, return_counts=True)
    # A GPU adds in varying order. In float64 the difference is too small to survive the rounding to
    # float32 below.
    total = torch.zeros(len(size), dtype=torch.float64, device=log_ratio.device)
    total = total.index_add(0, reply, log_ratio.double())
    if level == "geometric":
        total = total / size
    return total[reply].to(log_ratio.dtype)
