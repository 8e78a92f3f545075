"""Losses per token of a policy and of its critic, and aggregation: how much each token counts in an update.

A policy's loss maps a `Tokens` of N tokens, and the log-probabilities [N] of the old policy that its ratio starts
from, to (loss [N], statistics [N] by name). Statistics are reduced over all tokens by their mean, those whose name ends
in `_max` or `_min` by maximum or minimum; NaN says that a token does not have that statistic.

The loss of an update is Σ_i Σ_t weight_i · loss_it over all tokens of all its samples, so it does not depend on how
samples are cut into micro-batches or spread over ranks. A sequence is a sample: one reply of one agent.

Args:
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    dual_clip: the loss of a negative advantage A is at most dual_clip · |A|.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat

from mcore_mas.equations.divergence import (
    CORRECTIONS,
    KL_ESTIMATES,
    KLName,
    at_level,
    bounded_exp,
    k3,
)
from mcore_mas.equations.tensors import Tensor, torch
from rollout.base.options import Share

DualClip = Annotated[float, Field(gt=1, allow_inf_nan=True)]
Statistics = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a loss may look at, for N trained tokens."""

    logprobs: Tensor  # [N] of the policy being trained, natural log, after temperature; carries the gradient
    behaviour: Tensor  # [N] of the policy that sampled; NaN where nobody did
    advantages: Tensor  # [N]
    sequences: Tensor  # [N] int64, tokens of one reply share a number; a reply is never split over micro-batches
    entropy: Tensor  # [N] nats, carries the gradient where entropy_coef is not zero
    kl_coef: Tensor | None  # [N] factor of the KL term; None: there is none
    entropy_coef: Tensor  # [N] factor of the entropy bonus
    proximal: Tensor | None = (
        None  # [N] of the weights at the start of the step; None or NaN: the current ones
    )
    reference: Tensor | None = None  # [N] of the frozen reference; NaN where kl_coef is zero


Loss = Callable[..., tuple[Tensor, Statistics]]


def cross_entropy(tokens: Tokens, old: Tensor) -> tuple[Tensor, Statistics]:
    """Negative log-likelihood [N], for supervised fine-tuning (SFT)."""
    return -tokens.logprobs, {}


def reinforce(tokens: Tokens, old: Tensor) -> tuple[Tensor, Statistics]:
    """Policy gradient −A log π [N] without ratio or clip: Williams 1992."""
    return -tokens.advantages * tokens.logprobs, _distance(
        tokens, old, bounded_exp((tokens.logprobs - old).detach())
    )


