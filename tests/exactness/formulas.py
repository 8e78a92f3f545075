"""Objectives of policy and critic, written out by hand for one reply at a time.

Nothing here is imported from `mcore_mas/equations` but the types of objectives: ratios, clips,
divergences, corrections and aggregations are written again. `Case` pairs each formula with the
product's objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mcore_mas.config.policy import TeacherConfig
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import AggregationName, Objective, ValueObjective
from tests.support import reference

LOSS_WEIGHTS = {"a": 1.0, "b": 0.5}  # by agent
LENGTH = 7.0  # tokens by which the aggregation with a constant length divides

# Coefficients of the KL term, of the entropy bonus and of a teacher.
KL = 0.1
ENTROPY = 0.01
TEACHER = 0.3


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Terms of a policy's loss for the n trained tokens of a reply, each [n].

    Attributes:
        new: log-probabilities of the policy, with gradient.
        entropy: of the policy, with gradient.
        sampler: log-probabilities under the weights that sampled the reply.
        start: log-probabilities under the weights at the start of the step.
        reference: log-probabilities under the reference model.
        teacher: log-probabilities under the teacher.
        advantage: of the tokens, without the teacher's.
    """

    new: Tensor
    entropy: Tensor
    sampler: Tensor
    start: Tensor
    reference: Tensor
    teacher: Tensor
    advantage: Tensor

    @property
    def distilled(self) -> Tensor:
        """Advantage of the teacher: log ρ - log μ for teacher ρ and sampler μ."""
        return self.teacher - self.sampler

    @property
    def ratio_to_sampler(self) -> Tensor:
        """Probability of the policy, divided by that of the sampler."""
        return torch.exp(self.new - self.sampler)

    @property
    def ratio_to_start(self) -> Tensor:
        """Probability of the policy, divided by that at the start of the step."""
        return torch.exp(self.new - self.start)

    @property
    def start_to_sampler(self) -> Tensor:
        """Probability at the start of the step, divided by that of the sampler."""
        return torch.exp(self.start - self.sampler)


@dataclass(frozen=True, kw_only=True)
class CriticReply:
    """Terms of a critic's loss for the n trained tokens of a reply, each [n].

    Attributes:
        value: with gradient.
        old: value at the start of the step.
        target: return.
    """

    value: Tensor
    old: Tensor
    target: Tensor


def clipped(
    ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float = float("inf")
) -> Tensor:
    """Return PPO's loss of each token.

    With an advantage of 0 or more, the ratio is bounded by 1 + high. With a negative advantage it is
    at least 1 - low and at most `dual`.
    """
    good = -advantage * torch.minimum(ratio, torch.full_like(ratio, 1 + high))
    bad = -advantage * torch.maximum(ratio, torch.full_like(ratio, 1 - low)).clamp(max=dual)
    return torch.where(advantage >= 0, good, bad)


def gspo_ratio(reply: Reply, base: Tensor) -> Tensor:
    """Return GSPO's ratio: the geometric mean over the reply, with a gradient for each token."""
    mean = torch.exp((reply.new - base).mean()).detach()
    return mean * torch.exp(reply.new - reply.new.detach())


def masked(weight: Tensor, low: float, high: float) -> Tensor:
    """Return the weight where it is in [low, high], and 0 elsewhere."""
    return weight * ((weight >= low) & (weight <= high))


def clipped_value_loss(reply: CriticReply, clip: float) -> Tensor:
    """Return half the squared error of the value, or of the clipped value where that is larger.

    The clipped value is within `clip` of the old value.
    """
    change = reply.value - reply.old
    clipped_change = torch.where(change.abs() <= clip, change, clip * change.sign())
    loss = (reply.value - reply.target) ** 2 / 2
    clipped_loss = (reply.old + clipped_change - reply.target) ** 2 / 2
    return torch.where(clipped_loss > loss, clipped_loss, loss)


def k1(reply: Reply) -> Tensor:
    """Return log π - log ρ."""
    return reply.new - reply.reference


def k2(reply: Reply) -> Tensor:
    """Return (log π - log ρ)² / 2."""
    return (reply.new - reply.reference) ** 2 / 2


