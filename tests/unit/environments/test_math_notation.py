"""Notation of answers as it is rewritten for math-verify."""

from rollout.environments.math_notation import normalize_answer


def test_left_is_removed_as_a_command_only() -> None:
    assert normalize_answer(r"\left(1,2\right)") == r"(1,2)"
    assert normalize_answer(r"P\leftarrow Q") == r"P\leftarrow Q"
