"""Agreement of engine and trainer: the gaps of their log-probabilities, and bounds on them.

Engine and trainer hold the same weights if they assign nearly the same
log-probabilities to the engine's tokens. In float32 every token agrees, so the check bounds the
largest gap. In bfloat16 the largest of 10^5 gaps is not informative: with equal weights, single
tokens differ by tenths of nats, and the least likely tokens by more. There the check bounds the
mean, the k3 divergence and the 99th percentile. docs/exactness.md has these figures for equal and
for stale weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from mcore_mas.equations.tensors import Tensor, torch

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


def gap_statistics(logprobs: Tensor, behaviour: Tensor) -> dict[str, Tensor]:
    """Compute the gap between the trainer's and the sampler's log-probabilities, as statistics [N] by name.

    Each statistic has a value per token; `summarise` reduces it as the end of its name says. `_p99`
    and `_max` are therefore the same gaps.

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
