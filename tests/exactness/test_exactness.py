"""Layouts and feeds reproduce plain torch on a Hugging Face model: loss, gradients, norms, parameters."""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mcore_mas.credit.samples import Sample
from mcore_mas.equations.divergence import CORRECTIONS, KL_ESTIMATES
from mcore_mas.equations.losses import AGGREGATIONS, LOSSES, Objective, ValueObjective
from tests.exactness import objectives
from tests.exactness.formulas import CASES, VALUE_CASES, Case
from tests.exactness.repeats import REPEATS, jobs, same
from tests.exactness.rows import ROWS, Row
from tests.exactness.training import STEPS, Measured, measure, run
from tests.support import precision, ranks, reference

CI = [row for row in ROWS if row.ci]
CI_REPEATS = [repeat for repeat in REPEATS if repeat.ci]
CI_PLACES = [place for place in objectives.PLACES if place.ci]
CI_CASES = [case for case in (*CASES, *VALUE_CASES) if case.ci]
PPO, KL, TIS, VALUE = (
    next(case for case in CI_CASES if case.name == name)
    for name in (
        "PPO, lower and upper clip",
        "PPO, k3, entropy, constant length",
        "PPO, TIS",
        "value loss, clip",
    )
)


def mistaken(case: Case, name: str, **options: float) -> Case:
    """A case whose trainer is given other options of the loss than the formula has."""
    objective = replace(case.objective, options={**case.objective.options, **options})
    return replace(case, name=name, objective=objective)


