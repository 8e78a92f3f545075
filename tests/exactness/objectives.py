"""The RL objective under every kind of layout, against its formulas written out by hand on a Hugging Face model.

Nothing here is taken from `mcore_mas/equations`: ratio, clips, divergences, corrections and aggregations are written
again, for one reply at a time, and computed in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mcore_mas.credit.samples import Sample, weigh
from mcore_mas.equations.losses import AggregationName, Objective
from mcore_mas.megatron.batch import CostModel
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.exactness.rows import FEEDS, LAYERS
from tests.support import ranks, reference
from tests.support.precision import Errors, Expected, bound, errors, expect, largest

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


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float = float("inf")) -> Tensor:
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
    objective: Objective
    by_hand: Callable[[Reply], Tensor]  # the loss [n] of a reply's tokens, with KL term and entropy bonus
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
        name="PPO, k2, mean of mean replies",
        objective=Objective(options=_BOTH, kl="k2"),
        by_hand=lambda r: clipped(r.ratio, r.advantage, 0.2, 0.28) + KL * k2(r),
        aggregation="seq_mean_token_mean",
        kl=KL,
    ),
    Case(
        name="PPO, k3, entropy, constant length",
        objective=Objective(options=_BOTH, kl="k3"),
        by_hand=lambda r: clipped(r.ratio, r.advantage, 0.2, 0.28) + KL * k3(r) - ENTROPY * r.entropy,
        aggregation="seq_mean_token_sum_norm",
        kl=KL,
        entropy=ENTROPY,
        ci=True,
    ),
    Case(
        name="PPO, k3 with the gradient of k2",
        objective=Objective(options=_BOTH, kl="k3+"),
        by_hand=lambda r: clipped(r.ratio, r.advantage, 0.2, 0.28) + KL * (k2(r) + (k3(r) - k2(r)).detach()),
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
        objective=Objective(options=_BOTH, correction="importance", correction_options={"level": "geometric"}),
        by_hand=lambda r: clipped(r.moved, r.advantage, 0.2, 0.28) * torch.exp((r.start - r.sampler).mean()),
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
            -r.advantage * torch.exp(r.new - r.new.detach()) * torch.exp(r.new.detach() - r.sampler).clamp(max=1.5)
        ),
        proximal=False,
    ),
    Case(
        name="PPO, MIS by token",
        objective=Objective(
            options=_BOTH, correction="mis", correction_options={"low": 0.6, "high": 1.6, "level": "token"}
        ),
        by_hand=lambda r: clipped(r.moved, r.advantage, 0.2, 0.28) * inside(r.off, 0.6, 1.6),
    ),
    Case(
        name="PPO, MIS by reply",
        objective=Objective(options=_BOTH, correction="mis", correction_options={"high": 2.0}),
        by_hand=lambda r: clipped(r.moved, r.advantage, 0.2, 0.28) * inside(r.off.prod(), 0.0, 2.0),
        ci=True,
    ),
    Case(
        name="PPO, IcePop",
        objective=Objective(options=_BOTH, correction="icepop", correction_options={"low": 0.5, "high": 1.5}),
        by_hand=lambda r: clipped(r.moved, r.advantage, 0.2, 0.28) * inside(r.off, 0.5, 1.5),
    ),
    Case(
        name="PPO, TIS with veto",
        objective=Objective(options=_BOTH, correction="tis", correction_options={"high": 1.5, "veto": 0.6}),
        by_hand=lambda r: clipped(r.moved, r.advantage, 0.2, 0.28) * r.off.clamp(max=1.5) * float(r.off.min() >= 0.6),
    ),
    Case(
        name="PPO, both clips, dual clip, TIS, k3, entropy",
        objective=Objective(options=_ppo(0.2, 0.28, 1.3), kl="k3", correction="tis", correction_options={"high": 1.5}),
        by_hand=lambda r: (
            clipped(r.moved, r.advantage, 0.2, 0.28, 1.3) * r.off.clamp(max=1.5) + KL * k3(r) - ENTROPY * r.entropy
        ),
        kl=KL,
        entropy=ENTROPY,
        ci=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A layout and a way to feed it, under which every case is measured."""

    name: str
    family: str = "qwen2"
    layout: dict[str, Any] = field(default_factory=dict)  # of the TrainerSpec
    feed: str = "tree"  # in FEEDS
    max_tokens: int = 16  # of a micro-batch
    deep: bool = False  # turns that share three levels of beginnings
    ci: bool = False

    @property
    def task(self) -> tuple[str, bool]:
        """What places that must agree have in common."""
        return self.family, self.deep


