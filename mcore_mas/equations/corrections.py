"""Corrections for mismatched samplers: importance weights of tokens.

Engine (μ) and trainer (π_old) differ by rounding, except in the bit-exact mode, and the
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

Options:
    level: the weight is the ratio of the "token", that of the whole reply ("sequence"), or the "geometric" mean over
        the reply's tokens.
    veto: a reply with a token whose π_old/μ is below this has weight 0; 0: no veto; verl uses 1e-4.
    low, high: range of the weight; `tis` lowers weights above it to `high`, the others set weights outside it to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from pydantic import NonNegativeFloat, PositiveFloat

from mcore_mas.equations.log_ratios import Level, at_level, bounded_exp
from mcore_mas.equations.tensors import Tensor, torch
from rollout.base.section import AboveLow

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
