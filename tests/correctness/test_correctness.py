"""Rows of docs/correctness.md: the tests and equations that they name exist."""

import re

import pytest

from mcore_mas.equations.advantages import ESTIMATORS
from tests.correctness import (
    DEFECTS,
    EVALUATION,
    OBJECTIVE,
    ROOT,
    largest_gradient_error,
    page,
)


@pytest.mark.parametrize("rows", [DEFECTS, EVALUATION])
def test_the_tests_of_each_row_exist(rows: dict[str, tuple[str, ...]]) -> None:
    for text, tests in rows.items():
        assert tests, text
        for test in tests:
            path, *names = test.split("::")
            source = (ROOT / path).read_text(encoding="utf-8")
            assert all(f"def {name}(" in source for name in names[-1:]), test


def test_the_objective_is_compared_in_whole_models() -> None:
    """Rows without a correction cover PPO without one. Filters have no gradient."""
    without_gradient = set()
    for names in OBJECTIVE.values():
        without_gradient |= {name for name in names if largest_gradient_error(name) == "–"}
    assert without_gradient == {"none", *OBJECTIVE["filter"]}
    for name in OBJECTIVE["loss"]:
        assert float(largest_gradient_error(name)) < 1e-5


def test_the_page_has_every_estimator_and_part_of_the_objective() -> None:
    text = page(dict.fromkeys(ESTIMATORS, 2.5e-9))
    for name in ESTIMATORS:
        assert re.search(rf"^\| `{name}` \| .+ \| .+ \| 2\.5e-09 \|$", text, re.MULTILINE), name
    for names in OBJECTIVE.values():
        for name in names:
            assert name in text
