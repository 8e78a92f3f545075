"""Token losses of a policy and of its critic, and their aggregation to the loss of an update.

A policy loss maps a `TokenBatch` of N tokens, and their log-probabilities [N] under π_old, the
denominator of the ratio π/π_old, to (loss [N], statistics [N] by name). Statistics are averaged over
all tokens; if the name ends in `_max` or `_min`, their maximum or minimum is taken. NaN marks tokens
without the statistic.

The loss of an update is Σ_i Σ_t weight_i · loss_it over all tokens of all its samples. It therefore
does not depend on the micro-batches or on the number of ranks. A sequence is a sample: one reply of
one agent.

Options:
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    dual_clip: the loss of a negative advantage A is at most dual_clip · |A|.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat

from mcore_mas.equations.corrections import CORRECTIONS
from mcore_mas.equations.kl import KL_ESTIMATES, KLName, k3
from mcore_mas.equations.log_ratios import at_level, bounded_exp
from mcore_mas.equations.tensors import Tensor, torch
from rollout.base.section import Share

DualClip = Annotated[float, Field(gt=1, allow_inf_nan=True)]
Statistics = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Inputs of a loss for N trained tokens. Log-probabilities are in nats, after temperature.

    Attributes:
        logprobs: [N] of the policy being trained; carries the gradient.
        behaviour: [N] of the policy that sampled; NaN for tokens that were not sampled.
        advantages: [N].
        sequences: [N] int64 id of the token's reply; a reply is never split over micro-batches.
        entropy: [N] nats; carries the gradient where `entropy_coef` is not zero.
        kl_coef: [N] factor of the KL term; None without a KL term.
        entropy_coef: [N] factor of the entropy bonus.
        proximal: [N] log-probabilities under the weights of π_old; None or NaN if these are the
            current weights.
        reference: [N] log-probabilities of the frozen reference; NaN where `kl_coef` is zero.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequences: Tensor
    entropy: Tensor
    kl_coef: Tensor | None
    entropy_coef: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None


# (tokens, log-probabilities [N] of the old policy, **options) to (loss [N], statistics)
Loss = Callable[..., tuple[Tensor, Statistics]]


def cross_entropy(tokens: TokenBatch, old: Tensor) -> tuple[Tensor, Statistics]:
    """Compute the negative log-likelihood [N], for supervised fine-tuning (SFT)."""
    return -tokens.logprobs, {}


def reinforce(tokens: TokenBatch, old: Tensor) -> tuple[Tensor, Statistics]:
    """Compute the policy-gradient loss −A log π [N], without ratio or clip.

    Source: REINFORCE, Williams 1992.
    """
    ratio = bounded_exp((tokens.logprobs - old).detach())
    return -tokens.advantages * tokens.logprobs, _ratio_statistics(tokens, old, ratio)


def ppo_clip(
    tokens: TokenBatch,
    old: Tensor,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    dual_clip: DualClip = 3.0,
) -> tuple[Tensor, Statistics]:
    """Compute the clipped policy-gradient loss [N] of PPO, with dual clip.

    The lower and upper clips may differ. Dual clip bounds the loss of a negative advantage A by
    `dual_clip` · |A|.

    Source: PPO, arXiv 1707.06347, eq. 7; DAPO, arXiv 2503.14476, for two clips; Ye et al. 2020,
    arXiv 1912.09729, eq. 5, for dual clip.
    """
    # r = π / π_old
    ratio = bounded_exp(tokens.logprobs - old)
    loss, statistics = _clipped(ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    return loss, statistics | _ratio_statistics(tokens, old, ratio)


def gspo(
    tokens: TokenBatch,
    old: Tensor,
    *,
    clip_low: Share = 3e-4,
    clip_high: NonNegativeFloat = 4e-4,
    dual_clip: DualClip = math.inf,
) -> tuple[Tensor, Statistics]:
    """Compute the clipped policy-gradient loss [N] with the length-normalised ratio of the whole reply.

    This is GSPO-token, which has GSPO's value and gradient where a reply's advantages are equal. The
    paper aggregates by `seq_mean_token_mean`.

    Source: GSPO, arXiv 2507.18071, sec. 4.3; clips of sec. 5.1.
    """
    # s_it = sg[s_i] · π(y_it) / sg[π(y_it)], s_i = (π(y_i) / π_old(y_i))^(1/|y_i|)
    mean = at_level((tokens.logprobs - old).detach(), tokens.sequences, "geometric")
    ratio = bounded_exp(mean + (tokens.logprobs - tokens.logprobs.detach()))
    loss, statistics = _clipped(ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    return loss, statistics | _ratio_statistics(tokens, old, ratio)


def _clipped(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float
) -> tuple[Tensor, Statistics]:
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - low, 1.0 + high) * advantages
    bound = torch.where(advantages < 0, -dual * advantages, math.inf)
    # L = max(−r A, −clip(r) A), and for A < 0: L = min(max(−r A, −clip(r) A), −c A)
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


def _ratio_statistics(tokens: TokenBatch, old: Tensor, ratio: Tensor) -> Statistics:
    return {
        # KL(π_old‖π), because the old policy sampled the tokens: the size of the update. The distance to the reference
        # model is `reference_kl`. Files of existing runs have the two metrics under these names.
        "kl": k3(old, tokens.logprobs.detach()),
        # One tensor under three names, because the suffix of a name chooses its reduction (`_max`, `_min`, mean).
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
# Losses whose value at a token depends on that token alone.
_TOKEN_LOSSES = (cross_entropy, reinforce, ppo_clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Objective of a policy's update, as plain data that is sent to every rank.

    L = w · loss(π, π_old) + kl_coef · KL(π‖reference) − entropy_coef · H(π), per token.

    Without a correction, π_old is the sampler μ with its recorded log-probabilities, and w = 1:
    classic PPO. With a correction, π_old is the policy at the start of the step (the current policy
    in the step's first update), and w = π_old/μ, bounded by the correction: decoupled PPO (AReaL,
    arXiv 2505.24298). w carries no gradient, and applies neither to the KL term nor to the entropy.

    Attributes:
        loss: name in `LOSSES`.
        options: keyword options of the loss.
        kl: name in `KL_ESTIMATES`.
        correction: name in `CORRECTIONS`.
        correction_options: keyword options of the correction.
    """

    loss: str = "ppo_clip"
    options: Mapping[str, Any] = field(default_factory=dict)
    kl: KLName = "k3"
    correction: str = "none"
    correction_options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, tokens: TokenBatch) -> tuple[Tensor, Statistics]:
        """Compute the loss [N] of each token, not yet multiplied by `token_weights`, and statistics [N].

        If a token has a KL coefficient and its reference is NaN, its loss is NaN.

        Raises:
            ValueError: a token has a KL coefficient, and no token has a reference.
        """
        old = self._old_logprobs(tokens)
        loss, statistics = LOSSES[self.loss](tokens, old, **self.options)

        if self.correction != "none":
            log_ratio = (old - tokens.behaviour).detach()
            correct = CORRECTIONS[self.correction]
            weight = correct(log_ratio, tokens.sequences, **self.correction_options)
            loss = loss * weight
            statistics["correction_weight"] = weight
            statistics["correction_weight_max"] = weight
            statistics["correction_masked"] = (weight == 0).float()

        if tokens.reference is not None and tokens.kl_coef is not None:
            has_reference = ~tokens.reference.isnan()
            # Where the coefficient is 0 a missing reference is replaced by the policy itself,
            # because a NaN would reach the gradient even with coefficient 0.
            is_replaced = ~has_reference & (tokens.kl_coef == 0)
            reference = torch.where(is_replaced, tokens.logprobs.detach(), tokens.reference)
            kl = KL_ESTIMATES[self.kl](tokens.logprobs, reference)
            loss = loss + tokens.kl_coef * kl
            statistics["reference_kl"] = torch.where(has_reference, kl.detach(), math.nan)
        elif tokens.kl_coef is not None and bool(tokens.kl_coef.any()):
            raise ValueError(
                "objective: kl_coef is not zero, but no token has reference log-probabilities; add them"
            )
        return loss - tokens.entropy_coef * tokens.entropy, statistics

    @property
    def is_by_token(self) -> bool:
        """True if a token's loss depends on that token alone, and not on others of its reply."""
        if LOSSES[self.loss] not in _TOKEN_LOSSES:
            return False
        if self.correction == "none":
            return True
        parameters = inspect.signature(CORRECTIONS[self.correction]).parameters
        level = self.correction_options.get("level", parameters["level"].default)
        veto = self.correction_options.get("veto", parameters["veto"].default)
        return bool(level == "token" and veto <= 0.0)

    def _old_logprobs(self, tokens: TokenBatch) -> Tensor:
        """Return the log-probabilities [N] of π_old."""
        if self.correction == "none":
            return tokens.behaviour
        current = tokens.logprobs.detach()
        if tokens.proximal is None:
            return current
        return torch.where(tokens.proximal.isnan(), current, tokens.proximal)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """Objective of a critic's update: L = ½ max((V − R)², (clip(V, V_old ± clip) − R)²), per token.

    V is the value function, the expected return from a token on, and R its target: the observed
    return, or the λ-return of `gae` if its `lam` is below 1. This is PPO's value clipping (Schulman et
    al. 2017, arXiv 1707.06347, in the form of OpenAI baselines).

    Attributes:
        clip: clipping distance in units of reward; inf gives plain regression.
    """

    clip: float = 0.2

    def __call__(
        self, values: Tensor, old_values: Tensor, returns: Tensor
    ) -> tuple[Tensor, Statistics]:
        """Compute the loss [N] of each token, not yet multiplied by `token_weights`, and statistics [N].

        Args:
            values: [N] of the critic being trained; carries the gradient.
            old_values: [N] of the critic at the start of the step.
            returns: [N] targets R.
        """
        clipped_values = torch.clamp(values, old_values - self.clip, old_values + self.clip)
        plain = (values - returns).square()
        clipped = (clipped_values - returns).square()
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
    """Compute 1 − Var(R − V) / Var(R) from the means of a `ValueObjective`'s statistics.

    The result is NaN if all returns are equal.
    """
    return_variance = means["return_squared"] - means["return"] ** 2
    error_variance = means["value_error_squared"] - means["value_error"] ** 2
    return 1.0 - error_variance / return_variance if return_variance > 0 else math.nan


