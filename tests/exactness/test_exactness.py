"""Layouts and feeds reproduce plain torch on a Hugging Face model: loss, gradients, norms, parameters."""

from pathlib import Path

import pytest

from tests.exactness.repeats import REPEATS, jobs, same
from tests.exactness.rows import ROWS, TOLERANCE, Errors, measure, run

CI = [row for row in ROWS if row.ci]
CI_REPEATS = [repeat for repeat in REPEATS if repeat.ci]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every row came to."""
    folder: Path = tmp_path_factory.mktemp("rows")
    run(CI, folder, jobs(CI_REPEATS, folder))
    return folder


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, Errors]:
    """Every row's errors by name."""
    return {row.name: errors for row, errors in zip(CI, measure(CI, folder), strict=True)}


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("row", CI, ids=lambda row: row.name)
def test_a_row_is_exact(measured: dict[str, Errors], row) -> None:
    assert measured[row.name].worst <= TOLERANCE, measured[row.name]


@pytest.mark.multirank
@pytest.mark.slow
def test_a_repeated_and_a_resumed_training_come_to_the_same_bits(folder: Path) -> None:
    assert same(CI_REPEATS, folder) == [(True, True)] * len(CI_REPEATS)
