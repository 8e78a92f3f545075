"""Equality of math answers for sympy."""

import pytest

from rollout.environments.math_equality import AnswerComparison, compare_as_expressions


@pytest.mark.parametrize(
    ("given", "truth", "comparison"),
    [
        ("1+x", "x+1", "equal"),
        ("x=5", "5", "equal"),
        ("x=5\\lor x=6", "\\{5,6\\}", "equal"),
        ("50\\%", "\\frac{1}{2}", "equal"),
        ("[1,2]", "1\\le x\\le2", "equal"),
        ("x", "y", "different"),
        ("10^{-50}", "0", "different"),
        ("1", "10^{10^{10", "different"),  # cannot be read
        ("5", "5'", "undecided"),  # math-verify skips the prime
    ],
)
def test_answers_are_compared_by_their_meaning(given: str, truth: str, comparison: str) -> None:
    assert compare_as_expressions(given, truth) is AnswerComparison(comparison)