PLACES = (
    Place(name="one rank", ci=True),
    Place(name="nothing shared", feed="linear", max_tokens=1000),
    Place(name="TP2 + SP", layout={"tp": 2, "sp": True}, ci=True),
    Place(name="PP2", layout={"pp": 2}),
    Place(name="CP2", layout={"cp": 2}, max_tokens=1000),
    Place(name="DP2 + distributed optimizer", layout={"dp": 2, "distributed_optimizer": True}),
    Place(name="TP2 × PP2 + SP", layout={"tp": 2, "pp": 2, "sp": True}),
    Place(name="CP2 × DP2", layout={"cp": 2, "dp": 2}),
    Place(name="Qwen3-MoE, DP2 × EP2", family="qwen3_moe", layout={"dp": 2, "ep": 2}),
    Place(name="trees of depth 3", deep=True, max_tokens=64),
    Place(name="trees of depth 3, TP2 + SP", deep=True, max_tokens=64, layout={"tp": 2, "sp": True}),
    Place(name="trees of depth 3, PP2 × DP2", deep=True, max_tokens=64, layout={"pp": 2, "dp": 2}),
)


def drawn(model: PreTrainedModel, deep: bool) -> list[Sample]:
    """The suite's samples with signals: log-probabilities some tenths of nats apart, and random advantages."""
    generator = torch.Generator().manual_seed(1)  # clips, both ways, and masks are met
    found = []
    for number, sample in enumerate(reference.make_deep_samples() if deep else reference.make_samples()):
        with torch.no_grad():
            near = reference.logprobs_of(model, sample).nan_to_num()

        def noisy(scale: float, near: Tensor = near) -> tuple[float, ...]:
            return tuple((near + scale * torch.randn(len(near), generator=generator)).float().tolist())

        size = 0.5 + float(torch.randn(1, generator=generator).abs())
        advantage = size * (-2.0 if number % 2 else 1.0)  # of both signs, whose losses do not cancel
        columns = {"behaviour": noisy(0.4), "proximal": noisy(0.4), "reference": noisy(0.5)}
        found.append(replace(sample, **columns, advantages=(advantage,) * len(near)))
    return found


def _of(case: Case, samples: Sequence[Sample]) -> list[Sample]:
    """The samples as the product's trainer is fed them."""
    proximal = {} if case.proximal else {"proximal": None}
    coefficients = {"kl_coef": case.kl, "entropy_coef": case.entropy} | proximal
    norm = LENGTH if case.aggregation.endswith("norm") else None
    return weigh([replace(s, **coefficients) for s in samples], LOSS_WEIGHTS, case.aggregation, norm)


def weight_by_hand(case: Case, sample: Sample, samples: Sequence[Sample]) -> float:
    """What one token of a sample counts in the update."""
    lengths = [len(s.completion_ids) if s.trained is None else sum(s.trained) for s in samples]
    own = len(sample.completion_ids) if sample.trained is None else sum(sample.trained)
    denominator = {
        "token_mean": sum(lengths),
        "seq_mean_token_sum": len(lengths),
        "seq_mean_token_mean": len(lengths) * own,
        "seq_mean_token_sum_norm": len(lengths) * LENGTH,
    }
    return LOSS_WEIGHTS[sample.agent] / denominator[case.aggregation]


def loss_by_hand(case: Case, samples: Sequence[Sample], model: PreTrainedModel, sample: Sample) -> Tensor:
    """The share of one sample in the update's loss."""
    ids, start = torch.tensor(sample.prompt_ids + sample.completion_ids), len(sample.prompt_ids)
    every = torch.log_softmax(model(input_ids=ids[None]).logits[0] / sample.temperature, -1)
    trained = sample.trained or (True,) * len(sample.completion_ids)
    kept = [i for i, counts in enumerate(trained) if counts]
    before = every[[start + i - 1 for i in kept]]  # what was said before each token

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(sample, name)[i] for i in kept], dtype=before.dtype)

    reply = Reply(
        new=before.gather(1, ids[start:][kept][:, None])[:, 0],
        entropy=-(before.exp() * before).sum(-1),
        sampler=column("behaviour"),
        start=column("proximal"),
        reference=column("reference"),
        advantage=column("advantages"),
    )
    return case.by_hand(reply).sum() * weight_by_hand(case, sample, samples)


def jobs(places: Sequence[Place], cases: Sequence[Case], folder: Path) -> list[ranks.Job]:
    """What measures `cases` under every place, into `folder`."""
    made = []
    for family in {place.family for place in places}:
        reference.make_model(family, folder / f"objective_{family}", layers=LAYERS)
    for number, place in enumerate(places):
        spec = ranks.spec_of(str(folder / f"objective_{place.family}"), lr=0.0, **place.layout)
        sizes = {name: size for name, size in place.layout.items() if name in ("tp", "pp", "cp", "dp", "ep")}
        samples = drawn(reference.make_model(place.family, folder / "drawn", layers=LAYERS), place.deep)
        fed = [(case.objective, _of(case, samples)) for case in cases]
        arguments = {"spec": spec, "out": folder / f"objective_{number}", "place": place, "fed": fed}
        made.append(ranks.Job(function=_update, arguments=arguments, **sizes))
    return made


