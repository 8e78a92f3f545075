"""Every objective in every kind of layout, against its formula on a plain Hugging Face model in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mcore_mas.credit.assign import add_teacher_advantages
from mcore_mas.credit.samples import Sample, weigh
from mcore_mas.equations.losses import Objective, ValueObjective
from mcore_mas.megatron.batch import CostModel
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.exactness.formulas import (
    ENTROPY,
    KL,
    LENGTH,
    LOSS_WEIGHTS,
    TEACHER,
    Case,
    loss_by_hand,
)
from tests.exactness.rows import FEEDS, PROJECTIONS, Row
from tests.exactness.training import losses_and_norms, make_job, make_model, write_models
from tests.support import ranks, reference
from tests.support.gradients import full_gradients
from tests.support.precision import Errors, Expected, bound, errors, expect, largest

_TP_SP = {"tp": 2, "sp": True}
_ATTENTION = ("q", "k", "v", "o")

OBJECTIVE_ROWS = (
    Row(name="one rank"),
    Row(name="nothing shared", feed="linear", max_tokens=1000, tested=False),
    Row(name="TP2 + SP", layout=_TP_SP),
    Row(name="PP2", layout={"pp": 2}, tested=False),
    Row(name="CP2", layout={"cp": 2}, max_tokens=1000, tested=False),
    Row(
        name="DP2 + distributed optimizer",
        layout={"dp": 2, "distributed_optimizer": True},
        tested=False,
    ),
    Row(name="TP2 × PP2 + SP", layout={**_TP_SP, "pp": 2}, tested=False),
    Row(name="CP2 × DP2", layout={"cp": 2, "dp": 2}, tested=False),
    Row(name="Qwen3-MoE, DP2 × EP2", family="qwen3_moe", layout={"dp": 2, "ep": 2}, tested=False),
    Row(name="trees of depth 3", deep=True, max_tokens=64, tested=False),
    Row(name="trees of depth 3, TP2 + SP", deep=True, max_tokens=64, layout=_TP_SP, tested=False),
    Row(
        name="trees of depth 3, PP2 × DP2",
        deep=True,
        max_tokens=64,
        layout={"pp": 2, "dp": 2},
        tested=False,
    ),
    Row(name="LoRA", lora=PROJECTIONS, tested=False),
    Row(name="LoRA, TP2 + SP", lora=PROJECTIONS, layout=_TP_SP, tested=False),
    Row(name="LoRA, CP2", lora=PROJECTIONS, layout={"cp": 2}, max_tokens=1000, tested=False),
    Row(name="LoRA, PP2 × DP2", lora=PROJECTIONS, layout={"pp": 2, "dp": 2}, tested=False),
    Row(name="LoRA, trees of depth 3", lora=PROJECTIONS, deep=True, max_tokens=64, tested=False),
    Row(
        name="Qwen3-MoE, LoRA on q, k, v, o, DP2 × EP2",
        family="qwen3_moe",
        lora=_ATTENTION,
        layout={"dp": 2, "ep": 2},
        tested=False,
    ),
    Row(name="critic", critic=True, tested=False),
    Row(name="critic, TP2 + SP", critic=True, layout=_TP_SP),
    Row(name="critic, CP2", critic=True, layout={"cp": 2}, max_tokens=1000, tested=False),
    Row(name="critic, PP2 × DP2", critic=True, layout={"pp": 2, "dp": 2}, tested=False),
    Row(name="critic, trees of depth 3", critic=True, deep=True, max_tokens=64, tested=False),
    Row(
        name="Qwen3-MoE critic, DP2 × EP2",
        family="qwen3_moe",
        critic=True,
        layout={"dp": 2, "ep": 2},
        tested=False,
    ),
    Row(name="LoRA critic, TP2 + SP", lora=PROJECTIONS, critic=True, layout=_TP_SP, tested=False),
)


def fits(case: Case, row: Row) -> bool:
    """Return True if the objective is one of the row's model: a critic or a policy."""
    return isinstance(case.objective, ValueObjective) == row.critic


def fitting_cases(cases: Sequence[Case], row: Row) -> list[Case]:
    """Return the cases that fit a row."""
    return [case for case in cases if fits(case, row)]


