"""KL divergence of two policies: estimates at sampled tokens, the penalty in rewards, the adaptive coefficient.

Estimates of KL(π‖ρ) from tokens y that π sampled, with d = log π(y) − log ρ(y)
(Schulman 2020, http://joschu.net/blog/kl-approx.html):

| name | value | E[value] over y ~ π | E[∇value] over y ~ π |
|---|---|---|---|
| `k1` | d | KL(π‖ρ) | 0: as a loss it does nothing on average |
| `k2` | d² / 2 | biased, close to KL(π‖ρ) where d is small | ∇KL(π‖ρ) |
| `k3` | exp(−d) − 1 + d | KL(π‖ρ), never negative, less variance than k1 | ∇KL(ρ‖π), the other direction |
| `k1+`, `k3+` | of k1, k3 | KL(π‖ρ) | ∇KL(π‖ρ), borrowed from k2 straight through |

The gradients are those of Liu et al. 2025 (arXiv 2510.01555); DeepSeekMath (arXiv 2402.03300, eq.
4) puts k3 in the loss. In a reward, where no gradient passes, k1 is the unbiased choice. `k1+` and
`k3+` are verl's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mcore_mas.equations.log_ratios import LARGEST_LOG_RATIO
from mcore_mas.equations.tensors import Tensor, torch

_K3_BOUND = 10.0  # nats, as in verl

Estimate = Callable[[Tensor, Tensor], Tensor]  # (log π [N], log ρ [N]) to the estimate [N]
KLName = Literal["k1", "k2", "k3", "k1+", "k3+"]


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Compute d = log π − log ρ [N] from log-probabilities in nats."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Compute d² / 2 [N]."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Compute exp(−d) − 1 + d [N], bounded by 10 as in verl.

    Beyond the bound (d below about −2.6) the gradient is 0. Without it, one token with d = −19 has
    a gradient of 1.8e8 and dominates the clipped update.
    """
    d = (logprobs - reference).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (torch.expm1(-d) + d).clamp(max=_K3_BOUND)


def _straight_through(value: Estimate) -> Estimate:
    """Return an estimate with the given value and the gradient of k2."""

    def estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
        gradient = k2(logprobs, reference)
        return value(logprobs, reference).detach() + (gradient - gradient.detach())

    return estimate


KL_ESTIMATES: dict[KLName, Estimate] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1+": _straight_through(k1),
    "k3+": _straight_through(k3),
}


def kl_penalty(logprobs: Tensor, reference: Tensor, kind: KLName = "k1") -> Tensor:
    """Compute the KL penalty of each token's reward per unit of the KL coefficient, [T] nats, without gradient.

    r_t ← r_t − β · penalty_t (Ziegler et al. 2019, arXiv 1909.08593, eq. 2, with k1).

    Args:
        logprobs: [T] of the policy that sampled.
        reference: [T] of the frozen reference.
        kind: name in `KL_ESTIMATES`.
    """
    return KL_ESTIMATES[kind](logprobs, reference).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL:
    """Adaptive KL coefficient β that steers the KL divergence to a target.

    Ziegler et al. 2019 (arXiv 1909.08593, sec. 2.2), with the horizon of their code in place of
    K_β: e = clip(KL / target − 1, −0.2, 0.2), β ← β (1 + e · n / horizon).

    Attributes:
        coefficient: β, above 0, because it could not grow from 0.
        target: target in the unit of the KL that `update` gets, such as nats per token.
        horizon: number of samples after which a clipped error has changed β by about 20 %.
    """

    coefficient: float
    target: float
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("coefficient", "target", "horizon"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"adaptive KL: {name} is {value}; expected a finite number above 0"
                )

    def update(self, kl: float, n: int) -> AdaptiveKL:
        """Return the controller with its coefficient after `n` more samples with mean KL `kl`.

        β stays above 0 as long as n is below 5 horizons.

        Raises:
            ValueError: `kl` is not finite, or β would not stay above 0.
        """
        if not math.isfinite(kl):
            raise ValueError(
                f"adaptive KL: measured KL is {kl}; expected a finite number, so skip steps without one"
            )
        error = max(-0.2, min(0.2, kl / self.target - 1.0))
        coefficient = self.coefficient * (1.0 + error * n / self.horizon)
        return dataclasses.replace(self, coefficient=coefficient)
