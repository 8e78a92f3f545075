"""Divergence of two policies at sampled tokens: KL estimates, importance sampling for mismatched samplers, agreement.

**KL penalty.** Estimates of KL(π‖ρ) from tokens y that π sampled, with d = log π(y) − log ρ(y) (Schulman 2020,
http://joschu.net/blog/kl-approx.html):

| name | value | E[value] over y ~ π | E[∇value] over y ~ π |
|---|---|---|---|
| `k1` | d | KL(π‖ρ) | 0: as a loss it does nothing on average |
| `k2` | d² / 2 | biased, close to KL(π‖ρ) where d is small | ∇KL(π‖ρ) |
| `k3` | exp(−d) − 1 + d | KL(π‖ρ), never negative, less variance than k1 | ∇KL(ρ‖π), the other direction |
| `k1+`, `k3+` | of k1, k3 | KL(π‖ρ) | ∇KL(π‖ρ), borrowed from k2 straight through |

The gradients are those of Liu et al. 2025 (arXiv 2510.01555); DeepSeekMath (arXiv 2402.03300, eq. 4) puts k3 in the
loss. In a reward, where no gradient passes, k1 is the unbiased choice. `k1+` and `k3+` are verl's.

**Corrections.** Engine (μ) and trainer (π_old) never agree to the last bit, and a sampler may be some versions behind.
Decoupled PPO (AReaL, arXiv 2505.24298) keeps the clipped ratio π/π_old for the size of the update and puts the mismatch
into a weight without gradient, w = π_old/μ. Methods differ in the level at which w is taken, and in what becomes of it
where it is extreme:

| name | weight | level | source |
|---|---|---|---|
| `importance` | w | token | AReaL, arXiv 2505.24298 |
| `tis` | min(w, high) | token, high 2 | Yao et al. 2025, https://fengyao.notion.site/off-policy-rl |
| `mis` | w inside [low, high], else 0 | sequence, 0 to 2 | Liu, Li et al. 2025, https://richardli.xyz/rl-collapse |
| `icepop` | w inside [low, high], else 0 | token, 0.5 to 5 | Ring-1T, arXiv 2510.18855; range as in verl |

Levels are those of `at_level`; a geometric ratio is a mean, so its useful range is much narrower (verl masks outside
0.999 to 1.001). A token whose sampler is unknown (NaN) counts as w = 1. Weights stay out of the denominator: a masked
token still counts in the loss's mean, as in the papers.

**Agreement.** Whether engine and trainer hold the same weights is judged by the log-probabilities that both give to the
engine's tokens. In float32 every token agrees, so the largest gap is judged. In bfloat16 the largest of 10^5 gaps says
nothing: right weights have gaps of tenths of nats at single tokens, and more at a model's least likely ones. There the
distribution is judged: its mean, its k3 divergence and its 99th percentile. docs/exactness.md has these figures for
right and for stale weights.

Args:
    level: a token's own ratio, the ratio of the whole reply, or the geometric mean over the reply (`at_level`).
    veto: a reply with a token of π_old/μ below this has weight 0; 0 is off, 1e-4 is verl's value.
    low, high: range of the weight, outside which `tis` truncates it and the others mask it.
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
from rollout.base.options import AboveLow

LARGEST_LOG_RATIO = (
    20.0  # nats; only guards exp against overflow, far outside every range that anyone clips to
)
_MOST_K3 = 10.0  # nats

Estimate = Callable[[Tensor, Tensor], Tensor]
KLName = Literal["k1", "k2", "k3", "k1+", "k3+"]


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[N] d = log π − log ρ, of log-probabilities in nats."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[N] d² / 2."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[N] exp(−d) − 1 + d, at most 10 as in verl: beyond (d below about −2.6), it does not pull.

    Without a bound one token with d = −19 has a gradient of 1.8e8, and is the whole clipped update.
    """
    d = (logprobs - reference).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (torch.expm1(-d) + d).clamp(max=_MOST_K3)