AggregationName = Literal[
    "token_mean",
    "agent_mean",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """Aggregation of token losses to one loss.

    Attributes:
        weights: maps (lengths [n] float64, norm) to the weight of a token of each sample, [n].
        source: paper, or name in other libraries.
        normed: the weights divide by a configured length.
        by_agent: the samples of each agent are aggregated separately, and the mean over agents is
            taken.
    """

    weights: Callable[[Tensor, float], Tensor]
    source: str
    normed: bool = False
    by_agent: bool = False


AGGREGATIONS: dict[AggregationName, Aggregation] = {
    # 1 / Σ_j |y_j|
    "token_mean": Aggregation(
        weights=lambda lengths, _: torch.ones_like(lengths) / lengths.sum(),
        source="DAPO, arXiv 2503.14476; verl token-mean",
    ),
    # 1 / (K Σ_{j of agent k} |y_j|) for K agents, so that agents with longer replies do not count
    # more
    "agent_mean": Aggregation(
        weights=lambda lengths, _: torch.ones_like(lengths) / lengths.sum(),
        source="token_mean of each agent, as with separate policies",
        by_agent=True,
    ),
    # 1 / n
    "seq_mean_token_sum": Aggregation(
        weights=lambda lengths, _: torch.ones_like(lengths) / (lengths > 0).sum(),
        source="REINFORCE; verl seq-mean-token-sum",
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
    """Return the weight of a single token of each sample, [m] float64, including the denominator of the update.

    Args:
        lengths: [m] number of trained tokens of every sample of the update. A sample without
            trained tokens gets weight 0 and does not count as a sample in the denominators.
        mode: name in `AGGREGATIONS`.
        norm: the constant length L in tokens that a mode with `normed` divides by; None for the others.
    """
    lengths = lengths.double()
    return torch.where(lengths > 0, AGGREGATIONS[mode].weights(lengths, norm or 1.0), 0.0)
