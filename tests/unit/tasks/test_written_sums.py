"""Written solutions of sums: exact values by hand, slips, and reviews."""

from random import Random

import pytest

from rollout.environments.math import last_boxed
from rollout.tasks.written_sums import Slip, review, work_out, work_out_wrongly


@pytest.mark.parametrize(
    ("operation", "numbers", "solution"),
    [
        ("+", (347, 285), "7+5=12, 4+8+1=13, 3+2+1=6. \\boxed{632}"),
        ("+", (58, 71), "8+1=9, 5+7=12. \\boxed{129}"),
        ("+", (95, 88, 17), "5+8+7=20, 9+8+1+2=20. \\boxed{200}"),
        ("-", (342, 285), "12-5=7, 14-8-1=5, 3-2-1=0. \\boxed{57}"),
        ("-", (60, 10), "0-0=0, 6-1=5. \\boxed{50}"),
        ("-", (402, 203), "12-3=9, 10-0-1=9, 4-2-1=1. \\boxed{199}"),
    ],
)
def test_solutions_are_written_column_by_column(
    operation: str, numbers: tuple[int, ...], solution: str
) -> None:
    assert work_out(operation, numbers) == solution


@pytest.mark.parametrize(
    ("slip", "solution"),
    [
        (Slip(kind="copy", column=0, amount=1), "7+6=13, 4+8+1=13, 3+2+1=6. \\boxed{633}"),
        (Slip(kind="sum", column=1, amount=-1), "7+5=12, 4+8+1=12, 3+2+1=6. \\boxed{622}"),
        (Slip(kind="carry", column=0, amount=1), "7+5=12, 4+8=12, 3+2+1=6. \\boxed{622}"),
        (Slip(kind="result", column=2, amount=2), "7+5=12, 4+8+1=13, 3+2+1=6. \\boxed{832}"),
    ],
)
def test_lines_after_a_slip_are_consistent_with_it(slip: Slip, solution: str) -> None:
    assert work_out("+", (347, 285), slip) == solution


def test_right_solutions_are_right_and_wrong_ones_wrong() -> None:
    random = Random(0)
    for _ in range(1000):
        operation = random.choice("+-")
        digits = random.choice((2, 3))
        numbers = [random.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(2)]
        numbers.sort(reverse=True)
        answer = sum(numbers) if operation == "+" else numbers[0] - numbers[1]
        assert last_boxed(work_out(operation, numbers)) == str(answer)
        wrong, slip = work_out_wrongly(random, operation, numbers)
        assert last_boxed(wrong) != str(answer)
        assert wrong == work_out(operation, numbers, slip)


@pytest.mark.parametrize(
    ("slip", "text"),
    [
        (None, "ok, ok, ok. <verify>approve</verify>"),
        (Slip(kind="sum", column=1, amount=1), "ok, no, ok. <verify>reject</verify>"),
        (Slip(kind="carry", column=0, amount=1), "ok, no, ok. <verify>reject</verify>"),
        (Slip(kind="carry", column=2, amount=1), "ok, ok, no. <verify>reject</verify>"),
    ],
)
def test_reviews_name_the_column_in_which_a_slip_shows(slip: Slip | None, text: str) -> None:
    assert review((347, 285), slip) == text