DEFECTS = [
    mistaken(PPO, "upper clip 1 % wider", clip_high=0.28 * 1.01),
    mistaken(PPO, "lower clip 1 % wider", clip_low=0.2 * 1.01),
    replace(KL, name="KL coefficient 1 % larger", kl=KL.kl * 1.01),
    replace(KL, name="entropy bonus 1 % larger", entropy=KL.entropy * 1.01),
    replace(KL, name="another KL", objective=replace(KL.objective, kl="k2")),
    replace(TIS, name="no correction", objective=replace(TIS.objective, correction="none")),
    replace(
        TIS,
        name="correction 1 % wider",
        objective=replace(TIS.objective, correction_options={"high": 1.5 * 1.01}),
    ),
    replace(VALUE, name="the critic's clip 1 % wider", objective=ValueObjective(clip=0.2 * 1.01)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every row came to."""
    folder: Path = tmp_path_factory.mktemp("rows")
    lived = ranks.Job(
        function=ranks.repeat_steps,
        arguments={
            "spec": ranks.make_spec(str(folder / "qwen2"), dp=2, distributed_optimizer=True),
            "out": folder / "lived",
            "samples": reference.make_samples(),
            "steps": 5,
        },
        dp=2,
    )
    update = objectives.jobs(CI_PLACES, [*CI_CASES, *DEFECTS], folder)
    run(CI, folder, [*jobs(CI_REPEATS, folder), *update, lived])
    return folder


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, Measured]:
    """Every row's errors by name."""
    return {row.name: measured for row, measured in zip(CI, measure(CI, folder), strict=True)}


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("row", CI, ids=lambda row: row.name)
def test_a_row_is_exact(measured: dict[str, Measured], row) -> None:
    print(measured[row.name])
    assert not measured[row.name].beyond


@pytest.mark.multirank
@pytest.mark.slow
def test_a_repeated_and_a_resumed_training_come_to_the_same_bits(folder: Path) -> None:
    assert same(CI_REPEATS, folder) == [(True, True)] * len(CI_REPEATS)


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[tuple[str, str], objectives.Found]:
    """Every objective by layout and name."""
    rows = objectives.measure(CI_PLACES, [*CI_CASES, *DEFECTS], folder)
    return {(row.place.name, row.case.name): row for row in rows}


def fitting(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """The layouts, each with those of the cases that are of its model."""
    pairs = [(place, case) for place in CI_PLACES for case in cases if objectives.fits(case, place)]
    ids = [f"{case.name} under {place.name}" for place, case in pairs]
    return pytest.mark.parametrize(("place", "case"), pairs, ids=ids)


@pytest.mark.multirank
@pytest.mark.slow
@fitting(CI_CASES)
def test_an_objective_is_exact(
    found: dict[tuple[str, str], objectives.Found], place: Row, case: Case
) -> None:
    print(found[place.name, case.name])
    assert not found[place.name, case.name].beyond


@pytest.mark.multirank
@pytest.mark.slow
@fitting(DEFECTS)
def test_another_objective_is_refused(
    found: dict[tuple[str, str], objectives.Found], place: Row, case: Case
) -> None:
    print(found[place.name, case.name])
    assert found[place.name, case.name].beyond


def test_every_objective_is_measured() -> None:
    objectives_of = [case.objective for case in CASES if isinstance(case.objective, Objective)]
    assert {objective.loss for objective in objectives_of} == LOSSES.keys() - {
        "cross_entropy"
    }  # all rows' loss
    assert {objective.correction for objective in objectives_of} == CORRECTIONS.keys()
    assert {objective.kl for objective in objectives_of} == KL_ESTIMATES.keys()
    assert {case.aggregation for case in CASES} == AGGREGATIONS.keys()


@pytest.mark.multirank
@pytest.mark.slow
def test_ranks_collect_no_threads(folder: Path) -> None:
    for counts in json.loads((folder / "threads.json").read_text()):
        assert max(counts) <= counts[0] + 2, counts
    for rank in range(2):  # of a trainer that lives on, step by step
        counts = json.loads((folder / "lived" / f"threads_{rank}.json").read_text())
        assert max(counts[1:]) == counts[1], counts


def scaled(history: list[dict[str, Any]]) -> None:
    """One tensor's gradient is 1 + 1e-4 times what it should be."""
    history[-1]["gradients"]["model.layers.1.mlp.up_proj.weight"] *= 1 + 1e-4


def counted_twice(history: list[dict[str, Any]]) -> None:
    """An agent's loss is off by a ten-thousandth."""
    history[0]["loss"] *= 1 + 1e-4


def stale(history: list[dict[str, Any]]) -> None:
    """The last step left one tensor as it was."""
    name = "model.layers.3.self_attn.q_proj.weight"
    history[-1]["parameters"][name] = history[-2]["parameters"][name]


def without_a_token(samples: list[Sample]) -> list[Sample]:
    """The last token of the longest reply is not trained."""
    longest = max(samples, key=lambda sample: len(sample.completion_ids))
    trained = list(longest.trained or (True,) * len(longest.completion_ids))
    trained[-1] = False
    return [
        replace(sample, trained=tuple(trained)) if sample is longest else sample
        for sample in samples
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return reference.make_model("qwen2", tmp_path_factory.mktemp("model"), layers=4)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> precision.Expected:
    """What the model comes to in plain torch."""
    return precision.expect(model, reference.make_samples(), STEPS, ranks.LR)


@pytest.fixture(scope="module")
def trained(model: PreTrainedModel) -> list[dict[str, Any]]:
    """What it comes to in float32; it is not to be changed."""
    return reference.train(copy.deepcopy(model), reference.make_samples(), STEPS, ranks.LR)


def test_plain_float32_is_within_the_bound(
    expected: precision.Expected, trained: list[dict[str, Any]]
) -> None:
    assert not precision.errors(trained, expected.steps).exceeded(expected.float32)


@pytest.mark.parametrize(
    ("defect", "found"),
    [(scaled, {"gradients"}), (counted_twice, {"loss"}), (stale, {"parameters"})],
)
def test_a_defect_is_beyond_the_bound(
    expected: precision.Expected,
    trained: list[dict[str, Any]],
    defect: Callable[[list[dict[str, Any]]], None],
    found: set[str],
) -> None:
    history = copy.deepcopy(trained)
    defect(history)
    assert set(precision.errors(history, expected.steps).exceeded(expected.float32)) == found


def test_a_dropped_token_is_beyond_every_bound(
    model: PreTrainedModel, expected: precision.Expected
) -> None:
    history = reference.train(
        copy.deepcopy(model), without_a_token(reference.make_samples()), STEPS, ranks.LR
    )
    found = precision.errors(history, expected.steps)
    assert set(found.exceeded(expected.float32)) == {
        "loss",
        "norm",
        "agent_norms",
        "gradients",
        "parameters",
    }, found
    assert found.gradients > 100 * precision.bound(expected.float32.gradients)


def test_the_bound_is_never_below_one_rounding() -> None:
    assert precision.bound(0.0) == 4 * torch.finfo(torch.float32).eps
    assert precision.bound(1e-6) == 4e-6
