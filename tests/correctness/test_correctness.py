"""The page of correctness names what there is."""

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
    found = defect_tests()
    assert list(found) == list(DEFECTS)
    assert all(found.values()), [defect for defect, tests in found.items() if not tests]


def test_what_holds_of_an_evaluation_has_tests_that_are_there() -> None:
    for test in (test for tests in EVALUATION.values() for test in tests):
        path, *_, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_the_objective_is_compared_in_whole_models() -> None:
    """PPO without a correction is in the rows that name none, and filters have no gradient."""
    without = {
        name
        for known in OBJECTIVE.values()
        for name in known
        if largest_gradient_error(name) == "–"
    }
    assert without == {"none", *OBJECTIVE["filter"]}
    assert all(float(largest_gradient_error(name)) < 1e-5 for name in OBJECTIVE["loss"])


def test_the_page_has_every_estimator_and_part_of_the_objective() -> None:
    text = page(dict.fromkeys(ESTIMATORS, 2.5e-9))
    for name in ESTIMATORS:
        assert re.search(rf"^\| `{name}` \| .+ \| .+ \| 2\.5e-09 \|$", text, re.MULTILINE), name
    for known in OBJECTIVE.values():
        assert all(name in text for name in known)
