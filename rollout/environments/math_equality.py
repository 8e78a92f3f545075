"""Equality of two math answers, which math-verify reads as sympy expressions.

`compare_as_expressions` compares two answers. `given` and `truth` are their texts, and `guess` and
`gold` the sympy objects that these texts become. The child processes of `math_comparer.py` call it, and
they import this file without the rest of the project. Therefore it imports nothing from this project,
and imports sympy only inside functions.
"""

import enum
import re
import zlib
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

_VALUE_DIGITS = 60  # digits with which numbers are compared
_MANY_DIGITS = 400  # digits with which exact numbers are compared once more if 60 digits agree
# Values of 60 digits are equal if they differ by at most this share of the larger one; a value of this
# size or smaller may be zero.
_TINY = 1e-45
_FLOAT_DIGITS = 15  # significant digits of a float that a program prints
_FLOAT_ERROR = 1e-14  # relative error of such a float
# A decimal truth with as many digits or more stands for all numbers that round to it.
_ROUNDED_DIGITS = 6
_POINTS = 3  # number of points at which expressions with symbols are compared
_MAX_CHECKED_PARTS = 40  # numbers, signs and letters that `_has_unread_part` checks

_JUNCTION = re.compile(r"\\lor|\\land")
_RELATION = re.compile(r"[<>=]|\\(?:le|ge|ne|lt|gt)(?:q|qslant)?(?![a-zA-Z])")
_DIGITS = re.compile(r"\d+")
_SIGN = re.compile(r"[+-]")
_OTHER_SIGN = {"+": "-", "-": "+"}
_LETTER = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")
_ARRAY_COLUMNS = re.compile(r"\\begin\{array\}\{[^{}]*\}")
_NAMED_SIDE = re.compile(r".*(?:=|\\in(?![a-zA-Z]))")  # up to the value of `x=5` or `x\in[1,2]`
# Notation that math-verify skips: dots, primes, transposes and escaped characters.
_SKIPPED_NOTATION = re.compile(
    r"\\(?:[lc]?dots|backslash|prime)(?![a-zA-Z])|\\[&_#]|\.\.\.|'|\^\{?(?:T|\*|\\(?:top|dagger|ast))(?![a-zA-Z])"
)
_MARKED_UNIT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\{[^{}]*\}(?:\^\{?-?\d\}?)?")


class AnswerComparison(enum.StrEnum):
    """Result of comparing two answers."""

    EQUAL = "equal"
    DIFFERENT = "different"  # also if one of them cannot be read
    UNDECIDED = "undecided"  # a limit was reached, or a part of an answer was not read


def compare_as_expressions(given: str, truth: str) -> AnswerComparison:
    """Compare two normalized LaTeX answers by their mathematical meaning.

    This can take forever, and any amount of memory.
    """
    try:
        return _compare(given, truth)
    except Exception:  # sympy raises errors of any type for text that it cannot read
        return AnswerComparison.DIFFERENT


def _compare(given: str, truth: str) -> AnswerComparison:
    """Compare two answers; equal ones are undecided if a part of their texts was not read."""
    guess = _read(given)
    gold = _read(truth)
    if guess is None or gold is None or not _are_equal(guess, gold):
        return AnswerComparison.DIFFERENT
    both_have_names = "=" in given and "=" in truth
    for text, expression in ((given, guess), (truth, gold)):
        if _has_unread_part(text, expression, both_have_names=both_have_names):
            return AnswerComparison.UNDECIDED
    return AnswerComparison.EQUAL


def _read(text: str) -> Any:
    """Return the sympy object of an answer; None if math-verify cannot read it.

    Relations that are joined by `\\lor` and `\\land` become the set of their solutions. Values that are
    joined by them are read as a list: `5\\lor 6` as `5,6`, and `x=5\\lor 6` as `x=5,6`.
    """
    import sympy

    if "\\lor" in text or "\\land" in text:
        parts = _JUNCTION.split(text)
        if all(_RELATION.search(part) for part in parts):
            return _read_junction(text)
        expression = _parse(",".join(parts))
        values = expression
        if isinstance(expression, sympy.Eq):  # as in `x=5 or 6`
            values = expression.rhs
        if not isinstance(values, sympy.FiniteSet):
            return None  # a part was not read, as in `5 or more`
    else:
        expression = _parse(text)
    if isinstance(expression, sympy.FiniteSet):
        return _solutions(expression)
    return expression


