"""Sums worked out in writing, column by column from the low digit, as they should be or with one slip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

SLIPS = ("copy", "sum", "carry", "result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slip:
    """One mistake in a written solution; what follows it is consistent with it."""

    kind: str  # copy: a digit read wrongly | sum: a column computed wrongly | carry: lost or invented | result
    column: int  # from the low digit, 0
    amount: int  # added to the digit (modulo 10) or to the column's result


def work_out(operation: str, numbers: Sequence[int], slip: Slip | None = None) -> str:
    """The written solution of numbers[0] `operation` numbers[1] ..., its answer in a box at the end.

    For 347 + 285: `7+5=12, 4+8+1=13, 3+2+1=6. \\boxed{632}`; for 342 - 285: `12-5=7, 14-8-1=5, 3-2-1=0. \\boxed{57}`.
    """
    add = operation == "+"
    digits: list[int] = []
    lines: list[str] = []
    carry = 0
    for column in range(max(len(str(number)) for number in numbers)):
        kind, amount = (slip.kind, slip.amount) if slip and slip.column == column else ("", 0)
        terms = [number // 10**column % 10 for number in numbers]
        if kind == "copy":
            terms[-1] = (terms[-1] + amount) % 10
        if carry:
            terms.append(carry)
        if not add and terms[0] < sum(terms[1:]):
            terms[0] += 10
        result = sum(terms) if add else terms[0] - sum(terms[1:])
        if kind == "sum":
            result = abs(result + amount)
        lines.append(f"{operation.join(map(str, terms))}={result}")
        digits.append(result % 10)
        carry = result // 10 if add else int(terms[0] >= 10)
        if kind == "carry":
            carry = 0 if carry else 1
        if kind == "result":
            digits[-1] = (digits[-1] + amount) % 10
    top = str(carry) if add and carry else ""
    answer = int(top + "".join(map(str, reversed(digits))))
    return f"{', '.join(lines)}. \\boxed{{{answer}}}"


def work_out_wrongly(
    random: Random, operation: str, numbers: Sequence[int], kinds: Sequence[str] = SLIPS
) -> tuple[str, Slip]:
    """A written solution with one slip of one of these `kinds` and a wrong answer, and that slip."""
    right = work_out(operation, numbers).rpartition(" ")[2]
    columns = max(len(str(number)) for number in numbers)
    while True:
        amount = random.choice((-3, -2, -1, -1, 1, 1, 2, 3))
        slip = Slip(kind=random.choice(kinds), column=random.randrange(columns), amount=amount)
        wrong = work_out(operation, numbers, slip)
        if wrong.rpartition(" ")[2] != right:
            return wrong, slip


def review(numbers: Sequence[int], slip: Slip | None = None) -> str:
    """A verdict on a written solution, with its reason: `ok` or `no` for each column.

    For a wrong tens column: `ok, no, ok. <verify>reject</verify>`. A carry that was lost shows in the next column.
    """
    columns = max(len(str(number)) for number in numbers)
    blamed = -1 if slip is None else min(slip.column + (slip.kind == "carry"), columns - 1)
    checks = ", ".join("no" if column == blamed else "ok" for column in range(columns))
    return f"{checks}. <verify>{'reject' if slip else 'approve'}</verify>"
