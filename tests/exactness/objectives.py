"""Every objective under every kind of layout, against its formula on a plain Hugging Face model in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mcore_mas.credit.samples import Sample, weigh
from mcore_mas.equations.losses import Objective, ValueObjective
from mcore_mas.megatron.batch import CostModel
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.exactness.formulas import ENTROPY, KL, LENGTH, LOSS_WEIGHTS, Case, loss_by_hand
from tests.exactness.rows import FEEDS, PROJECTIONS, Row
from tests.exactness.training import job_of, model_of, write_models
from tests.support import ranks, reference
from tests.support.gradients import full_gradients
from tests.support.precision import Errors, Expected, bound, errors, expect, largest

_SHARDED = {"tp": 2, "sp": True}
_ATTENTION = ("q", "k", "v", "o")

PLACES = (
    Row(name="one rank"),
    Row(name="nothing shared", feed="linear", max_tokens=1000, ci=False),
    Row(name="TP2 + SP", layout=_SHARDED),
    Row(name="PP2", layout={"pp": 2}, ci=False),
    Row(name="CP2", layout={"cp": 2}, max_tokens=1000, ci=False),
    Row(
        name="DP2 + distributed optimizer",
        layout={"dp": 2, "distributed_optimizer": True},
        ci=False,
    ),
    Row(name="TP2 × PP2 + SP", layout={**_SHARDED, "pp": 2}, ci=False),
    Row(name="CP2 × DP2", layout={"cp": 2, "dp": 2}, ci=False),
    Row(name="Qwen3-MoE, DP2 × EP2", family="qwen3_moe", layout={"dp": 2, "ep": 2}, ci=False),
    Row(name="trees of depth 3", deep=True, max_tokens=64, ci=False),
    Row(name="trees of depth 3, TP2 + SP", deep=True, max_tokens=64, layout=_SHARDED, ci=False),
    Row(
        name="trees of depth 3, PP2 × DP2",
        deep=True,
        max_tokens=64,
        layout={"pp": 2, "dp": 2},
        ci=False,
    ),
    Row(name="LoRA", lora=PROJECTIONS, ci=False),
    Row(name="LoRA, TP2 + SP", lora=PROJECTIONS, layout=_SHARDED),
    Row(name="LoRA, CP2", lora=PROJECTIONS, layout={"cp": 2}, max_tokens=1000, ci=False),
    Row(name="LoRA, PP2 × DP2", lora=PROJECTIONS, layout={"pp": 2, "dp": 2}, ci=False),
    Row(name="LoRA, trees of depth 3", lora=PROJECTIONS, deep=True, max_tokens=64, ci=False),
    Row(
        name="Qwen3-MoE, LoRA on q, k, v, o, DP2 × EP2",
        family="qwen3_moe",
        lora=_ATTENTION,
        layout={"dp": 2, "ep": 2},
        ci=False,
    ),
    Row(name="critic", critic=True, ci=False),
    Row(name="critic, TP2 + SP", critic=True, layout=_SHARDED),
    Row(name="critic, CP2", critic=True, layout={"cp": 2}, max_tokens=1000, ci=False),
    Row(name="critic, PP2 × DP2", critic=True, layout={"pp": 2, "dp": 2}, ci=False),
    Row(name="critic, trees of depth 3", critic=True, deep=True, max_tokens=64, ci=False),
    Row(
        name="Qwen3-MoE critic, DP2 × EP2",
        family="qwen3_moe",
        critic=True,
        layout={"dp": 2, "ep": 2},
        ci=False,
    ),
    Row(name="LoRA critic, TP2 + SP", lora=PROJECTIONS, critic=True, layout=_SHARDED, ci=False),
)


def fits(case: Case, place: Row) -> bool:
    """Whether the objective is one of the place's model: a critic has its own."""
    return isinstance(case.objective, ValueObjective) == place.critic


def drawn(model: PreTrainedModel, place: Row) -> list[Sample]:
    """The suite's samples with signals around what the model says, so that clips, both ways, and masks are met.

    Log-probabilities some tenths of nats apart and random advantages; of a critic, old values and returns.
    """
    generator = torch.Generator().manual_seed(1)
    score = reference.values_of if place.critic else reference.logprobs_of
    found = []
    for number, sample in enumerate(
        reference.make_deep_samples() if place.deep else reference.make_samples()
    ):
        with torch.no_grad():
            near = score(model, sample).nan_to_num()

        def noisy(scale: float, near: torch.Tensor = near) -> tuple[float, ...]:
            return tuple(
                (near + scale * torch.randn(len(near), generator=generator)).float().tolist()
            )

        if place.critic:
            found.append(replace(sample, values=noisy(0.2), returns=noisy(0.5)))
            continue
        size = 0.5 + float(torch.randn(1, generator=generator).abs())
        advantage = size * (
            -2.0 if number % 2 else 1.0
        )  # of both signs, whose losses do not cancel
        columns = {"behaviour": noisy(0.4), "proximal": noisy(0.4), "reference": noisy(0.5)}
        found.append(replace(sample, **columns, advantages=(advantage,) * len(near)))
    return found


def _of(case: Case, samples: Sequence[Sample]) -> list[Sample]:
    """The samples as the product's trainer is fed them."""
    proximal = {} if case.proximal else {"proximal": None}
    coefficients = {"kl_coef": case.kl, "entropy_coef": case.entropy} | proximal
    norm = LENGTH if case.aggregation.endswith("norm") else None
    return weigh(
        [replace(s, **coefficients) for s in samples], LOSS_WEIGHTS, case.aggregation, norm
    )