def _read_junction(text: str) -> Any:
    """Return the solutions of relations that are joined by `\\lor` and, inside of it, `\\land`.

    The result is None if a relation cannot be read, or if the relations have several unknowns or none.
    """
    import sympy

    alternatives = []
    unknowns: set[Any] = set()
    for alternative in text.split("\\lor"):
        conditions = [_parse(part) for part in alternative.split("\\land")]
        if any(condition is None for condition in conditions):
            return None
        unknowns.update(*(condition.free_symbols for condition in conditions))
        sets = [condition.as_set() for condition in conditions]
        alternatives.append(sympy.Intersection(*sets))
    if len(unknowns) != 1:
        return None
    return sympy.Union(*alternatives)


def _parse(text: str) -> Any:
    """Return the first sympy object that math-verify reads in a text, or None."""
    import sympy
    from math_verify import parse

    for result in parse(_in_dollars(text), parsing_timeout=None):
        if isinstance(result, sympy.Basic | sympy.MatrixBase):
            return result
    return None


def _in_dollars(text: str) -> str:
    """Return a text as a formula.

    A percent sign is put behind the dollars, because math-verify ignores one inside.
    """
    number = text
    if text.endswith("%"):
        number = text.removesuffix("%").removesuffix("\\")
    return f"${number}${text[len(number) :]}"


def _solutions(expressions: Any) -> Any:
    """Return the set {1, 2} for a set of equations such as `x=1,x=2`; other sets are unchanged.

    The left side of all equations must be the same symbol.
    """
    import sympy

    elements = list(expressions.args)
    if not all(isinstance(element, sympy.Eq) for element in elements):
        return expressions
    left_sides = {equation.lhs for equation in elements}
    if len(left_sides) != 1 or not isinstance(elements[0].lhs, sympy.Symbol):
        return expressions
    return sympy.FiniteSet(*(equation.rhs for equation in elements))


def _are_equal(guess: Any, gold: Any) -> bool:
    """Return True if two sympy objects are equal; long decimals may be rounded."""
    import sympy
    from math_verify import verify

    if not isinstance(gold, sympy.logic.boolalg.Boolean):
        # The truth is a value and not a relation, so `x=5` is read as 5.
        guess = _assigned_value(guess)
    # As sets of numbers, the solutions of x > 1 and y > 1 would be equal.
    if _is_relation(guess) and _is_relation(gold) and guess.free_symbols != gold.free_symbols:
        return False
    if _is_number(guess) and _is_number(gold):
        return _numbers_are_equal(guess, gold)
    guess_set = _interval_set(guess)
    gold_set = _interval_set(gold)
    if guess_set is not None and gold_set is not None:
        return bool(guess_set == gold_set)
    equal = verify(
        _exact(gold),
        _exact(guess),
        float_rounding=_FLOAT_DIGITS,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )
    return bool(equal) and _parts_are_equal(guess, gold)


def _assigned_value(expression: Any) -> Any:
    """Return the last side of `x=...` or of `x=...=...`; other expressions are unchanged."""
    import sympy

    equations = [expression]
    if isinstance(expression, sympy.And):
        equations = list(expression._unsorted_args)  # in the order in which they were written
    if not all(isinstance(equation, sympy.Eq) for equation in equations):
        return expression
    return equations[-1].rhs if isinstance(equations[0].lhs, sympy.Symbol) else expression


def _is_relation(expression: Any) -> bool:
    import sympy

    return isinstance(expression, sympy.core.relational.Relational | sympy.And)


def _interval_set(expression: Any) -> Any:
    """Return the set of an interval, of a union or of the solutions of an inequality; else None.

    Inequalities may be joined, as in `1 < x < 2`.
    """
    import sympy

    if isinstance(expression, sympy.Interval | sympy.Union):
        return _exact(expression).doit()
    is_inequality = isinstance(expression, sympy.core.relational.Relational) and not isinstance(
        expression, sympy.Eq
    )
    is_condition = is_inequality or isinstance(expression, sympy.And)
    if is_condition and len(expression.free_symbols) == 1:
        return _exact(expression).as_set()
    return None


def _is_number(expression: Any) -> bool:
    """Return True if an expression has no symbol except the imaginary unit."""
    import sympy

    if not isinstance(expression, sympy.Expr):
        return False
    return all(symbol.name == "i" for symbol in expression.free_symbols)


def _exact(expression: Any) -> Any:
    """Return an expression with rational numbers in place of decimals."""
    import sympy

    decimals = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    return expression.xreplace(decimals)


