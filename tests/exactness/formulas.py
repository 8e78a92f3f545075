"""The objectives of a policy and of its critic, written out by hand for one reply at a time.

Nothing here is taken from `mcore_mas/equations`: ratio, clips, divergences, corrections and aggregations are written
again. `Case` pairs each with the objective as a config says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import AggregationName, Objective, ValueObjective
from tests.support import reference

Tensor = torch.Tensor
LOSS_WEIGHTS = {"a": 1.0, "b": 0.5}
LENGTH = 7.0  # tokens, of the aggregation that divides by a constant
KL, ENTROPY = 0.1, 0.01  # coefficients


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the loss of one reply is made of, each [n] for its n trained tokens."""

    new: Tensor  # log-probabilities of the policy, with their gradient
    entropy: Tensor
    sampler: Tensor  # log-probabilities of who sampled
    start: Tensor  # of the weights at the start of the step
    reference: Tensor
    advantage: Tensor

    @property
    def ratio(self) -> Tensor:
        """To the sampler."""
        return torch.exp(self.new - self.sampler)

    @property
    def moved(self) -> Tensor:
        """The ratio to the start of the step."""
        return torch.exp(self.new - self.start)

    @property
    def off(self) -> Tensor:
        """The start of the step over the sampler."""
        return torch.exp(self.start - self.sampler)


def clipped(
    ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float = float("inf")
) -> Tensor:
    """What is better than before counts up to 1 + high; what is worse from 1 - low on, and up to `dual`."""
    good = -advantage * torch.minimum(ratio, torch.full_like(ratio, 1 + high))
    bad = -advantage * torch.maximum(ratio, torch.full_like(ratio, 1 - low)).clamp(max=dual)
    return torch.where(advantage >= 0, good, bad)


def whole(reply: Reply, base: Tensor) -> Tensor:
    """GSPO's ratio: the geometric mean over the reply, whose gradient each token carries for itself."""
    mean = torch.exp((reply.new - base).mean()).detach()
    return mean * torch.exp(reply.new - reply.new.detach())


def inside(weight: Tensor, low: float, high: float) -> Tensor:
    """The weight where it lies between the two, else 0."""
    return weight * ((weight >= low) & (weight <= high))


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a critic's loss of one reply is made of, each [n]."""

    value: Tensor  # with its gradient
    old: Tensor  # the value at the start of the step
    target: Tensor  # the return


def held(judgement: Judgement, clip: float) -> Tensor:
    """Half the squared error, or that of the value held within `clip` of the old one where that is more."""
    moved = judgement.value - judgement.old
    near = judgement.old + torch.where(moved.abs() <= clip, moved, clip * moved.sign())
    plain, kept = ((value - judgement.target) ** 2 / 2 for value in (judgement.value, near))
    return torch.where(kept > plain, kept, plain)


def k1(reply: Reply) -> Tensor:
    """log π - log ρ."""
    return reply.new - reply.reference


def k2(reply: Reply) -> Tensor:
    """Half its square."""
    return (reply.new - reply.reference) ** 2 / 2


