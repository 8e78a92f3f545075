"""Notation of answers as it is rewritten for math-verify."""

import pytest

from rollout.environments.math_notation import normalize_answer


def test_left_is_removed_as_a_command_only() -> None:
    assert normalize_answer(r"\left(1,2\right)") == r"(1,2)"
    assert normalize_answer(r"P\leftarrow Q") == r"P\leftarrow Q"


@pytest.mark.parametrize(
    ("answer", "normalized"),
    [
        (r"2\ 1/2", r"(2+\frac{1}{2})"),
        (r"2\;1/2", r"(2+\frac{1}{2})"),
        (r"3\quad 5", "3␣5"),
        (r"3\qquad5", "3␣5"),
        (r"12\:000", "12000"),
        (r"12\,000", "12000"),
        (r"3.141\,59", "3.14159"),
        (r"10,\!000", "10,000"),
        (r"x=1,\quad y=2", "x=1,y=2"),
        (r"\pi\ r", r"\pi r"),
        (r"1\\ 2", r"1\\2"),  # a new row, and no blank
    ],
)
def test_blanks_of_latex_are_read_as_blanks(answer: str, normalized: str) -> None:
    assert normalize_answer(answer) == normalized
