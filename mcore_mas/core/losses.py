"""Per-token losses.

Every loss maps a `Tokens` of N tokens to (loss [N], statistics [N] by name). The trainer multiplies by the token
weights and sums, so aggregation and the denominator are numbers on the tokens and never a property of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a loss may look at, for N trained tokens."""

    logprobs: Tensor  # [N] of the policy being trained, natural log, after temperature
    behaviour: Tensor  # [N] of the policy that sampled
    advantages: Tensor  # [N]


Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def cross_entropy(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood [N], for supervised fine-tuning."""
    return -tokens.logprobs, {}


def ppo_clip(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy-gradient loss [N] with dual clip.

    Schulman et al. 2017 (arXiv 1707.06347) eq. 7; the lower and upper clips may differ (DAPO, arXiv 2503.14476);
    dual clip bounds the loss of negative advantages by `dual_clip` (Ye et al. 2020, arXiv 1912.09729, eq. 5).
    """
    # r = exp(log π − log μ); the clamp only guards exp against overflow, far outside every clip range
    log_ratio = (tokens.logprobs - tokens.behaviour).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain = -ratio * tokens.advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    # L = max(−r A, −clip(r) A), and for A < 0: min(that, −c A)
    loss = torch.maximum(plain, clipped)
    loss = torch.where(tokens.advantages < 0, torch.minimum(loss, -dual_clip * tokens.advantages), loss)
    with torch.no_grad():
        statistics = {
            "clip_fraction": (clipped > plain).float(),
            # k3 = (1/r − 1) + log r, an unbiased positive estimate of KL(μ‖π) (Schulman 2020)
            "kl": torch.expm1(-log_ratio) + log_ratio,
        }
    return loss, statistics


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "ppo_clip": ppo_clip}