def k3(reply: Reply) -> Tensor:
    """ρ/π - 1 - log ρ/π."""
    return torch.exp(reply.reference - reply.new) - 1 - (reply.reference - reply.new)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective as a config says it, and by hand."""

    name: str
    objective: Objective | ValueObjective
    by_hand: Callable[
        ..., Tensor
    ]  # Reply or Judgement -> the loss [n] of its tokens, with KL term and entropy bonus
    aggregation: AggregationName = "token_mean"
    kl: float = 0.0
    entropy: float = 0.0
    proximal: bool = True  # whether the weights at the start of the step are not the present ones
    ci: bool = False  # measured by `make test` too


def _ppo(low: float, high: float, dual: float = float("inf")) -> dict[str, float]:
    return {"clip_low": low, "clip_high": high, "dual_clip": dual}


_BOTH = _ppo(0.2, 0.28)
CASES = (
    Case(
        name="PPO, lower and upper clip",
        objective=Objective(options=_BOTH),
        by_hand=lambda r: clipped(r.ratio, r.advantage, 0.2, 0.28),
        ci=True,
    ),
    Case(
        name="PPO, dual clip, mean of summed replies",
        objective=Objective(options=_ppo(0.2, 0.2, 1.3)),
        by_hand=lambda r: clipped(r.ratio, r.advantage, 0.2, 0.2, 1.3),
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
        objective=Objective(options=_BOTH, kl="k1+"),
        by_hand=lambda r: (
            clipped(r.ratio, r.advantage, 0.2, 0.28) + KL * (k2(r) + (k1(r) - k2(r)).detach())
        ),
        kl=KL,
    ),
    Case(
        name="PPO, k2, mean of mean replies",
        objective=Objective(options=_BOTH, kl="k2"),
        by_hand=lambda r: clipped(r.ratio, r.advantage, 0.2, 0.28) + KL * k2(r),
        aggregation="seq_mean_token_mean",
        kl=KL,
    ),
    Case(
        name="PPO, k3, entropy, constant length",
        objective=Objective(options=_BOTH, kl="k3"),
        by_hand=lambda r: (
            clipped(r.ratio, r.advantage, 0.2, 0.28) + KL * k3(r) - ENTROPY * r.entropy
        ),
        aggregation="seq_mean_token_sum_norm",
        kl=KL,
        entropy=ENTROPY,
        ci=True,
    ),
    Case(
        name="PPO, k3 with the gradient of k2",
        objective=Objective(options=_BOTH, kl="k3+"),
        by_hand=lambda r: (
            clipped(r.ratio, r.advantage, 0.2, 0.28) + KL * (k2(r) + (k3(r) - k2(r)).detach())
        ),
        kl=KL,
    ),
    Case(
        name="GSPO, mean of mean replies",
        objective=Objective(loss="gspo", options={"clip_low": 0.1, "clip_high": 0.15}),
        by_hand=lambda r: clipped(whole(r, r.sampler), r.advantage, 0.1, 0.15),
        aggregation="seq_mean_token_mean",
        ci=True,
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
            clipped(whole(r, r.start), r.advantage, 0.1, 0.15) * inside(r.off.prod(), 0.0, 2.0)
            + KL * k2(r)
            - ENTROPY * r.entropy
        ),
        kl=KL,
        entropy=ENTROPY,
    ),
    Case(
        name="PPO, importance weight of mean replies",
        objective=Objective(
            options=_BOTH, correction="importance", correction_options={"level": "geometric"}
        ),
        by_hand=lambda r: (
            clipped(r.moved, r.advantage, 0.2, 0.28) * torch.exp((r.start - r.sampler).mean())
        ),
    ),
    Case(
        name="PPO, TIS",
        objective=Objective(options=_BOTH, correction="tis", correction_options={"high": 1.5}),
        by_hand=lambda r: clipped(r.moved, r.advantage, 0.2, 0.28) * r.off.clamp(max=1.5),
        ci=True,
    ),
    Case(
        name="PPO, TIS, first update of a step",
        objective=Objective(options=_BOTH, correction="tis", correction_options={"high": 1.5}),
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
            options=_BOTH,
            correction="mis",
            correction_options={"low": 0.6, "high": 1.6, "level": "token"},
        ),
        by_hand=lambda r: clipped(r.moved, r.advantage, 0.2, 0.28) * inside(r.off, 0.6, 1.6),
        aggregation="agent_mean",
    ),
    Case(
        name="PPO, MIS by reply",
        objective=Objective(options=_BOTH, correction="mis", correction_options={"high": 2.0}),
        by_hand=lambda r: clipped(r.moved, r.advantage, 0.2, 0.28) * inside(r.off.prod(), 0.0, 2.0),
        ci=True,
    ),
    Case(
        name="PPO, IcePop",
        objective=Objective(
            options=_BOTH, correction="icepop", correction_options={"low": 0.5, "high": 1.5}
        ),
        by_hand=lambda r: clipped(r.moved, r.advantage, 0.2, 0.28) * inside(r.off, 0.5, 1.5),
    ),
    Case(
        name="PPO, TIS with veto",
        objective=Objective(
            options=_BOTH, correction="tis", correction_options={"high": 1.5, "veto": 0.6}
        ),
        by_hand=lambda r: (
            clipped(r.moved, r.advantage, 0.2, 0.28)
            * r.off.clamp(max=1.5)
            * float(r.off.min() >= 0.6)
        ),
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
            clipped(r.moved, r.advantage, 0.2, 0.28, 1.3) * r.off.clamp(max=1.5)
            + KL * k3(r)
            - ENTROPY * r.entropy
        ),
        kl=KL,
        entropy=ENTROPY,
        ci=True,
    ),
)


VALUE_CASES = (  # of a critic
    Case(
        name="value loss, clip",
        objective=ValueObjective(clip=0.2),
        by_hand=lambda j: held(j, 0.2),
        ci=True,
    ),
    Case(
        name="value loss, narrow clip, mean of mean replies",
        objective=ValueObjective(clip=0.05),
        by_hand=lambda j: held(j, 0.05),
        aggregation="seq_mean_token_mean",
    ),
    Case(
        name="value loss without clip, mean over agents",
        objective=ValueObjective(clip=float("inf")),
        by_hand=lambda j: (j.value - j.target) ** 2 / 2,
        aggregation="agent_mean",
    ),
)


def weight_by_hand(case: Case, sample: Sample, samples: Sequence[Sample]) -> float:
    """What one token of a sample counts in the update."""

    def tokens(of: Sample) -> int:
        return len(of.completion_ids) if of.trained is None else sum(of.trained)

    denominator = {
        "token_mean": sum(map(tokens, samples)),
        "agent_mean": len(LOSS_WEIGHTS)
        * sum(tokens(other) for other in samples if other.agent == sample.agent),
        "seq_mean_token_sum": len(samples),
        "seq_mean_token_mean": len(samples) * tokens(sample),
        "seq_mean_token_sum_norm": len(samples) * LENGTH,
    }
    return LOSS_WEIGHTS[sample.agent] / denominator[case.aggregation]


def loss_by_hand(
    case: Case, samples: Sequence[Sample], model: PreTrainedModel, sample: Sample
) -> Tensor:
    """The share of one sample in the update's loss."""
    made = judgement_of if isinstance(case.objective, ValueObjective) else reply_of
    return case.by_hand(made(model, sample)).sum() * weight_by_hand(case, sample, samples)