def _update(
    rank: int, spec: TrainerSpec, out: Path, place: Place, fed: Sequence[tuple[Objective, list[Sample]]]
) -> None:
    """An update for each objective, at a learning rate of 0: every one starts from the same weights."""
    trainer = MegatronTrainer(spec)
    found = []
    for objective, samples in fed:
        trainer._pipeline._spec = replace(spec, objective=objective)
        metrics = trainer.update(FEEDS[place.feed](samples, place.max_tokens, CostModel.of(spec)))
        gradients = {name: gradient.clone() for name, gradient in trainer.gradients()}
        found.append({"metrics": metrics, "gradients": gradients})
    out.mkdir(exist_ok=True)
    (out / f"metrics_{rank}.json").write_text(json.dumps([own["metrics"] for own in found]))
    if rank == 0:
        torch.save([own["gradients"] for own in found], out / "gradients.pt")


def expected(
    places: Sequence[Place], cases: Sequence[Case], folder: Path
) -> dict[tuple[tuple[str, bool], str], Expected]:
    """Every case by hand, in float64 and in float32, by task and name."""
    found = {}
    for family, deep in dict.fromkeys(place.task for place in places):
        model = reference.make_model(family, folder / "by_hand", layers=LAYERS)
        samples = drawn(model, deep)
        for case in cases:
            loss_of = partial(loss_by_hand, case, samples)
            found[(family, deep), case.name] = expect(model, samples, 1, 0.0, loss_of)
    return found


def measure(
    places: Sequence[Place], cases: Sequence[Case], folder: Path
) -> dict[tuple[str, str], tuple[Errors, Errors]]:
    """By place and case, how far what `jobs` left in `folder` is from the formulas, and plain float32 in any case."""
    want = expected(places, cases, folder)
    plain = {place.task: largest(of.own for (task, _), of in want.items() if task == place.task) for place in places}
    found = {}
    for number, place in enumerate(places):
        out = folder / f"objective_{number}"
        texts = {path.read_text() for path in out.glob("metrics_*.json")}
        assert len(texts) == 1, f"{place.name}: ranks report different metrics"
        gradients = torch.load(out / "gradients.pt", weights_only=True)
        for case, metrics, own in zip(cases, json.loads(texts.pop()), gradients, strict=True):
            of = want[place.task, case.name]
            row = {
                "loss": sum(metrics[f"agent/{agent}/loss"] for agent in LOSS_WEIGHTS),
                "norm": metrics["grad_norm"],
                "agent_norm": {agent: metrics[f"agent/{agent}/grad_norm"] for agent in LOSS_WEIGHTS},
                "gradients": own,
                "parameters": of.steps[0]["parameters"],  # at a learning rate of 0 nothing moves
            }
            found[place.name, case.name] = errors([row], of.steps), plain[place.task]
    return found


TABLE = """
## The RL objective

An update of every objective under every layout here, against the same formulas written out by hand, reply by reply, on
the Hugging Face model: `tests/exactness/objectives.py` takes none from the product. Log-probabilities of sampler, start
of the step and reference are 0.4 to 0.5 nats off the policy's, so clips, masks and truncations are met; KL coefficient
{kl}, entropy {entropy}, loss weights 1 and 0.5. Errors are as above, and the bounds are 4 times
plain float32's largest ones over all objectives on the same model and samples. Each row has the largest errors, and the
largest share of its bound that an error takes up.

| layout | ranks | loss | norm | agent norms | gradients | share of the bound |
|---|---|---|---|---|---|---|
"""
BY_CASE = """
| objective | loss | norm | agent norms | gradients | share of the bound |
|---|---|---|---|---|---|
"""


def share(got: Errors, own: Errors) -> float:
    """The largest error as a share of its bound."""
    return max(error / bound(asdict(own)[name]) for name, error in asdict(got).items())


def section(places: Sequence[Place], cases: Sequence[Case], found: dict[tuple[str, str], tuple[Errors, Errors]]) -> str:
    """The page's section."""

    def numbers(rows: Sequence[Errors]) -> str:
        worst = asdict(largest(rows))
        return " | ".join(f"{worst[name]:.1e}" for name in ("loss", "norm", "agent_norms", "gradients"))

    text = TABLE.format(kl=KL, entropy=ENTROPY)
    for place in places:
        rows = [found[place.name, case.name] for case in cases]
        processes = ranks.spec_of("", **place.layout).ranks
        text += f"| {place.name} | {processes} | {numbers([got for got, _ in rows])} | "
        text += f"{max(share(*row) for row in rows):.2f} |\n"
    text += BY_CASE
    for case in cases:
        rows = [found[place.name, case.name] for place in places]
        text += f"| {case.name} | {numbers([got for got, _ in rows])} | {max(share(*row) for row in rows):.2f} |\n"
    return text