def _straight_through(value: Estimate) -> Estimate:
    """The estimate with its own value and k2's gradient."""

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
    """KL penalty: what a token's reward loses per unit of the KL coefficient, [T] nats, without gradient.

    r_t ← r_t − β · penalty_t (Ziegler et al. 2019, arXiv 1909.08593, eq. 2, with k1).

    Args:
        logprobs: [T] of the policy that sampled.
        reference: [T] of the frozen reference.
        kind: name in `KL_ESTIMATES`.
    """
    return KL_ESTIMATES[kind](logprobs, reference).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL:
    """A KL coefficient β that follows a target, as plain data; a fixed coefficient is a float.

    Ziegler et al. 2019 (arXiv 1909.08593, sec. 2.2), with their code's horizon in place of K_β:
    e = clip(KL / target − 1, −0.2, 0.2), β ← β (1 + e · n / horizon).
    """

    coefficient: float  # β, > 0: from 0 it could not grow
    target: float  # nats per token, or per whatever unit `update` is told
    horizon: float = 10_000.0  # samples after which a clipped error has changed β by about 20 %

    def __post_init__(self) -> None:
        for name in ("coefficient", "target", "horizon"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"adaptive KL: {name} is {value}; expected a finite number above 0"
                )

    def update(self, kl: float, n: int) -> AdaptiveKL:
        """The controller after `n` samples whose mean KL was `kl`; n below 5 horizons keeps β above 0.

        Raises:
            ValueError: `kl` is not finite, or β would not stay above 0.
        """
        if not math.isfinite(kl):
            raise ValueError(
                f"adaptive KL: measured KL is {kl}; expected a finite number, so skip steps without one"
            )
        error = max(-0.2, min(0.2, kl / self.target - 1.0))
        return dataclasses.replace(
            self, coefficient=self.coefficient * (1.0 + error * n / self.horizon)
        )


Correction = Callable[..., Tensor]


def none(log_ratio: Tensor, sequences: Tensor) -> Tensor:
    """Weights 1 [N]: whoever sampled is taken for π_old."""
    return torch.ones_like(log_ratio)


def importance(
    log_ratio: Tensor, sequences: Tensor, *, level: Level = "token", veto: NonNegativeFloat = 0.0
) -> Tensor:
    """w = π_old/μ [N], from log_ratio [N] = log π_old − log μ and the replies' numbers [N]."""
    known = torch.where(log_ratio.isnan(), 0.0, log_ratio.detach())
    weights = bounded_exp(at_level(known, sequences, level))
    if veto <= 0.0:
        return weights
    # the lowest token decides for its reply
    _, reply = torch.unique(sequences, return_inverse=True)
    lowest = torch.zeros_like(known).scatter_reduce(0, reply, known, "amin", include_self=False)[
        reply
    ]
    return torch.where(lowest < math.log(veto), 0.0, weights)


def tis(
    log_ratio: Tensor,
    sequences: Tensor,
    *,
    high: PositiveFloat = 2.0,
    level: Level = "token",
    veto: NonNegativeFloat = 0.0,
) -> Tensor:
    """Truncated importance sampling: min(w, high) [N]."""
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
    """Masked importance sampling: w where low ≤ w ≤ high, else 0 [N]."""
    weights = importance(log_ratio, sequences, level=level, veto=veto)
    return torch.where((weights < low) | (weights > high), 0.0, weights)


icepop = partial(mis, low=0.5, high=5.0, level="token")
icepop.__doc__ = "IcePop: masked importance sampling of single tokens on both sides [N]."

CORRECTIONS: dict[str, Correction] = {
    "none": none,
    "importance": importance,
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
}

Level = Literal["token", "sequence", "geometric"]


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """[N] exp of log-ratios [N], which are held within ±20 nats and carry no gradient beyond."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def at_level(log_ratio: Tensor, sequences: Tensor, level: Level) -> Tensor:
    """Log-ratios [N] of tokens as each token sees them at a level.

    Args:
        log_ratio: [N] log π(y_t) − log μ(y_t).
        sequences: [N] tokens of one reply share a number, in any order.
        level: "token": the token's own; "sequence": of the whole reply, Σ_t, so exp of it is π(y) / μ(y);
            "geometric": the mean over the reply, so exp of it is (π(y) / μ(y))^(1/|y|).
    """
    if level == "token":
        return log_ratio
    _, reply, size = torch.unique(sequences, return_inverse=True, return_counts=True)
    # summed in float64, so that the order in which a GPU adds does not show
    total = torch.zeros(len(size), dtype=torch.float64, device=log_ratio.device)
    total = total.index_add(0, reply, log_ratio.double())
    if level == "geometric":
        total = total / size
    return total[reply].to(log_ratio.dtype)


Precision = Literal["float32", "bfloat16"]
Figure = Literal["mean", "k3", "p99", "max"]

# nats; bfloat16's mean is about three times the 0.011 of Qwen3-4B between SGLang or vLLM and Megatron
BOUNDS: dict[Precision, dict[Figure, float]] = {
    "float32": {"max": 1e-4},
    "bfloat16": {"mean": 0.03, "k3": 0.005, "p99": 0.3},
}
OUTLIER = 1.0  # nats from which a gap is one; each is counted, and weighs no more than this in mean and k3
FEW = 1000  # tokens; fewer make no distribution, so the bounds on it hold SLACK times
SLACK = 10.0
_FIGURES: tuple[Figure, ...] = ("mean", "k3", "p99", "max")
_NAME = "logprob_gap_"


@cache
def _edges() -> Tensor:
    """[451] float64, of a histogram's bins: each is 4.7 % wide."""
    return torch.logspace(-7, 2, 9 * 50 + 1, dtype=torch.float64)