def _numbers_are_equal(guess: Any, gold: Any) -> bool:
    """Return True if two numbers are equal. A percentage such as 50 % equals both 50 and 1/2."""
    guess_percent = _percentage(guess)
    gold_percent = _percentage(gold)
    if guess_percent is not None and gold_percent is not None:
        return _values_are_equal(guess_percent, gold_percent)
    if guess_percent is not None:
        guess_values = (guess_percent, guess_percent / 100)
        return any(_values_are_equal(value, gold) for value in guess_values)
    if gold_percent is not None:
        gold_values = (gold_percent, gold_percent / 100)
        return any(_values_are_equal(guess, value) for value in gold_values)
    return _values_are_equal(guess, gold)


def _percentage(expression: Any) -> Any:
    """Return the number before the percent sign of a percentage; None for other expressions."""
    import sympy

    hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    if isinstance(expression, sympy.Mul) and hundredth in expression.args:
        return sympy.Mul(*(factor for factor in expression.args if factor != hundredth))
    return None


def _values_are_equal(guess: Any, gold: Any) -> bool:
    """Return True if two numbers are equal, exactly or within the precision of a long decimal.

    A decimal truth of six digits or more equals all numbers that round to it. A decimal guess of
    fifteen digits or more may have the rounding error of a float.
    """
    import sympy

    guess_value = _value(guess)
    gold_value = _value(gold)
    both_finite = guess_value.is_finite and gold_value.is_finite
    if not both_finite or _are_exact(guess, gold):
        return bool(_exact(guess).doit() == _exact(gold).doit())

    difference = abs(guess_value - gold_value)
    size = max(abs(guess_value), abs(gold_value))
    if gold_value == 0 or guess_value == 0:
        # The difference from 0 is as large as the other value, so a share of it says nothing.
        return bool(size <= _TINY and sympy.simplify(_exact(guess) - _exact(gold)) == 0)

    if not guess.has(sympy.Float) and not gold.has(sympy.Float):
        # Without decimals, both numbers can be computed to as many digits as needed. The last 15 digits
        # are not compared, because rounding may have changed them.
        if difference > size * _TINY:
            return False
        difference = abs(_value(guess, _MANY_DIGITS) - _value(gold, _MANY_DIGITS))
        return bool(difference <= size * sympy.Float(f"1e-{_MANY_DIGITS - 15}"))

    tolerance = _rounding_tolerance(gold)
    if _significant_digits(guess) >= _FLOAT_DIGITS:
        tolerance = max(tolerance, size * _FLOAT_ERROR)
    return bool(difference <= max(tolerance, size * _TINY))


def _are_exact(guess: Any, gold: Any) -> bool:
    """Return True if both numbers are exact rationals.

    A long decimal is not exact: as a truth it may be rounded, and as a guess it may be a float that
    a program has printed.
    """
    import sympy

    if _significant_digits(gold) >= _ROUNDED_DIGITS or _significant_digits(guess) >= _FLOAT_DIGITS:
        return False
    return all(isinstance(_exact(number).doit(), sympy.Rational) for number in (guess, gold))


def _value(expression: Any, digits: int = _VALUE_DIGITS) -> Any:
    """Return the value of a number; `i` is the imaginary unit."""
    import sympy

    imaginary = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    value = sympy.N(_exact(expression).xreplace(imaginary).doit(), digits)
    if not value.is_number:
        raise ValueError(f"{expression} has no value")
    return value


def _rounding_tolerance(gold: Any) -> Any:
    """Return half a unit of the last digit of a truth that may be rounded, else 0.

    Zeros at the end of the truth do not count as digits, because sympy does not keep how many were
    written.
    """
    import sympy

    if _significant_digits(gold) < _ROUNDED_DIGITS:
        return sympy.Integer(0)
    exponent = Decimal(str(gold)).normalize().as_tuple().exponent
    assert isinstance(exponent, int), "the decimal is finite"
    # Every decimal was written with at least one place after the point, so the unit is 0.1 or less. For
    # 1234560.0 it would be 10 without its zeros, and 1234563 would round to it.
    last_place = min(exponent, -1)
    return sympy.Rational(1, 2) * sympy.Integer(10) ** last_place


def _significant_digits(number: Any) -> int:
    """Return the number of significant digits of a decimal; 0 for other expressions."""
    import sympy

    if not isinstance(number, sympy.Float):
        return 0
    return len(Decimal(str(number)).normalize().as_tuple().digits)