def ppo_clip(
    tokens: Tokens,
    old: Tensor,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    dual_clip: DualClip = 3.0,
) -> tuple[Tensor, Statistics]:
    """Clipped policy-gradient loss [N] of PPO, with dual clip.

    Schulman et al. 2017 (arXiv 1707.06347) eq. 7; the lower and upper clips may differ (DAPO, arXiv 2503.14476);
    dual clip bounds the loss of negative advantages by `dual_clip` (Ye et al. 2020, arXiv 1912.09729, eq. 5).
    """
    # r = π / π_old
    ratio = bounded_exp(tokens.logprobs - old)
    loss, statistics = _clipped(ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    return loss, statistics | _distance(tokens, old, ratio)


def gspo(
    tokens: Tokens,
    old: Tensor,
    *,
    clip_low: Share = 3e-4,
    clip_high: NonNegativeFloat = 4e-4,
    dual_clip: DualClip = math.inf,
) -> tuple[Tensor, Statistics]:
    """Clipped policy-gradient loss [N] whose ratio is the whole reply's, length-normalised.

    GSPO-token (Zheng et al. 2025, arXiv 2507.18071, sec. 4.3; clips of sec. 5.1), which has GSPO's value and
    gradient where a reply's advantages are equal. The paper aggregates by `seq_mean_token_mean`.
    """
    # s_it = sg[s_i] · π(y_it) / sg[π(y_it)], s_i = (π(y_i) / π_old(y_i))^(1/|y_i|)
    mean = at_level((tokens.logprobs - old).detach(), tokens.sequences, "geometric")
    ratio = bounded_exp(mean + (tokens.logprobs - tokens.logprobs.detach()))
    loss, statistics = _clipped(ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    return loss, statistics | _distance(tokens, old, ratio)


def _clipped(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float
) -> tuple[Tensor, Statistics]:
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - low, 1.0 + high) * advantages
    bound = torch.where(advantages < 0, -dual * advantages, math.inf)
    # L = max(−r A, −clip(r) A), and for A < 0: min(that, −c A)
    single = torch.maximum(plain, clipped)
    with torch.no_grad():
        active = clipped > plain
        statistics = {
            "clip_fraction": active.float(),
            "clip_fraction_low": (active & (advantages < 0)).float(),
            "clip_fraction_high": (active & (advantages > 0)).float(),
            "clip_fraction_dual": (single > bound).float(),
        }
    return torch.minimum(single, bound), statistics


def _distance(tokens: Tokens, old: Tensor, ratio: Tensor) -> Statistics:
    return {
        # KL(π_old‖π): the tokens are the old policy's
        "kl": k3(old, tokens.logprobs.detach()),
        "ratio": ratio.detach(),
        "ratio_max": ratio.detach(),
        "ratio_min": ratio.detach(),
    }


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "reinforce": reinforce,
    "ppo_clip": ppo_clip,
    "gspo": gspo,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a policy's update minimises, as plain data that travels to every rank.

    L = w · loss(π, π_old) + kl_coef · KL(π‖reference) − entropy_coef · H(π), per token.

    Without a correction π_old is the sampler μ, on its own log-probabilities, and w = 1: classic PPO. With one, π_old
    is the policy at the start of the step, which at the step's first update is the current one, and w = π_old/μ as
    the correction bounds it: decoupled PPO (AReaL, arXiv 2505.24298). w carries no gradient, and touches neither the
    KL term nor the entropy.
    """

    loss: str = "ppo_clip"  # name in LOSSES
    options: Mapping[str, Any] = field(default_factory=dict)  # of the loss
    kl: KLName = "k3"  # name in KL_ESTIMATES
    correction: str = "none"  # name in CORRECTIONS
    correction_options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Statistics]:
        """(loss [N] before token weights, statistics [N] by name).

        Raises:
            ValueError: a token has a KL coefficient and there is no reference. Where only its own reference is NaN,
                its loss is.
        """
        old = tokens.behaviour if self.correction == "none" else tokens.logprobs.detach()
        if self.correction != "none" and tokens.proximal is not None:
            old = torch.where(tokens.proximal.isnan(), old, tokens.proximal)
        loss, statistics = LOSSES[self.loss](tokens, old, **self.options)
        if self.correction != "none":
            log_ratio = (old - tokens.behaviour).detach()
            weight = CORRECTIONS[self.correction](
                log_ratio, tokens.sequences, **self.correction_options
            )
            loss = loss * weight
            statistics |= {"correction_weight": weight, "correction_weight_max": weight}
            statistics |= {"correction_masked": (weight == 0).float()}
        if tokens.reference is not None and tokens.kl_coef is not None:
            known = ~tokens.reference.isnan()
            # the policy stands in where no reference is wanted: a NaN would get into the gradient even at coefficient 0
            stand_in = ~known & (tokens.kl_coef == 0)
            reference = torch.where(stand_in, tokens.logprobs.detach(), tokens.reference)
            kl = KL_ESTIMATES[self.kl](tokens.logprobs, reference)
            loss = loss + tokens.kl_coef * kl
            statistics |= {"reference_kl": torch.where(known, kl.detach(), math.nan)}
        elif tokens.kl_coef is not None and bool(tokens.kl_coef.any()):
            raise ValueError(
                "objective: kl_coef is not zero, but no token has reference log-probabilities; add them"
            )
        return loss - tokens.entropy_coef * tokens.entropy, statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """What a critic's update minimises: L = ½ max((V − R)², (clip(V, V_old ± clip) − R)²), per token.

    V is the critic's value function: the reward expected from a token on, of which R is what came.
    The value clipping that goes with PPO (Schulman et al. 2017, arXiv 1707.06347, in OpenAI baselines' form).
    """

    clip: float = 0.2  # in reward units; inf is plain regression

    def __call__(
        self, values: Tensor, old_values: Tensor, returns: Tensor
    ) -> tuple[Tensor, Statistics]:
        """(loss [N] before token weights, statistics [N] by name).

        Args:
            values: [N] of the critic being trained; carries the gradient.
            old_values: [N] of the critic at the start of the step.
            returns: [N] targets.
        """
        held = torch.clamp(values, old_values - self.clip, old_values + self.clip)
        plain = (values - returns).square()
        clipped = (held - returns).square()
        with torch.no_grad():
            error = returns - values
            statistics = {
                "value": values.detach(),
                "value_clip_fraction": (clipped > plain).float(),
                "value_error": error,
                "value_error_squared": error.square(),
                "return": returns,
                "return_squared": returns.square(),
            }
        return 0.5 * torch.maximum(plain, clipped), statistics


def explained_variance(means: Mapping[str, float]) -> float:
    """1 − Var(R − V) / Var(R), from the means of a `ValueObjective`'s statistics; NaN where all returns are equal."""
    returns = means["return_squared"] - means["return"] ** 2
    errors = means["value_error_squared"] - means["value_error"] ** 2
    return 1.0 - errors / returns if returns > 0 else math.nan


AggregationName = Literal[
    "token_mean",
    "agent_mean",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """One way to make a loss of all tokens."""

    weights: Callable[
        [Tensor, float], Tensor
    ]  # (lengths [n] float64, norm) -> weight of a token of each sample [n]
    source: str
    normed: bool = False  # divides by a configured length
    by_agent: bool = (
        False  # each agent's samples by themselves, of which the mean over agents is taken
    )


AGGREGATIONS: dict[AggregationName, Aggregation] = {
    # 1 / Σ_j |y_j|
    "token_mean": Aggregation(
        weights=lambda lengths, _: torch.ones_like(lengths) / lengths.sum(),
        source="DAPO, arXiv 2503.14476; verl token-mean",
    ),
    # 1 / (K Σ_{j of agent k} |y_j|) for K agents: who says more does not count more
    "agent_mean": Aggregation(
        weights=lambda lengths, _: torch.ones_like(lengths) / lengths.sum(),
        source="token_mean of each agent, as separate policies have it",
        by_agent=True,
    ),
    # 1 / n
    "seq_mean_token_sum": Aggregation(
        weights=lambda lengths, _: torch.ones_like(lengths) / (lengths > 0).sum(),
        source="REINFORCE's; verl seq-mean-token-sum",
    ),
    # 1 / (n |y_i|)
    "seq_mean_token_mean": Aggregation(
        weights=lambda lengths, _: 1.0 / ((lengths > 0).sum() * lengths),
        source="GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071; verl seq-mean-token-mean",
    ),
    # 1 / (n L)
    "seq_mean_token_sum_norm": Aggregation(
        weights=lambda lengths, norm: torch.ones_like(lengths) / ((lengths > 0).sum() * norm),
        source="Dr. GRPO, arXiv 2503.20783, with a constant length; verl seq-mean-token-sum-norm",
        normed=True,
    ),
}


def token_weights(
    lengths: Tensor, *, mode: AggregationName = "token_mean", norm: float | None = None
) -> Tensor:
    """The weight [n] float64 of each single token of sample i, the update's denominator included.

    Args:
        lengths: [n] trained tokens of every sample of the update. A sample without any is no sequence: it gets
            weight 0 and does not count in n.
        mode: name in `AGGREGATIONS`.
        norm: the constant length L in tokens, for modes that divide by one; None for the others.
    """
    lengths = lengths.double()
    return torch.where(lengths > 0, AGGREGATIONS[mode].weights(lengths, norm or 1.0), 0.0)