def gap_statistics(logprobs: Tensor, behaviour: Tensor) -> dict[str, Tensor]:
    """Statistics [N] by name of the trainer's log-probabilities [N] against the sampler's [N]; NaN without one.

    A trainer's that is no number is infinitely far from the sampler's.
    """
    broken = logprobs.isnan() & ~behaviour.isnan()
    log_ratio = torch.where(broken, -math.inf, logprobs - behaviour).detach()  # log π − log μ
    gap, held = log_ratio.abs(), log_ratio.clamp(-OUTLIER, OUTLIER)
    return {
        f"{_NAME}mean": held.abs(),
        # KL(μ‖π), of μ's tokens: π/μ − 1 − log π/μ (Schulman 2020, http://joschu.net/blog/kl-approx.html)
        f"{_NAME}k3": torch.expm1(held) - held,
        f"{_NAME}p99": gap,
        f"{_NAME}max": gap,
        f"{_NAME}count": torch.where(gap.isnan(), math.nan, 1.0),
        f"{_NAME}outlier_count": torch.where(gap.isnan(), math.nan, (gap > OUTLIER).to(gap.dtype)),
    }


def log_histogram(values: Tensor) -> list[float]:
    """How many of `values` [N], not negative, lie in each of a fixed set of bins; histograms of parts can be added."""
    edges = _edges()
    bins = torch.bucketize(values.double(), edges.to(values.device))
    return torch.bincount(bins, minlength=len(edges) + 1).double().tolist()


def histogram_quantile(counts: Sequence[float], share: float) -> float:
    """What a `share` of the values in a `log_histogram` does not exceed: its bin's upper edge, NaN of nothing."""
    below = torch.tensor(counts, dtype=torch.float64).cumsum(0)
    if not below[-1]:
        return math.nan
    place = int(torch.searchsorted(below, share * below[-1]))
    return float(_edges()[place]) if place < len(_edges()) else math.inf


def is_agreement(name: str) -> bool:
    """Whether a metric is one of `gap_statistics`."""
    return name.rpartition("/")[2].startswith(_NAME)


def disagreement(metrics: Mapping[str, float], bounds: Mapping[Figure, float]) -> str:
    """The first agent whose figures are beyond `bounds`, with figures and bounds, or "" where all agree.

    Args:
        metrics: of an update, `agent/<name>/logprob_gap_<figure>`.
        bounds: nats by figure; where an agent has fewer than `FEW` tokens, all but `max` hold `SLACK` times.
    """
    for name, count in metrics.items():
        whose, _, what = name.rpartition("/")
        if what != f"{_NAME}count":
            continue
        found = {figure: metrics[f"{whose}/{_NAME}{figure}"] for figure in _FIGURES}
        slack = SLACK if count < FEW else 1.0
        allowed = {
            figure: bound * (1.0 if figure == "max" else slack) for figure, bound in bounds.items()
        }
        if any(found[figure] > bound for figure, bound in allowed.items()):
            figures = ", ".join(
                f"{figure} {value:.2g}"
                + (f" (bound {allowed[figure]:.2g})" if figure in allowed else "")
                for figure, value in found.items()
            )
            said = "the trainer's log-probabilities differ from the engine's by"
            return f"{whose}: {said} {figures} nats over {count:.0f} tokens"
    return ""
