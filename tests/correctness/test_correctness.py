"""Rows of docs/correctness.md: the tests and equations that they name exist."""

import re

from mcore_mas.equations.advantages import ESTIMATORS
from tests.correctness import (
    DEFECTS,
    EVALUATION,
    OBJECTIVE,
    ROOT,
    defect_tests,
    largest_gradient_error,
    page,
)


def test_every_defect_has_tests() -> None:
    tests_by_defect = defect_tests()
    assert list(tests_by_defect) == list(DEFECTS)
    for defect, tests in tests_by_defect.items():
        assert tests, defect


def test_the_tests_of_the_evaluation_exist() -> None:
    for tests in EVALUATION.values():
        for test in tests:
            path, *_, name = test.split("::")
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


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
