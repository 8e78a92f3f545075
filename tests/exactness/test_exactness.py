"""Rows and objectives compared with plain torch on a Hugging Face model: loss, gradients, norms, parameters."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mcore_mas.credit.samples import Sample
from mcore_mas.equations.corrections import CORRECTIONS
from mcore_mas.equations.kl import KL_ESTIMATES
from mcore_mas.equations.losses import AGGREGATIONS, LOSSES, Objective
from tests.exactness.formulas import CASES, VALUE_CASES, Case
from tests.exactness.objectives import (
    OBJECTIVE_ROWS,
    ObjectiveMeasurement,
    fitting_cases,
    measure_objectives,
    objective_jobs,
)
from tests.exactness.repeats import REPEATED_ROWS, compare_repeats, repeat_jobs
from tests.exactness.rows import BALANCE, ROWS, Row
from tests.exactness.training import TESTED_STEPS, Measurement, measure_rows, train_rows
from tests.support import precision, ranks, reference

ROOT = Path(__file__).resolve().parents[2]
TESTED_ROWS = [row for row in ROWS if row.tested]
TESTED_REPEATS = [row for row in REPEATED_ROWS if row.tested]
TESTED_OBJECTIVE_ROWS = [row for row in OBJECTIVE_ROWS if row.tested]
TESTED_CASES = [case for case in (*CASES, *VALUE_CASES) if case.tested]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all rows, repeats and objectives; return the folder with the results."""
    folder: Path = tmp_path_factory.mktemp("rows")
    long_training = ranks.Job(
        function=ranks.repeat_steps,
        arguments={
            "spec": ranks.make_spec(str(folder / "qwen2"), dp=2, distributed_optimizer=True),
            "out": folder / "long_training",
            "samples": reference.make_samples(),
            "steps": 5,
        },
        dp=2,
    )
    other_jobs = [
        *repeat_jobs(TESTED_REPEATS, folder),
        *objective_jobs(TESTED_OBJECTIVE_ROWS, TESTED_CASES, folder),
        long_training,
    ]
    train_rows(TESTED_ROWS, folder, other_jobs, TESTED_STEPS)
    return folder


@pytest.fixture(scope="module")
def measurements(folder: Path) -> dict[str, Measurement]:
    """Return the errors of each row, by name."""
    results = measure_rows(TESTED_ROWS, folder, TESTED_STEPS)
    return {row.name: result for row, result in zip(TESTED_ROWS, results, strict=True)}


@pytest.fixture(scope="module")
def objective_measurements(folder: Path) -> dict[tuple[str, str], ObjectiveMeasurement]:
    """Return the errors of each objective, by the names of row and case."""
    results = measure_objectives(TESTED_OBJECTIVE_ROWS, TESTED_CASES, folder)
    return {(result.row.name, result.case.name): result for result in results}


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("row", TESTED_ROWS, ids=lambda row: row.name)
def test_a_row_is_exact(measurements: dict[str, Measurement], row: Row) -> None:
    print(measurements[row.name])
    assert not measurements[row.name].excessive


@pytest.mark.multirank
@pytest.mark.slow
def test_repeated_and_resumed_trainings_have_the_same_bits(folder: Path) -> None:
    for result in compare_repeats(TESTED_REPEATS, folder):
        assert result.repeated
        assert result.resumed


FITTING_PAIRS = [
    (row, case) for row in TESTED_OBJECTIVE_ROWS for case in fitting_cases(TESTED_CASES, row)
]


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "case"),
    FITTING_PAIRS,
    ids=[f"{case.name} in layout {row.name}" for row, case in FITTING_PAIRS],
)
def test_an_objective_is_exact(
    objective_measurements: dict[tuple[str, str], ObjectiveMeasurement], row: Row, case: Case
) -> None:
    measurement = objective_measurements[row.name, case.name]
    print(measurement)
    assert not measurement.excessive


