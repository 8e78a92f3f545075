"""Divergence of two policies at sampled tokens: KL estimates, importance sampling for mismatched samplers, agreement.

**KL penalty.** Estimates of KL(π‖ρ) from tokens y that π sampled, with d = log π(y) − log ρ(y)
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

**Corrections.** Engine (μ) and trainer (π_old) differ by rounding, except in the bit-exact mode, and the
sampler may use older weights. Decoupled PPO (AReaL, arXiv 2505.24298) keeps the clipped ratio π/π_old for the size
of the update, and puts the mismatch into a weight without gradient, w = π_old/μ. The methods differ
in the level at which w is computed, and in their treatment of extreme weights:

| name | weight | level | source |
|---|---|---|---|
| `importance` | w | token | AReaL, arXiv 2505.24298 |
| `tis` | min(w, high) | token, high 2 | Yao et al. 2025, https://fengyao.notion.site/off-policy-rl |
| `mis` | w inside [low, high], else 0 | sequence, 0 to 2 | Liu, Li et al. 2025, https://richardli.xyz/rl-collapse |
| `icepop` | w inside [low, high], else 0 | token, 0.5 to 5 | Ring-1T, arXiv 2510.18855; range as in verl |

`at_level` defines the levels. A geometric ratio is a mean, so its useful range is much narrower
(verl masks outside 0.999 to 1.001). A token whose sampler is unknown (NaN) has w = 1. Weights do
not enter the denominator: a masked token still counts in the mean of the loss, as in the papers.

**Agreement.** Engine and trainer hold the same weights if they assign nearly the same
log-probabilities to the engine's tokens. In float32 every token agrees, so the check bounds the
largest gap. In bfloat16 the largest of 10^5 gaps is not informative: with equal weights, single
tokens differ by tenths of nats, and the least likely tokens by more. There the check bounds the
mean, the k3 divergence and the 99th percentile. docs/exactness.md has these figures for equal and
for stale weights.

Options:
    level: ratio that is the weight: that of the "token"; of the whole reply, the "sequence"; or the "geometric" mean
        over the reply's tokens.
    veto: a reply with a token whose π_old/μ is below this has weight 0; 0: no veto; verl uses 1e-4.
    low, high: range of the weight; `tis` lowers weights above it to `high`, the others set weights outside it to 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from mcore_mas.equations.tensors import Tensor, torch
from rollout.base.section import AboveLow

LARGEST_LOG_RATIO = 20.0  # nats; guards exp against overflow, far outside any clip range
_K3_BOUND = 10.0  # nats, as in verl

Estimate = Callable[[Tensor, Tensor], Tensor]  # (log π [N], log ρ [N]) to the estimate [N]
KLName = Literal["k1", "k2", "k3", "k1+", "k3+"]
Level = Literal["token", "sequence", "geometric"]


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


Correction = Callable[..., Tensor]  # (log_ratio [N], sequences [N], **options) to weights [N]


def none(log_ratio: Tensor, sequences: Tensor) -> Tensor:
    """Return weights of 1 [N]: the sampler counts as π_old."""
    return torch.ones_like(log_ratio)


def importance(
    log_ratio: Tensor, sequences: Tensor, *, level: Level = "token", veto: NonNegativeFloat = 0.0
) -> Tensor:
    """Compute the importance weight w = π_old/μ [N].

    Args:
        log_ratio: [N] log π_old − log μ; NaN, an unknown sampler, counts as 0.
        sequences: [N] id of the token's reply.
    """
    log_ratio = torch.where(log_ratio.isnan(), 0.0, log_ratio.detach())
    weights = bounded_exp(at_level(log_ratio, sequences, level))
    if veto <= 0.0:
        return weights
    _, reply = torch.unique(sequences, return_inverse=True)
    lowest = torch.zeros_like(log_ratio)
    lowest = lowest.scatter_reduce(0, reply, log_ratio, "amin", include_self=False)
    return torch.where(lowest[reply] < math.log(veto), 0.0, weights)


def tis(
    log_ratio: Tensor,
    sequences: Tensor,
    *,
    high: PositiveFloat = 2.0,
    level: Level = "token",
    veto: NonNegativeFloat = 0.0,
) -> Tensor:
    """Compute truncated importance weights min(w, high) [N]."""
    return importance(log_ratio, sequences, level=level, veto=veto).clamp(max=high)


def mis(
    log_ratio: Tensor,
    sequences: Tensor,
    *,
    low: NonNegativeFloat = 0.0,
    high: AboveLow = 2.0,
    level: Level = "sequence",
    veto: NonNegativeFloat = 0.0,
) -> Tensor:
    """Compute masked importance weights [N]: w where low ≤ w ≤ high, else 0."""
    weights = importance(log_ratio, sequences, level=level, veto=veto)
    return torch.where((weights < low) | (weights > high), 0.0, weights)


icepop = partial(mis, low=0.5, high=5.0, level="token")
icepop.__doc__ = (
    "Compute IcePop's weights [N]: importance weights of single tokens, masked on both sides."
)

CORRECTIONS: dict[str, Correction] = {
    "none": none,
    "importance": importance,
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
}


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
    # Sum in float64, so that the order of additions on a GPU does not change the result.
    total = torch.zeros(len(size), dtype=torch.float64, device=log_ratio.device)
    total = total.index_add(0, reply, log_ratio.double())
    if level == "geometric":
        total = total / size
    return total[reply].to(log_ratio.dtype)


Precision = Literal["float32", "bfloat16", "float8"]
Figure = Literal["mean", "k3", "p99", "max"]

# Bounds in nats. The mean of bfloat16 is about three times the 0.011 that Qwen3-4B shows between
# SGLang or vLLM and Megatron. float8 (E4M3) has 4 significant bits where bfloat16 has 8, which would make
# gaps 16 times as large, but only the factors of the layers' products are rounded to it. In
# tests/exactness/agreement.py gaps are then 3 times as large, so the bounds are 4 times those of
# bfloat16, and 16 times for k3, which is quadratic.
GAP_BOUNDS: dict[Precision, dict[Figure, float]] = {
    "float32": {"max": 1e-4},
    "bfloat16": {"mean": 0.03, "k3": 0.005, "p99": 0.3},
    "float8": {"mean": 0.12, "k3": 0.08, "p99": 1.2},
}
OUTLIER_GAP = 1.0  # nats; larger gaps are counted as outliers and clamped in the mean and k3
FEW_TOKENS = 1000  # below this the bounds on the distribution are multiplied by FEW_TOKENS_SLACK
FEW_TOKENS_SLACK = 10.0
_FIGURES: tuple[Figure, ...] = ("mean", "k3", "p99", "max")
_PREFIX = "logprob_gap_"  # prefix of the metrics' names


@cache
def _bin_edges() -> Tensor:
    """Return the edges of a histogram's bins, [451] float64; each bin is 4.7 % wide."""
    return torch.logspace(-7, 2, 9 * 50 + 1, dtype=torch.float64)