def _trained(sample: Sample) -> list[int]:
    """Which tokens of the completion are trained."""
    return [
        i
        for i, counts in enumerate(sample.trained or (True,) * len(sample.completion_ids))
        if counts
    ]


def _column(sample: Sample, name: str, like: Tensor) -> Tensor:
    """What the sample says of its trained tokens."""
    return torch.tensor([getattr(sample, name)[i] for i in _trained(sample)], dtype=like.dtype)


def judgement_of(critic: PreTrainedModel, sample: Sample) -> Judgement:
    """A critic's values of a sample, computed alone and unpacked."""
    value = reference.values_of(critic, sample)[_trained(sample)]
    return Judgement(
        value=value, old=_column(sample, "values", value), target=_column(sample, "returns", value)
    )


def reply_of(model: PreTrainedModel, sample: Sample) -> Reply:
    """A policy's log-probabilities of a sample, computed alone and unpacked."""
    ids, start, kept = (
        torch.tensor(sample.prompt_ids + sample.completion_ids),
        len(sample.prompt_ids),
        _trained(sample),
    )
    every = torch.log_softmax(model(input_ids=ids[None]).logits[0] / sample.temperature, -1)
    before = every[[start + i - 1 for i in kept]]  # what was said before each token
    return Reply(
        new=before.gather(1, ids[start:][kept][:, None])[:, 0],
        entropy=-(before.exp() * before).sum(-1),
        sampler=_column(sample, "behaviour", before),
        start=_column(sample, "proximal", before),
        reference=_column(sample, "reference", before),
        advantage=_column(sample, "advantages", before),
    )
