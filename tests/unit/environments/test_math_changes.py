"""Any change of a digit, sign, operator or bound makes another answer; a spelling does not.

`python -m tests.unit.environments.test_math_changes` prints the error rates.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from rollout.environments.math_answers import compare_answers

ANSWERS = 500
TESTED_ANSWERS = 250
# Share of changed answers that may be undecided, because math-verify skips the changed part.
MAX_UNDECIDED = 0.02
Pair = tuple[str, str]  # an answer, and the same answer with one change
Draw = random.Random


def other_digit(draw: Draw, number: int) -> int:
    """Return a number of which one digit differs."""
    digits = list(str(number))
    position = draw.randrange(len(digits))
    choices = [digit for digit in "123456789" if digit != digits[position]]
    digits[position] = draw.choice(choices)
    return int("".join(digits))


def fraction(draw: Draw) -> Pair:
    numerator, denominator = draw.sample([2, 3, 5, 7, 11, 13, 17, 19], 2)
    changed = draw.choice([f"-\\frac{{{numerator}}}", f"\\frac{{{numerator + 1}}}"])
    return (
        f"\\frac{{{numerator}}}{{{denominator}}}",
        f"{changed}{{{denominator}}}",
    )


def decimal(draw: Draw) -> Pair:
    exponent = draw.randint(1, 9)
    mantissa = draw.randint(1, 10**exponent)
    changed = other_digit(draw, mantissa)
    return f"0.{mantissa:0{exponent + 1}d}", f"0.{changed:0{exponent + 1}d}"


def small_power(draw: Draw) -> Pair:
    base = draw.randint(2, 12)
    exponent = draw.randint(20, 300)
    return f"{base}^{{-{exponent}}}", f"{base}^{{-{exponent + draw.choice([-1, 1])}}}"


def scientific(draw: Draw) -> Pair:
    mantissa = draw.randint(100, 999)
    exponent = draw.randint(-40, 40)
    left = f"{mantissa / 100:.2f}\\times10"
    if draw.random() < 0.5:
        return f"{left}^{{{exponent}}}", f"{left}^{{{exponent + 1}}}"
    changed = f"{other_digit(draw, mantissa) / 100:.2f}\\times10^{{{exponent}}}"
    return f"{left}^{{{exponent}}}", changed


def root(draw: Draw) -> Pair:
    factor = draw.randint(2, 30)
    radicand = draw.choice([2, 3, 5, 6, 7, 10, 11])
    sign, changed_sign = draw.sample("+-", 2)
    answer = f"{factor}{sign}\\sqrt{{{radicand}}}"
    changes = [
        f"{factor}{changed_sign}\\sqrt{{{radicand}}}",
        f"{factor}{sign}\\sqrt{{{radicand + 2}}}",
        f"{other_digit(draw, factor)}{sign}\\sqrt{{{radicand}}}",
        f"{factor}{sign}{radicand}",
    ]
    return answer, draw.choice(changes)


def polynomial(draw: Draw) -> Pair:
    a = draw.randint(2, 99)
    b = draw.randint(2, 99)
    n = draw.randint(2, 5)
    changes = [
        f"{a}x^{n}-{b}",
        f"{a}x^{{{n + 1}}}+{b}",
        f"{other_digit(draw, a)}x^{n}+{b}",
        f"{a}y^{n}+{b}",
        f"{a}x^{n}+{other_digit(draw, b)}",
    ]
    return f"{a}x^{n}+{b}", draw.choice(changes)


def small_coefficient(draw: Draw) -> Pair:
    exponent = draw.randint(15, 60)
    return f"10^{{-{exponent}}}x+1", f"10^{{-{exponent + 1}}}x+1"


def interval(draw: Draw) -> Pair:
    low = draw.randint(-50, 20)
    high = low + draw.randint(1, 50)
    opening = draw.choice("([")
    closing = draw.choice(")]")
    if (opening, closing) == ("(", ")"):
        closing = "]"  # (1,2) is a point as well
    changes = [
        f"{'[' if opening == '(' else '('}{low},{high}{closing}",
        f"{opening}{low - 1},{high}{closing}",
        f"{opening}{low},{high + 1}{closing}",
    ]
    return f"{opening}{low},{high}{closing}", draw.choice(changes)


def union(draw: Draw) -> Pair:
    low = draw.randint(-20, 0)
    high = low + draw.randint(1, 30)
    answer = f"(-\\infty,{low})\\cup({high},\\infty)"
    changes = [
        f"(-\\infty,{low}]\\cup({high},\\infty)",
        f"(-\\infty,{low})\\cap({high},\\infty)",
        f"(-\\infty,{low - 1})\\cup({high},\\infty)",
        f"x<{low}\\text{{ or }}x\\ge{high}",
        f"x<{low}\\text{{ and }}x>{high}",
        f"x>{low}\\text{{ or }}x>{high}",
    ]
    return answer, draw.choice(changes)


def inequality(draw: Draw) -> Pair:
    bound = draw.randint(2, 90)
    sign, changed = draw.sample(["<", ">", "\\le ", "\\ge "], 2)
    answer = f"x{sign}{bound}"
    return answer, draw.choice([f"x{changed}{bound}", f"x{sign}{other_digit(draw, bound)}"])


def point(draw: Draw) -> Pair:
    x, y, z = draw.sample(range(2, 99), 3)
    changes = [
        f"({y},{x},{z})",
        f"({x},{y},{other_digit(draw, z)})",
        f"(-{x},{y},{z})",
        f"({x},{y})",
    ]
    return f"({x},{y},{z})", draw.choice(changes)


def solutions(draw: Draw) -> Pair:
    x, y, z = draw.sample(range(2, 99), 3)
    return f"\\{{{x},{y}\\}}", draw.choice(
        [f"\\{{{x},{z}\\}}", f"\\{{{x}\\}}", f"\\{{{x},-{y}\\}}"]
    )


def complex_number(draw: Draw) -> Pair:
    x, y = draw.sample(range(2, 99), 2)
    changes = [f"{x}-{y}i", f"{x}+{other_digit(draw, y)}i", f"{y}+{x}i", f"{x}+{y}"]
    return f"{x}+{y}i", draw.choice(changes)


def based(draw: Draw) -> Pair:
    number = draw.randint(10, 4000)
    base = draw.randint(2, 7)
    digits = ""
    rest = number
    while rest:
        digits = f"{rest % base}{digits}"
        rest //= base
    changed = "1" + digits[1:-1] + str((int(digits[-1]) + 1) % base)
    return f"{digits}_{{{base}}}", draw.choice(
        [f"{digits}_{{{base + 1}}}", f"{changed}_{{{base}}}"]
    )


def exponential(draw: Draw) -> Pair:
    a, b = draw.sample(range(2, 40), 2)
    changes = [
        f"{a}+\\frac{{{b}}}{{\\mathrm{{e}}}}",
        f"{a}-\\frac{{{b}}}{{\\mathrm{{e}}^2}}",
        f"{a}-\\frac{{{b + 1}}}{{e}}",
        f"{a}",
    ]
    return f"{a}-\\frac{{{b}}}{{e}}", draw.choice(changes)


def mixed_number(draw: Draw) -> Pair:
    whole = draw.randint(1, 30)
    numerator = draw.randint(1, 6)
    changes = [f"{whole}{numerator}/7", f"{whole + 1} {numerator}/7", f"-{whole} {numerator}/7"]
    return f"\\frac{{{7 * whole + numerator}}}{{7}}", draw.choice(changes)


def repeating(draw: Draw) -> Pair:
    digits, other = draw.sample(["3", "6", "12", "45", "142857"], 2)
    changes = [f"0.1\\overline{{{other}}}", f"0.\\overline{{1{digits}}}", f"0.1{digits[0]}"]
    return f"0.1\\overline{{{digits}}}", draw.choice(changes)


def program_float(draw: Draw) -> Pair:
    mantissa = draw.randint(101, 999)
    exponent = draw.randint(2, 40)
    answer = f"{mantissa / 100:.2f}e-{exponent}"
    changes = [
        f"{mantissa / 100:.2f}e-{exponent + 1}",
        f"{mantissa / 100:.2f}e+{exponent}",
        f"{other_digit(draw, mantissa) / 100:.2f}e-{exponent}",
    ]
    return answer, draw.choice(changes)


def percentage(draw: Draw) -> Pair:
    number = draw.randint(2, 99)
    changes = [f"{other_digit(draw, number)}\\%", f"{number}^\\circ", f"{number}0\\%"]
    return f"{number}\\%", draw.choice(changes)


def temperature(draw: Draw) -> Pair:
    number = draw.randint(2, 99)
    changes = [f"{number}^\\circ F", f"{number}\\text{{ cm}}", f"{number + 1}^\\circ\\text{{C}}"]
    return f"{number}^\\circ\\text{{C}}", draw.choice(changes)


def degrees(draw: Draw) -> Pair:
    angle = draw.randint(5, 85)
    changes = [
        f"\\sin {angle}",
        f"\\cos {angle}^\\circ",
        f"\\sin {other_digit(draw, angle)}^\\circ",
    ]
    if angle == 45:
        changes.pop(1)  # the sine of 45 degrees is their cosine
    return f"\\sin {angle}^\\circ", draw.choice(changes)


def matrix(draw: Draw) -> Pair:
    a, b, c, d = draw.sample(range(2, 99), 4)
    left = "\\begin{pmatrix}"
    right = "\\end{pmatrix}"
    changes = [
        f"{left}{a}&{c}\\\\{b}&{d}{right}",
        f"{left}{a}&{b}\\\\{c}&-{d}{right}",
        f"{left}{a}&{b}\\\\{c}&{other_digit(draw, d)}{right}",
        f"[[{a},{b}],[{d},{c}]]",
    ]
    return f"{left}{a}&{b}\\\\{c}&{d}{right}", draw.choice(changes)


def assignment(draw: Draw) -> Pair:
    x, y = draw.sample(range(2, 99), 2)
    changes = [f"x={x},z={y}", f"x={y},y={x}", f"x={x},x={y}", f"x={x},y=-{y}"]
    return f"x={x},y={y}", draw.choice(changes)


def close_integers(draw: Draw) -> Pair:
    exponent = draw.randint(45, 90)
    return f"10^{{{exponent}}}", f"10^{{{exponent}}}{draw.choice('+-')}1"


def vector(draw: Draw) -> Pair:
    x, y = draw.sample(range(2, 99), 2)
    answer = f"{x}\\mathbf{{i}}+{y}\\mathbf{{j}}"
    changes = [
        f"{x}\\mathbf{{i}}-{y}\\mathbf{{j}}",
        f"{x}i+{y}",
        f"{y}\\mathbf{{i}}+{x}\\mathbf{{j}}",
    ]
    return answer, draw.choice(changes)


KINDS: tuple[Callable[[Draw], Pair], ...] = (
    fraction,
    decimal,
    small_power,
    scientific,
    root,
    polynomial,
    small_coefficient,
    interval,
    union,
    inequality,
    point,
    solutions,
    complex_number,
    based,
    exponential,
    mixed_number,
    repeating,
    program_float,
    percentage,
    temperature,
    degrees,
    matrix,
    assignment,
    close_integers,
    vector,
)

SPELLINGS = [
    (r"\frac{7}{2}", ["3.5", "7/2", "3 1/2", r"3\frac{1}{2}", "3½", r"\dfrac72", "x=3.5", "3.50"]),
    (r"\sqrt{2}", ["√2", r"\sqrt2", "sqrt(2)", r"2^{\frac12}", "2^(1/2)", r"\frac{2}{\sqrt{2}}"]),
    (r"2\pi", ["2*pi", "2π", r"2\cdot\pi", r"\pi\cdot 2"]),
    ("1500", ["1,500", r"1.5\times10^3", "1 500", r"1{,}500", "1.5·10³", "1500.0"]),
    (r"1-\frac{1}{e}", [r"1-e^{-1}", r"1-\frac{1}{\mathrm{e}}", r"1 - 1/e"]),
    ("14-i", ["14.0 + -1.0i", r"-\mathrm{i}+14", "14-1i"]),
    ("(1,2,3)", [r"\langle 1,2,3\rangle", "(1, 2, 3)", r"\left(1,2,3\right)"]),
    (r"(-\infty,-1)\cup(1,\infty)", ["x<-1 or x>1", r"x > 1 \lor x < -1", "(-∞,-1)∪(1,∞)"]),
    (r"x\le3", ["x ≤ 3", r"x\leq 3", r"3\ge x"]),
    (r"1101_2", [r"1101_{2}"]),
    (r"\{1,2\}", ["{2,1}", r"\left\{1,2\right\}", "1, 2", "1 or 2"]),
    (r"\frac{1}{6}", [r"0.1\overline{6}", r"0.1\bar6", r"0.1\dot{6}", "Fraction(1, 6)"]),
    ("0.00012", ["1.2e-4", "1.2E-04", r"1.2\times10^{-4}", r"0.012\%", "0.012 percent"]),
    ("1500000", ["1.5 million", r"1.5\text{ million}", "1,500,000 people", "1.5e6"]),
    (r"20^\circ\text{C}", ["20°C", r"20^\circ C", r"20^{\circ}\mathrm{C}", "20"]),
    (r"\sin 30^\circ", ["0.5", "sin(30°)", r"\cos 60^{\circ}"]),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", ["(1,2)", r"\begin{bmatrix}1\\2\end{bmatrix}"]),
    ("(1,2]", ["]1,2]", r"1<x\le2", r"\{x\mid 1<x\le2\}", r"x\in(1,2]"]),
    (r"x\equiv3\pmod7", [r"x\equiv 3\bmod 7", "x ≡ 3 (mod 7)"]),
    (r"FF_{16}", ["0xff", "(FF)_{16}", r"FF_{\text{sixteen}}", "FF base 16"]),
    (r"-\frac{1}{3}", [r"\frac{-1}{3}", "-1/3", r"\frac{1}{-3}"]),
]  # fmt: skip


def equal_changes(answers: int) -> list[tuple[str, str, str]]:
    """Return those of some changed answers that are not different, with their truth and verdict."""
    draw = random.Random(1)
    wrong = []
    for number in range(answers):
        truth, changed = KINDS[number % len(KINDS)](draw)
        for answer, reference in ((changed, truth), (truth, changed)):
            comparison = compare_answers(answer, reference)
            if comparison != "different":
                wrong.append((answer, reference, str(comparison)))
    return wrong


def different_spellings() -> list[tuple[str, str, str]]:
    """Return the spellings that are not equal, with their truth and verdict."""
    different: list[tuple[str, str, str]] = []
    for truth, spellings in SPELLINGS:
        for spelling in spellings:
            comparison = compare_answers(spelling, truth)
            if comparison != "equal":
                different.append((spelling, truth, str(comparison)))
    return different


@pytest.mark.slow
def test_a_change_is_never_equal() -> None:
    wrong = equal_changes(TESTED_ANSWERS)
    assert [pair for pair in wrong if pair[2] == "equal"] == []
    assert len(wrong) <= MAX_UNDECIDED * 2 * TESTED_ANSWERS, wrong


@pytest.mark.slow
def test_an_answer_is_equal_in_every_spelling() -> None:
    assert different_spellings() == []


if __name__ == "__main__":
    verdicts = Counter(verdict for *_, verdict in equal_changes(ANSWERS))
    print(
        f"{ANSWERS} answers of {len(KINDS)} kinds, {2 * ANSWERS} comparisons with a change: "
        f"{verdicts['equal']} equal, {verdicts['undecided']} undecided"
    )
    spelling_count = sum(len(spellings) for _, spellings in SPELLINGS)
    print(
        f"{spelling_count} spellings of {len(SPELLINGS)} answers: "
        f"{len(different_spellings())} not equal"
    )