def samples_near_model(model: PreTrainedModel, row: Row) -> list[Sample]:
    """Return the reference samples with columns that are the results of the model plus noise.

    The noise of log-probabilities is some tenths of a nat, so that clips in both directions and
    masks take effect. Advantages are random. For a critic, old values and returns are near its
    values.
    """
    generator = torch.Generator().manual_seed(1)
    teacher_generator = torch.Generator().manual_seed(2)
    compute = reference.values_of if row.critic else reference.logprobs_of
    plain_samples = reference.make_deep_samples() if row.deep else reference.make_samples()

    def with_noise(values: torch.Tensor, scale: float) -> tuple[float, ...]:
        noise = scale * torch.randn(len(values), generator=generator)
        return tuple((values + noise).float().tolist())

    samples = []
    for number, sample in enumerate(plain_samples):
        with torch.no_grad():
            results = compute(model, sample).nan_to_num()
        if row.critic:
            values = with_noise(results, 0.2)
            returns = with_noise(results, 0.5)
            samples.append(replace(sample, values=values, returns=returns))
            continue

        # Advantages of both signs have different sizes, so that their losses do not cancel.
        size = 0.5 + float(torch.randn(1, generator=generator).abs())
        advantage = size * (-2.0 if number % 2 else 1.0)
        behaviour = with_noise(results, 0.4)
        proximal = with_noise(results, 0.4)
        reference_logprobs = with_noise(results, 0.5)
        teacher_noise = 0.5 * torch.randn(len(results), generator=teacher_generator)
        samples.append(
            replace(
                sample,
                behaviour=behaviour,
                proximal=proximal,
                reference=reference_logprobs,
                teacher=tuple((results + teacher_noise).float().tolist()),
                advantages=(advantage,) * len(results),
            )
        )
    return samples


