"""Layouts and feeds reproduce plain torch on a Hugging Face model: loss, gradients, norms, parameters."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_mas.credit.samples import Sample
from tests.exactness.repeats import REPEATS, jobs, same
from tests.exactness.rows import ROWS, STEPS, Measured, measure, run
from tests.support import precision, ranks, reference

CI = [row for row in ROWS if row.ci]
CI_REPEATS = [repeat for repeat in REPEATS if repeat.ci]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every row came to."""
    folder: Path = tmp_path_factory.mktemp("rows")
    run(CI, folder, jobs(CI_REPEATS, folder))
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
    return [replace(sample, trained=tuple(trained)) if sample is longest else sample for sample in samples]


@pytest.mark.parametrize(
    ("defect", "found"), [(scaled, {"gradients"}), (counted_twice, {"loss"}), (stale, {"parameters"})]
)
def test_a_defect_is_beyond_the_bound(
    tmp_path: Path, defect: Callable[[list[dict[str, Any]]], None], found: set[str]
) -> None:
    model = reference.make_model("qwen2", tmp_path, layers=4)
    expected = precision.expect(model, reference.make_samples(), STEPS, ranks.LR)
    history = reference.train(model, reference.make_samples(), STEPS, ranks.LR)
    assert not precision.errors(history, expected.steps).beyond(expected.own)
    defect(history)
    assert set(precision.errors(history, expected.steps).beyond(expected.own)) == found


def test_a_dropped_token_is_beyond_every_bound(tmp_path: Path) -> None:
    model = reference.make_model("qwen2", tmp_path, layers=4)
    expected = precision.expect(model, reference.make_samples(), STEPS, ranks.LR)
    history = reference.train(model, without_a_token(reference.make_samples()), STEPS, ranks.LR)
    found = precision.errors(history, expected.steps)
    assert set(found.beyond(expected.own)) == {"loss", "norm", "agent_norms", "gradients", "parameters"}, found
    assert found.gradients > 100 * precision.bound(expected.own.gradients)


def test_the_bound_is_never_below_one_rounding() -> None:
    assert precision.bound(0.0) == 4 * torch.finfo(torch.float32).eps
    assert precision.bound(1e-6) == 4e-6