def jobs(places: Sequence[Row], cases: Sequence[Case], folder: Path) -> list[ranks.Job]:
    """What measures under every place those of the cases that fit it, into `folder`."""
    write_models(places, folder)
    made, signals = [], {}
    for number, place in enumerate(places):
        if place.task not in signals:
            signals[place.task] = drawn(model_of(place, folder), place)
        fed = [
            (case.objective, _of(case, signals[place.task])) for case in cases if fits(case, place)
        ]
        made.append(
            job_of(place, folder, _update, {"out": folder / f"objective_{number}", "fed": fed})
        )
    return made


def _update(
    rank: int,
    spec: TrainerSpec,
    row: Row,
    out: Path,
    fed: Sequence[tuple[Objective | ValueObjective, list[Sample]]],
) -> None:
    """An update for each objective, at a learning rate of 0: every one starts from the same weights."""
    trainer = MegatronTrainer(replace(spec, lr=0.0))
    found = []
    for objective, samples in fed:
        trainer._pipeline._spec = replace(trainer._pipeline._spec, objective=objective)
        metrics = trainer.update(FEEDS[row.feed](samples, row.max_tokens, CostModel.of(spec)))
        gradients = {name: gradient.clone() for name, gradient in full_gradients(trainer)}
        found.append({"metrics": metrics, "gradients": gradients})
    out.mkdir(exist_ok=True)
    (out / f"metrics_{rank}.json").write_text(json.dumps([own["metrics"] for own in found]))
    if rank == 0:
        torch.save([own["gradients"] for own in found], out / "gradients.pt")


@dataclass(frozen=True, kw_only=True)
class Found:
    """An objective under a layout."""

    place: Row
    case: Case
    errors: Errors
    own: Errors  # plain float32's largest over all objectives on the same model and samples

    @property
    def beyond(self) -> dict[str, str]:
        """What is further off than allowed: the error and the bound by name."""
        return self.errors.exceeded(self.own)

    @property
    def share(self) -> float:
        """The largest error as a share of its bound."""
        return max(
            error / bound(asdict(self.own)[name]) for name, error in asdict(self.errors).items()
        )


def expected(place: Row, cases: Sequence[Case], folder: Path) -> dict[str, Expected]:
    """Every case that fits by hand, in float64 and in float32, by name."""
    model = model_of(place, folder)
    samples = drawn(model, place)
    return {
        case.name: expect(model, samples, 1, 0.0, partial(loss_by_hand, case, samples))
        for case in cases
        if fits(case, place)
    }


def measure(places: Sequence[Row], cases: Sequence[Case], folder: Path) -> list[Found]:
    """How far what `jobs` left in `folder` is from the formulas.

    Raises:
        AssertionError: the ranks of a layout do not report the same metrics, or not the reference's tensors.
    """
    want = {
        place.task: expected(place, cases, folder)
        for place in {place.task: place for place in places}.values()
    }
    found = []
    for number, place in enumerate(places):
        out = folder / f"objective_{number}"
        texts = {path.read_text() for path in out.glob("metrics_*.json")}
        assert len(texts) == 1, f"{place.name}: ranks report different metrics"
        gradients = torch.load(out / "gradients.pt", weights_only=True)
        own = largest(by_hand.float32 for by_hand in want[place.task].values())
        fitting = [case for case in cases if fits(case, place)]
        for case, metrics, tensors in zip(fitting, json.loads(texts.pop()), gradients, strict=True):
            steps = want[place.task][case.name].steps
            got = {
                "loss": sum(metrics[f"agent/{agent}/loss"] for agent in LOSS_WEIGHTS),
                "norm": metrics["grad_norm"],
                "agent_norm": {
                    agent: metrics[f"agent/{agent}/grad_norm"] for agent in LOSS_WEIGHTS
                },
                "gradients": tensors,
                "parameters": steps[0]["parameters"],  # at a learning rate of 0 nothing moves
            }
            found.append(Found(place=place, case=case, errors=errors([got], steps), own=own))
    return found


TABLE = """
## The objectives of policy and critic

Every objective makes an update under every layout here. The same formulas are written out by hand, reply by reply, on
the Hugging Face model: `tests/exactness/formulas.py` takes none from the product. Log-probabilities of sampler, start
of the step and reference are 0.4 to 0.5 nats off the policy's. Old values are 0.2 and returns 0.5 off the critic's.
So clips, masks and truncations are met. The KL coefficient is {kl}, that of entropy {entropy}, and loss weights are 1
and 0.5. Errors are as above. The bounds are 4 times plain float32's largest errors, over all objectives on the same
model and samples. Each row has the largest errors, and the largest share of its bound that an error takes up.

| layout | ranks | loss | norm | agent norms | gradients | share of the bound |
|---|---|---|---|---|---|---|
"""
BY_CASE = """
| objective | loss | norm | agent norms | gradients | share of the bound |
|---|---|---|---|---|---|
"""


def section(found: Sequence[Found]) -> str:
    """The page's section."""

    def line(first: str, rows: Sequence[Found]) -> str:
        worst = asdict(largest(row.errors for row in rows))
        numbers = " | ".join(
            f"{worst[name]:.1e}" for name in ("loss", "norm", "agent_norms", "gradients")
        )
        return f"| {first} | {numbers} | {max(row.share for row in rows):.2f} |\n"

    text = TABLE.format(kl=KL, entropy=ENTROPY)
    for place in {row.place.name: row.place for row in found}.values():
        text += line(f"{place.name} | {place.ranks}", [row for row in found if row.place is place])
    text += BY_CASE
    for name in dict.fromkeys(row.case.name for row in found):
        text += line(name, [row for row in found if row.case.name == name])
    return text