def _weighed_samples(case: Case, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples as the trainer gets them for an objective."""
    teachers = {}
    if case.teacher is not None:
        teachers = {sample.policy: case.teacher for sample in samples}
    with_coefficients = [
        replace(
            sample,
            kl_coef=case.kl,
            entropy_coef=case.entropy,
            proximal=sample.proximal if case.proximal else None,
        )
        for sample in add_teacher_advantages(samples, teachers)
    ]
    length = LENGTH if case.aggregation.endswith("norm") else None
    return weigh(with_coefficients, LOSS_WEIGHTS, case.aggregation, length)


def objective_jobs(rows: Sequence[Row], cases: Sequence[Case], folder: Path) -> list[ranks.Job]:
    """Write the rows' models to `folder`, and return jobs that make an update for each case there."""
    write_models(rows, folder)
    jobs = []
    samples_of_task: dict[tuple[str, bool, bool], list[Sample]] = {}
    for number, row in enumerate(rows):
        if row.task not in samples_of_task:
            samples_of_task[row.task] = samples_near_model(make_model(row, folder), row)
        samples = samples_of_task[row.task]
        updates = [
            (case.objective, _weighed_samples(case, samples)) for case in fitting_cases(cases, row)
        ]
        arguments = {"out": folder / f"objective_{number}", "updates": updates}
        jobs.append(make_job(row, folder, _update, arguments))
    return jobs


def _update(
    rank: int,
    spec: TrainerSpec,
    row: Row,
    out: Path,
    updates: Sequence[tuple[Objective | ValueObjective, list[Sample]]],
) -> None:
    """Make an update for each objective; with a learning rate of 0, all start from the same weights.

    Every rank writes its metrics, and rank 0 writes the gradients.
    """
    trainer = MegatronTrainer(replace(spec, lr=0.0))
    all_metrics = []
    all_gradients = []
    for objective, samples in updates:
        trainer._pipeline._spec = replace(trainer._pipeline._spec, objective=objective)
        metrics = trainer.update(FEEDS[row.feed](samples, row.max_tokens, CostModel.of(spec)))
        all_metrics.append(metrics)
        all_gradients.append({name: tensor.clone() for name, tensor in full_gradients(trainer)})
    out.mkdir(exist_ok=True)
    (out / f"metrics_{rank}.json").write_text(json.dumps(all_metrics))
    if rank == 0:
        torch.save(all_gradients, out / "gradients.pt")


@dataclass(frozen=True, kw_only=True)
class ObjectiveMeasurement:
    """Errors of an objective in a layout against its formula in float64.

    Attributes:
        row: layout and model.
        case: the objective.
        errors: of the trainer.
        plain_errors: largest errors of plain float32, over all objectives on the same model and
            samples.
    """

    row: Row
    case: Case
    errors: Errors
    plain_errors: Errors

    @property
    def excessive(self) -> dict[str, str]:
        """Errors that are larger than allowed: error and bound, by name."""
        return self.errors.exceeded(self.plain_errors)

    @property
    def share_of_bound(self) -> float:
        """Largest error divided by its bound."""
        plain_errors = asdict(self.plain_errors)
        return max(error / bound(plain_errors[name]) for name, error in asdict(self.errors).items())


def _expected_updates(row: Row, cases: Sequence[Case], folder: Path) -> dict[str, Expected]:
    """Compute the update of each fitting case by hand, in float64 and in float32."""
    model = make_model(row, folder)
    samples = samples_near_model(model, row)
    return {
        case.name: expect(model, samples, 1, 0.0, partial(loss_by_hand, case, samples))
        for case in fitting_cases(cases, row)
    }


def measure_objectives(
    rows: Sequence[Row], cases: Sequence[Case], folder: Path
) -> list[ObjectiveMeasurement]:
    """Return the errors of each case in each row, from the results of `objective_jobs` in `folder`.

    Raises:
        AssertionError: the ranks of a row report different metrics, or the tensors are not those of
            the reference.
    """
    row_of_task = {row.task: row for row in rows}
    expected_of_task = {
        task: _expected_updates(row, cases, folder) for task, row in row_of_task.items()
    }
    measurements = []
    for number, row in enumerate(rows):
        out = folder / f"objective_{number}"
        texts = {path.read_text() for path in out.glob("metrics_*.json")}
        assert len(texts) == 1, f"{row.name}: ranks report different metrics"
        all_metrics = json.loads(texts.pop())
        all_gradients = torch.load(out / "gradients.pt", weights_only=True)

        expected = expected_of_task[row.task]
        plain_errors = largest(update.float32 for update in expected.values())
        for case, metrics, gradients in zip(
            fitting_cases(cases, row), all_metrics, all_gradients, strict=True
        ):
            steps = expected[case.name].steps
            # With a learning rate of 0 the parameters stay.
            unchanged = steps[0]["parameters"]
            result = losses_and_norms(metrics) | {"gradients": gradients, "parameters": unchanged}
            measurements.append(
                ObjectiveMeasurement(
                    row=row, case=case, errors=errors([result], steps), plain_errors=plain_errors
                )
            )
    return measurements


HEADER = """
## The objectives of policy and critic

Every objective makes an update under every layout here. Its formula is also written out by hand, reply by reply, on
the Hugging Face model: `tests/exactness/formulas.py` imports no formula of the product. The log-probabilities of the
sampler, of the start of the step, of the reference and of the teacher are the policy's plus random noise with a
standard deviation of 0.4 to 0.5 nats. Old values and returns are the critic's values plus noise with one of 0.2 and
0.5. Therefore clips, masks and truncations take effect. The KL coefficient is {kl}, the entropy coefficient {entropy},
that of the teacher {teacher}, and the loss weights are 1 and 0.5. Errors are as above. The bounds are 4 times plain
float32's largest errors, over all objectives on the same model and samples. Each row has the largest errors, and
the largest share of its bound that an error takes up.

| layout | ranks | loss | norm | agent norms | gradients | share of the bound |
|---|---|---|---|---|---|---|
"""
CASE_HEADER = """
| objective | loss | norm | agent norms | gradients | share of the bound |
|---|---|---|---|---|---|
"""


def objectives_section(measurements: Sequence[ObjectiveMeasurement]) -> str:
    """Return the section of docs/exactness.md."""
    text = HEADER.format(kl=KL, entropy=ENTROPY, teacher=TEACHER)
    row_by_name = {measurement.row.name: measurement.row for measurement in measurements}
    for name, row in row_by_name.items():
        of_row = [measurement for measurement in measurements if measurement.row is row]
        text += _table_line([name, str(row.ranks)], of_row)
    text += CASE_HEADER
    for name in dict.fromkeys(measurement.case.name for measurement in measurements):
        of_case = [measurement for measurement in measurements if measurement.case.name == name]
        text += _table_line([name], of_case)
    return text


def _table_line(first_cells: list[str], measurements: Sequence[ObjectiveMeasurement]) -> str:
    """Return a line with the largest errors."""
    worst = asdict(largest(measurement.errors for measurement in measurements))
    cells = [f"{worst[name]:.1e}" for name in ("loss", "norm", "agent_norms", "gradients")]
    share = max(measurement.share_of_bound for measurement in measurements)
    return f"| {' | '.join([*first_cells, *cells])} | {share:.2f} |\n"