def _parts_are_equal(guess: Any, gold: Any) -> bool:
    """Return True if the parts of two objects are equal, or cannot be paired.

    math-verify has found the objects equal, but it compares decimal places, so all small numbers are
    equal for it.
    """
    guess_parts = list(_parts(guess))
    gold_parts = list(_parts(gold))
    if len(guess_parts) != len(gold_parts):
        return True  # the objects have other forms, such as a union and its interval
    guess_parts.sort(key=_sort_key)
    gold_parts.sort(key=_sort_key)
    pairs = zip(guess_parts, gold_parts, strict=True)
    return all(_part_is_equal(guess_part, gold_part) for guess_part, gold_part in pairs)


def _parts(expression: Any) -> Iterator[Any]:
    """Yield the expressions in a set, tuple, interval or matrix.

    An expression that is none of these is its only part. A relation has no parts.
    """
    import sympy

    if isinstance(expression, sympy.MatrixBase):
        yield from expression.flat()
    elif isinstance(expression, sympy.Set | sympy.Tuple):
        for element in expression.args:
            yield from _parts(element)
    elif isinstance(expression, sympy.Expr):
        yield expression


def _part_is_equal(guess: Any, gold: Any) -> bool:
    """Return True if two parts are equal: numbers, or expressions with equal values at some points.

    A point at which one of the expressions has no finite value is skipped.
    """
    if _is_number(guess) and _is_number(gold):
        return _numbers_are_equal(guess, gold)
    for point in range(_POINTS):
        guess_value = _value_at(guess, point)
        gold_value = _value_at(gold, point)
        if not (guess_value.is_finite and gold_value.is_finite):
            continue
        size = max(abs(guess_value), abs(gold_value))
        if abs(guess_value - gold_value) > size * _TINY and size > _TINY:
            return False
    return True


def _value_at(expression: Any, point: int) -> Any:
    """Return the value of an expression at a point: each symbol is replaced by a number.

    Args:
        expression: expression with symbols.
        point: index of the point.
    """
    import sympy

    numbers = {
        symbol: sympy.I if symbol.name == "i" else _symbol_value(symbol.name, point)
        for symbol in expression.free_symbols
    }
    return sympy.N(_exact(expression).xreplace(numbers).doit(), _VALUE_DIGITS)


def _symbol_value(name: str, point: int) -> Any:
    """Return the number that replaces a symbol at a point: a fraction above 1, the same in all processes.

    Args:
        name: name of the symbol.
        point: index of the point.
    """
    import sympy

    numerator = 101 + (zlib.crc32(f"{name} {point}".encode()) % 1009)
    return sympy.Rational(numerator, 97)


def _sort_key(expression: Any) -> tuple[float, float]:
    """Return the real and the imaginary part of an expression's value at the first point."""
    value = complex(_value_at(expression, 0))
    return value.real, value.imag


def _has_unread_part(text: str, expression: Any, *, both_have_names: bool) -> bool:
    """Return True if math-verify has ignored a part of the text.

    math-verify skips the parts of an answer that it cannot read. A number, a sign or a letter counts
    as ignored if the text with another one in its place gives the same expression. So does notation
    that math-verify always skips; in the name of a value, such as `f'(1)` in `f'(1)=5`, it counts only
    if both answers have names. Letters of names and parts of units, such as the 2 of `cm^2`, are not
    checked.

    Args:
        text: the answer.
        expression: the sympy object that was read from it.
        both_have_names: True if both answers are equations, which name their values.
    """
    name = _NAMED_SIDE.match(text)
    value_start = name.end() if name else 0
    searched_from = 0 if both_have_names else value_start
    if _SKIPPED_NOTATION.search(text, searched_from):
        return True
    changes = [(number.end() - 1, _other_digit(number[0][-1])) for number in _DIGITS.finditer(text)]
    changes += [(sign.start(), _OTHER_SIGN[sign[0]]) for sign in _SIGN.finditer(text)]
    for letter in _LETTER.finditer(text, value_start):
        changes.append((letter.start(), "w" if letter[0] == "q" else "q"))

    unchecked_spans = [match.span() for match in _MARKED_UNIT.finditer(text)]
    unchecked_spans += [match.span() for match in _ARRAY_COLUMNS.finditer(text)]
    for position, character in changes[:_MAX_CHECKED_PARTS]:
        if any(start <= position < end for start, end in unchecked_spans):
            continue
        changed = _read(f"{text[:position]}{character}{text[position + 1 :]}")
        if changed is not None and changed == expression:
            return True
    return False


def _other_digit(digit: str) -> str:
    return "3" if digit == "7" else "7"
