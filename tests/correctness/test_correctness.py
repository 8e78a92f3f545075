"""The page of correctness names what there is."""

from mcore_mas.equations.advantages import ESTIMATORS
from tests.correctness import DEFECTS, OBJECTIVE, PAGE, page, tests_of_defects


def test_every_defect_has_tests() -> None:
    found = tests_of_defects()
    assert list(found) == list(DEFECTS)
    assert all(found.values()), [defect for defect, tests in found.items() if not tests]


def test_the_page_is_current_but_for_the_measured_differences() -> None:
    def without_differences(text: str) -> list[str]:
        return [line.rpartition(" | ")[0] if line.startswith(tuple(rows)) else line for line in text.splitlines()]

    rows = [f"| `{name}` |" for name in ESTIMATORS]
    made = page(dict.fromkeys(ESTIMATORS, 0.0))
    assert without_differences(PAGE.read_text(encoding="utf-8")) == without_differences(made), "run `make exactness`"
    measured = [
        line.split(" | ")[-1].rstrip(" |") for line in PAGE.read_text().splitlines() if line.startswith(tuple(rows))
    ]
    assert len(measured) == len(ESTIMATORS) and all(float(value) < 1e-7 for value in measured)
    assert all(name in made for known in OBJECTIVE.values() for name in known)