def test_the_page_has_every_row_and_the_readme_their_number() -> None:
    lines = (ROOT / "docs" / "exactness.md").read_text().splitlines()
    named = {line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")}
    assert named >= {row.name for row in ROWS}
    assert f"In {len(ROWS)} combinations" in (ROOT / "README.md").read_text()


def test_every_objective_has_a_formula() -> None:
    objectives = [case.objective for case in CASES if isinstance(case.objective, Objective)]
    # Cross-entropy is the loss of all rows.
    assert {objective.loss for objective in objectives} == LOSSES.keys() - {"cross_entropy"}
    assert {objective.correction for objective in objectives} == CORRECTIONS.keys()
    assert {objective.kl for objective in objectives} == KL_ESTIMATES.keys()
    assert {case.aggregation for case in CASES} == AGGREGATIONS.keys()


@pytest.mark.multirank
@pytest.mark.slow
def test_ranks_do_not_accumulate_threads(folder: Path) -> None:
    """Count the threads of each rank after each layout, and after each step of a long training."""
    for counts in json.loads((folder / "threads.json").read_text()):
        assert max(counts) <= counts[0] + 2, counts
    for rank in range(2):
        counts = json.loads((folder / "long_training" / f"threads_{rank}.json").read_text())
        assert max(counts[1:]) == counts[1], counts


def scale_a_gradient(history: list[dict[str, Any]]) -> None:
    """Scale the gradient of one tensor in the last step."""
    history[-1]["gradients"]["model.layers.1.mlp.up_proj.weight"] *= 1 + 1e-4


def scale_a_loss(history: list[dict[str, Any]]) -> None:
    """Scale the loss of the first step."""
    history[0]["loss"] *= 1 + 1e-4


def undo_a_step(history: list[dict[str, Any]]) -> None:
    """Undo the last step of one tensor."""
    name = "model.layers.3.self_attn.q_proj.weight"
    history[-1]["parameters"][name] = history[-2]["parameters"][name]


def without_last_token_of_longest(samples: list[Sample]) -> list[Sample]:
    """Return the samples, with the last token of the longest reply not trained."""
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
    """Return the training of the model in plain torch, in float64 and in float32."""
    return precision.expect(model, reference.make_samples(), TESTED_STEPS, ranks.LR)


@pytest.fixture(scope="module")
def float32_history(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return the training of the model in float32; tests must not change it."""
    return reference.train(copy.deepcopy(model), reference.make_samples(), TESTED_STEPS, ranks.LR)


def test_plain_float32_is_within_the_bound(
    expected: precision.Expected, float32_history: list[dict[str, Any]]
) -> None:
    assert not precision.errors(float32_history, expected.steps).exceeded(expected.float32)


@pytest.mark.parametrize(
    ("change", "excessive"),
    [
        (scale_a_gradient, {"gradients"}),
        (scale_a_loss, {"loss"}),
        (undo_a_step, {"parameters"}),
    ],
)
def test_a_defect_exceeds_the_bound(
    expected: precision.Expected,
    float32_history: list[dict[str, Any]],
    change: Callable[[list[dict[str, Any]]], None],
    excessive: set[str],
) -> None:
    history = copy.deepcopy(float32_history)
    change(history)
    assert set(precision.errors(history, expected.steps).exceeded(expected.float32)) == excessive


def test_a_dropped_token_exceeds_every_bound(
    model: PreTrainedModel, expected: precision.Expected
) -> None:
    samples = without_last_token_of_longest(reference.make_samples())
    history = reference.train(copy.deepcopy(model), samples, TESTED_STEPS, ranks.LR)
    errors = precision.errors(history, expected.steps)
    assert set(errors.exceeded(expected.float32)) == {
        "loss",
        "norm",
        "agent_norms",
        "gradients",
        "parameters",
    }
    assert errors.gradients > 100 * precision.bound(expected.float32.gradients)


def test_a_gradient_that_is_not_balanced_exceeds_the_bound(
    model: PreTrainedModel, float32_history: list[dict[str, Any]]
) -> None:
    balanced = precision.expect(model, reference.make_samples(), 1, ranks.LR, balance=BALANCE)
    errors = precision.errors(float32_history[:1], balanced.steps)
    # Loss and agents' norms are those of the first weights, which are equal.
    assert set(errors.exceeded(balanced.float32)) == {"norm", "gradients", "parameters"}


def test_the_bound_is_at_least_one_rounding() -> None:
    assert precision.bound(0.0) == 4 * torch.finfo(torch.float32).eps
    assert precision.bound(1e-6) == 4e-6