def gap_statistics(logprobs: Tensor, behaviour: Tensor) -> dict[str, Tensor]:
    """Compute the gap between the trainer's and the sampler's log-probabilities, as statistics [N] by name.

    Args:
        logprobs: [N] of the trainer; NaN counts as an infinite gap.
        behaviour: [N] of the sampler; where it is NaN, all statistics are NaN.
    """
    invalid = logprobs.isnan() & ~behaviour.isnan()
    log_ratio = torch.where(invalid, -math.inf, logprobs - behaviour).detach()  # log π − log μ
    gap = log_ratio.abs()
    clamped = log_ratio.clamp(-OUTLIER_GAP, OUTLIER_GAP)
    is_outlier = (gap > OUTLIER_GAP).to(gap.dtype)
    return {
        f"{_PREFIX}mean": clamped.abs(),
        # KL(μ‖π) from μ's tokens: π/μ − 1 − log π/μ (Schulman 2020,
        # http://joschu.net/blog/kl-approx.html)
        f"{_PREFIX}k3": torch.expm1(clamped) - clamped,
        f"{_PREFIX}p99": gap,
        f"{_PREFIX}max": gap,
        f"{_PREFIX}count": torch.where(gap.isnan(), math.nan, 1.0),
        f"{_PREFIX}outlier_count": torch.where(gap.isnan(), math.nan, is_outlier),
    }


def log_histogram(values: Tensor) -> list[float]:
    """Count non-negative values [N] in a fixed set of 452 logarithmic bins.

    The bins do not depend on the values, so histograms of several ranks can be added.
    """
    edges = _bin_edges()
    bins = torch.bucketize(values.double(), edges.to(values.device))
    return torch.bincount(bins, minlength=len(edges) + 1).double().tolist()


def histogram_quantile(counts: Sequence[float], share: float) -> float:
    """Return the quantile `share` of a `log_histogram`, as the upper edge of its bin; NaN for an empty histogram."""
    cumulative = torch.tensor(counts, dtype=torch.float64).cumsum(0)
    if not cumulative[-1]:
        return math.nan
    bin_index = int(torch.searchsorted(cumulative, share * cumulative[-1]))
    edges = _bin_edges()
    return float(edges[bin_index]) if bin_index < len(edges) else math.inf


def is_gap_metric(name: str) -> bool:
    """Return True if a metric is one of `gap_statistics`."""
    return name.rpartition("/")[2].startswith(_PREFIX)


def describe_disagreement(metrics: Mapping[str, float], bounds: Mapping[Figure, float]) -> str:
    """Describe the first agent whose log-probability gap exceeds the bounds; return "" if there is none.

    Args:
        metrics: metrics of an update, with names `agent/<name>/logprob_gap_<figure>`.
        bounds: largest gap in nats, by statistic (mean, k3, p99, max). For agents with fewer than
            `FEW_TOKENS` tokens, all bounds but `max` are multiplied by `FEW_TOKENS_SLACK`.
    """
    for name, count in metrics.items():
        agent, _, metric = name.rpartition("/")
        if metric != f"{_PREFIX}count":
            continue
        agent_bounds = dict(bounds)
        if count < FEW_TOKENS:
            for figure in bounds:
                if figure != "max":
                    agent_bounds[figure] *= FEW_TOKENS_SLACK
        gaps = {figure: metrics[f"{agent}/{_PREFIX}{figure}"] for figure in _FIGURES}
        if all(gaps[figure] <= bound for figure, bound in agent_bounds.items()):
            continue
        figures = []
        for figure, gap in gaps.items():
            bound = f" (bound {agent_bounds[figure]:.2g})" if figure in agent_bounds else ""
            figures.append(f"{figure} {gap:.2g}{bound}")
        return (
            f"{agent}: the trainer's log-probabilities differ from the engine's by {', '.join(figures)} "
            f"nats over {count:.0f} tokens"
        )
    return ""
