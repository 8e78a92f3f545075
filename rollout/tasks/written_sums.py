"""Written solutions of sums, column by column, with or without a slip, and their reviews."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

SLIP_KINDS = ("copy", "sum", "carry", "result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slip:
    """One mistake in a written solution; the lines after it are consistent with it.

    Attributes:
        kind: "copy": a digit is read wrongly. "sum": a column is computed wrongly. "carry": a carry
            is lost or invented. "result": a digit of the result is written wrongly.
        column: column of the mistake, counted from 0 at the lowest digit.
        amount: added to the digit (modulo 10) or to the result of the column.
    """

    kind: str
    column: int
    amount: int


def work_out(operation: str, numbers: Sequence[int], slip: Slip | None = None) -> str:
    """Write the solution of a sum or a difference, with its answer in a box at the end.

    For 347 + 285: `7+5=12, 4+8+1=13, 3+2+1=6. \\boxed{632}`; for 342 - 285: `12-5=7, 14-8-1=5,
    3-2-1=0. \\boxed{57}`.

    Args:
        operation: "+", or "-" to subtract all other numbers from the first one.
        numbers: numbers to add or subtract.
        slip: mistake in the solution; None: the solution is right.
    """
    is_sum = operation == "+"
    digits: list[int] = []  # digits of the answer, from the lowest one
    lines: list[str] = []
    carry = 0
    for column in range(_columns_of(numbers)):
        kind = slip.kind if slip and slip.column == column else ""
        amount = slip.amount if slip and slip.column == column else 0
        terms = [number // 10**column % 10 for number in numbers]
        if kind == "copy":
            terms[-1] = (terms[-1] + amount) % 10
        if carry:
            terms.append(carry)
        if not is_sum and terms[0] < sum(terms[1:]):
            terms[0] += 10
        result = sum(terms) if is_sum else terms[0] - sum(terms[1:])
        if kind == "sum":
            result = abs(result + amount)
        lines.append(f"{operation.join(map(str, terms))}={result}")
        digits.append(result % 10)
        carry = result // 10 if is_sum else int(terms[0] >= 10)
        if kind == "carry":
            carry = 0 if carry else 1
        if kind == "result":
            digits[-1] = (digits[-1] + amount) % 10
    highest_digits = str(carry) if is_sum and carry else ""
    answer = int(highest_digits + "".join(map(str, reversed(digits))))
    return f"{', '.join(lines)}. \\boxed{{{answer}}}"


def work_out_wrongly(
    random: Random, operation: str, numbers: Sequence[int], kinds: Sequence[str] = SLIP_KINDS
) -> tuple[str, Slip]:
    """Write a solution with one random slip and a wrong answer; return it with the slip.

    Args:
        random: random numbers.
        operation: "+" or "-".
        numbers: numbers to add or subtract.
        kinds: kinds of slips to choose from.
    """
    right_box = _box_of(work_out(operation, numbers))
    columns = _columns_of(numbers)
    while True:
        amount = random.choice((-3, -2, -1, -1, 1, 1, 2, 3))
        kind = random.choice(kinds)
        slip = Slip(kind=kind, column=random.randrange(columns), amount=amount)
        solution = work_out(operation, numbers, slip)
        if _box_of(solution) != right_box:
            return solution, slip


def review(numbers: Sequence[int], slip: Slip | None = None) -> str:
    """Write a review of a written solution: `ok` or `no` for each column, and the verdict.

    For a wrong tens column: `ok, no, ok. <verify>reject</verify>`. A wrong carry shows in the next
    column.

    Args:
        numbers: numbers of the sum.
        slip: mistake in the solution; None: the solution is right.
    """
    columns = _columns_of(numbers)
    wrong_column = -1
    if slip is not None:
        shown_in = slip.column + 1 if slip.kind == "carry" else slip.column
        wrong_column = min(shown_in, columns - 1)
    checks = ", ".join("no" if column == wrong_column else "ok" for column in range(columns))
    return f"{checks}. <verify>{'reject' if slip else 'approve'}</verify>"


def _columns_of(numbers: Sequence[int]) -> int:
    """Return the number of digits of the longest number."""
    return max(len(str(number)) for number in numbers)


def _box_of(solution: str) -> str:
    """Return the boxed answer at the end of a written solution."""
    return solution.rpartition(" ")[2]