def k3(reply: Reply) -> Tensor:
    """Return ρ/π - 1 - log ρ/π."""
    return torch.exp(reply.reference - reply.new) - 1 - (reply.reference - reply.new)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective of the product, and its formula.

    Attributes:
        name: in the table.
        objective: of the trainer.
        by_hand: returns the loss [n] of a `Reply` or a `CriticReply`, with KL term and entropy bonus.
        aggregation: of token losses.
        kl: coefficient of the KL term.
        entropy: coefficient of the entropy bonus.
        teacher: settings of the policy's teacher; None: it has none.
        proximal: False if the weights at the start of the step are the present weights.
        tested: True if the tests measure it too.
    """

    name: str
    objective: Objective | ValueObjective
    by_hand: Callable[..., Tensor]
    aggregation: AggregationName = "token_mean"
    kl: float = 0.0
    entropy: float = 0.0
    teacher: TeacherConfig | None = None
    proximal: bool = True
    tested: bool = False


def _ppo(low: float, high: float, dual: float = float("inf")) -> dict[str, float]:
    return {"clip_low": low, "clip_high": high, "dual_clip": dual}


_CLIPS = _ppo(0.2, 0.28)
CASES = (
    Case(
        name="PPO, lower and upper clip",
        objective=Objective(options=_CLIPS),
        by_hand=lambda r: clipped(r.ratio_to_sampler, r.advantage, 0.2, 0.28),
        tested=True,
    ),
    Case(
        name="PPO, dual clip, mean of summed replies",
        objective=Objective(options=_ppo(0.2, 0.2, 1.3)),
        by_hand=lambda r: clipped(r.ratio_to_sampler, r.advantage, 0.2, 0.2, 1.3),
        aggregation="seq_mean_token_sum",
    ),
    Case(
        name="REINFORCE, k1 in the loss",
        objective=Objective(loss="reinforce", kl="k1"),
        by_hand=lambda r: -r.advantage * r.new + KL * k1(r),
        kl=KL,
    ),
    Case(
        name="PPO, k1 with the gradient of k2",
        objective=Objective(options=_CLIPS, kl="k1+"),
        by_hand=lambda r: (
            clipped(r.ratio_to_sampler, r.advantage, 0.2, 0.28)
            + KL * (k2(r) + (k1(r) - k2(r)).detach())
        ),
        kl=KL,
    ),
    Case(
        name="PPO, k2, mean of mean replies",
        objective=Objective(options=_CLIPS, kl="k2"),
        by_hand=lambda r: clipped(r.ratio_to_sampler, r.advantage, 0.2, 0.28) + KL * k2(r),
        aggregation="seq_mean_token_mean",
        kl=KL,
    ),
    Case(
        name="PPO, k3, entropy, constant length",
        objective=Objective(options=_CLIPS, kl="k3"),
        by_hand=lambda r: (
            clipped(r.ratio_to_sampler, r.advantage, 0.2, 0.28) + KL * k3(r) - ENTROPY * r.entropy
        ),
        aggregation="seq_mean_token_sum_norm",
        kl=KL,
        entropy=ENTROPY,
        tested=True,
    ),
    Case(
        name="PPO, k3 with the gradient of k2",
        objective=Objective(options=_CLIPS, kl="k3+"),
        by_hand=lambda r: (
            clipped(r.ratio_to_sampler, r.advantage, 0.2, 0.28)
            + KL * (k2(r) + (k3(r) - k2(r)).detach())
        ),
        kl=KL,
    ),
    Case(
        name="GSPO, mean of mean replies",
        objective=Objective(loss="gspo", options={"clip_low": 0.1, "clip_high": 0.15}),
        by_hand=lambda r: clipped(gspo_ratio(r, r.sampler), r.advantage, 0.1, 0.15),
        aggregation="seq_mean_token_mean",
        tested=True,
    ),
    Case(
        name="GSPO, MIS by reply, k2, entropy",
        objective=Objective(
            loss="gspo",
            options={"clip_low": 0.1, "clip_high": 0.15},
            kl="k2",
            correction="mis",
            correction_options={"high": 2.0, "level": "sequence"},
        ),
        by_hand=lambda r: (
            clipped(gspo_ratio(r, r.start), r.advantage, 0.1, 0.15)
            * masked(r.start_to_sampler.prod(), 0.0, 2.0)
            + KL * k2(r)
            - ENTROPY * r.entropy
        ),
        kl=KL,
        entropy=ENTROPY,
    ),
    Case(
        name="PPO, importance weight of mean replies",
        objective=Objective(
            options=_CLIPS, correction="importance", correction_options={"level": "geometric"}
        ),
        by_hand=lambda r: (
            clipped(r.ratio_to_start, r.advantage, 0.2, 0.28)
            * torch.exp((r.start - r.sampler).mean())
        ),
    ),
    Case(
        name="PPO, TIS",
        objective=Objective(options=_CLIPS, correction="tis", correction_options={"high": 1.5}),
        by_hand=lambda r: (
            clipped(r.ratio_to_start, r.advantage, 0.2, 0.28) * r.start_to_sampler.clamp(max=1.5)
        ),
        tested=True,
    ),
    Case(
        name="PPO, TIS, first update of a step",
        objective=Objective(options=_CLIPS, correction="tis", correction_options={"high": 1.5}),
        by_hand=lambda r: (
            -r.advantage
            * torch.exp(r.new - r.new.detach())
            * torch.exp(r.new.detach() - r.sampler).clamp(max=1.5)
        ),
        proximal=False,
    ),
    Case(
        name="PPO, MIS by token, mean over agents",
        objective=Objective(
            options=_CLIPS,
            correction="mis",
            correction_options={"low": 0.6, "high": 1.6, "level": "token"},
        ),
        by_hand=lambda r: (
            clipped(r.ratio_to_start, r.advantage, 0.2, 0.28) * masked(r.start_to_sampler, 0.6, 1.6)
        ),
        aggregation="agent_mean",
    ),
    Case(
        name="PPO, MIS by reply",
        objective=Objective(options=_CLIPS, correction="mis", correction_options={"high": 2.0}),
        by_hand=lambda r: (
            clipped(r.ratio_to_start, r.advantage, 0.2, 0.28)
            * masked(r.start_to_sampler.prod(), 0.0, 2.0)
        ),
        tested=True,
    ),
    Case(
        name="PPO, IcePop",
        objective=Objective(
            options=_CLIPS, correction="icepop", correction_options={"low": 0.5, "high": 1.5}
        ),
        by_hand=lambda r: (
            clipped(r.ratio_to_start, r.advantage, 0.2, 0.28) * masked(r.start_to_sampler, 0.5, 1.5)
        ),
    ),
    Case(
        name="PPO, TIS with veto",
        objective=Objective(
            options=_CLIPS, correction="tis", correction_options={"high": 1.5, "veto": 0.6}
        ),
        by_hand=lambda r: (
            clipped(r.ratio_to_start, r.advantage, 0.2, 0.28)
            * r.start_to_sampler.clamp(max=1.5)
            * float(r.start_to_sampler.min() >= 0.6)
        ),
    ),
    Case(
        name="PPO, teacher beside the reward",
        objective=Objective(options=_CLIPS),
        by_hand=lambda r: clipped(
            r.ratio_to_sampler, r.advantage + TEACHER * r.distilled, 0.2, 0.28
        ),
        teacher=TeacherConfig(policy="teacher", coef=TEACHER),
        tested=True,
    ),
    Case(
        name="REINFORCE, teacher alone, mean of mean replies",
        objective=Objective(loss="reinforce"),
        by_hand=lambda r: -TEACHER * r.distilled * r.new,
        aggregation="seq_mean_token_mean",
        teacher=TeacherConfig(policy="teacher", coef=TEACHER, alone=True),
    ),
    Case(
        name="PPO, both clips, dual clip, TIS, k3, entropy",
        objective=Objective(
            options=_ppo(0.2, 0.28, 1.3),
            kl="k3",
            correction="tis",
            correction_options={"high": 1.5},
        ),
        by_hand=lambda r: (
            clipped(r.ratio_to_start, r.advantage, 0.2, 0.28, 1.3)
            * r.start_to_sampler.clamp(max=1.5)
            + KL * k3(r)
            - ENTROPY * r.entropy
        ),
        kl=KL,
        entropy=ENTROPY,
        tested=True,
    ),
)


# Objectives of a critic.
VALUE_CASES = (
    Case(
        name="value loss, clip",
        objective=ValueObjective(clip=0.2),
        by_hand=lambda r: clipped_value_loss(r, 0.2),
        tested=True,
    ),
    Case(
        name="value loss, narrow clip, mean of mean replies",
        objective=ValueObjective(clip=0.05),
        by_hand=lambda r: clipped_value_loss(r, 0.05),
        aggregation="seq_mean_token_mean",
    ),
    Case(
        name="value loss without clip, mean over agents",
        objective=ValueObjective(clip=float("inf")),
        by_hand=lambda r: (r.value - r.target) ** 2 / 2,
        aggregation="agent_mean",
    ),
)


def weight_by_hand(case: Case, sample: Sample, samples: Sequence[Sample]) -> float:
    """Return the weight of a token of a sample in the loss of the update."""
    tokens = len(_trained_indices(sample))
    tokens_by_agent = {
        agent: sum(len(_trained_indices(other)) for other in samples if other.agent == agent)
        for agent in LOSS_WEIGHTS
    }
    denominators = {
        "token_mean": sum(tokens_by_agent.values()),
        "agent_mean": len(LOSS_WEIGHTS) * tokens_by_agent[sample.agent],
        "seq_mean_token_sum": len(samples),
        "seq_mean_token_mean": len(samples) * tokens,
        "seq_mean_token_sum_norm": len(samples) * LENGTH,
    }
    return LOSS_WEIGHTS[sample.agent] / denominators[case.aggregation]


def loss_by_hand(
    case: Case, samples: Sequence[Sample], model: PreTrainedModel, sample: Sample
) -> Tensor:
    """Return the part of one sample in the loss of the update."""
    terms_of = critic_reply_of if isinstance(case.objective, ValueObjective) else reply_of
    return case.by_hand(terms_of(model, sample)).sum() * weight_by_hand(case, sample, samples)


def _trained_indices(sample: Sample) -> list[int]:
    """Return the indices of the trained tokens in the completion."""
    indices = range(len(sample.completion_ids))
    if sample.trained is None:
        return list(indices)
    return [i for i in indices if sample.trained[i]]


def _column(sample: Sample, name: str, dtype: torch.dtype) -> Tensor:
    """Return the values of a field of the sample for its trained tokens."""
    values = getattr(sample, name)
    return torch.tensor([values[i] for i in _trained_indices(sample)], dtype=dtype)


def critic_reply_of(critic: PreTrainedModel, sample: Sample) -> CriticReply:
    """Compute a critic's values of one sample, which is not packed."""
    value = reference.values_of(critic, sample)[_trained_indices(sample)]
    return CriticReply(
        value=value,
        old=_column(sample, "values", value.dtype),
        target=_column(sample, "returns", value.dtype),
    )


def reply_of(model: PreTrainedModel, sample: Sample) -> Reply:
    """Compute a policy's log-probabilities of one sample, which is not packed."""
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    tokens = [len(sample.prompt_ids) + i for i in _trained_indices(sample)]
    predictors = [token - 1 for token in tokens]
    logits = model(input_ids=ids[None]).logits[0] / sample.temperature
    logprobs = torch.log_softmax(logits, -1)[predictors]  # [n, vocabulary]
    return Reply(
        new=logprobs.gather(1, ids[tokens][:, None])[:, 0],
        entropy=-(logprobs.exp() * logprobs).sum(-1),
        sampler=_column(sample, "behaviour", logprobs.dtype),
        start=_column(sample, "proximal", logprobs.dtype),
        reference=_column(sample, "reference", logprobs.dtype),
        teacher=_column(sample, "teacher", logprobs.dtype),
        advantage=_column(sample, "advantages", logprobs.dtype),
    )
