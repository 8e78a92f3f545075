"""The page of correctness names what there is."""

from mcore_mas.equations.advantages import ESTIMATORS
from tests.correctness import (
    DEFECTS,
    EVALUATION,
    OBJECTIVE,
    PAGE,
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


def test_the_page_is_current_but_for_the_measured_differences() -> None:
    def without_differences(text: str) -> list[str]:
        return [
            line.rpartition(" | ")[0] if line.startswith(tuple(rows)) else line
            for line in text.splitlines()
        ]

    rows = [f"| `{name}` |" for name in ESTIMATORS]
    made = page(dict.fromkeys(ESTIMATORS, 0.0))
    assert without_differences(PAGE.read_text(encoding="utf-8")) == without_differences(made), (
        "run `make exactness`"
    )
    measured = [
        line.split(" | ")[-1].rstrip(" |")
        for line in PAGE.read_text().splitlines()
        if line.startswith(tuple(rows))
    ]
    assert len(measured) == len(ESTIMATORS) and all(float(value) < 1e-7 for value in measured)
    assert all(name in made for known in OBJECTIVE.values() for name in known)
