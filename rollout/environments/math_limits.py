"""Limits of a math answer, checked on its text before a computer-algebra system reads it."""

import math
import re
from itertools import accumulate

MAX_CHARS = 400
MAX_DEPTH = 30  # limit of nested brackets
MAX_DIGITS = 100  # limit of one number
MAX_COMMAS = 100  # limit of one list
MAX_OPERAND = 10_000  # an exponent, the argument of a factorial, the upper index of a binomial

_BEYOND = MAX_OPERAND + 1  # stands for every size above MAX_OPERAND
_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1},}}")
_BINOMIAL = re.compile(r"binom\{*(\d+)")
_TOKEN = re.compile(
    r"(?P<number>\d+(?P<decimals>\.\d*)?)|(?P<open>[(\[{])|(?P<power>\^)|(?P<rest>.)", re.DOTALL
)
_EXPONENT = re.compile(r"[-+]?\d+|.", re.DOTALL)
_DEPTH_CHANGE = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def is_refused(text: str) -> bool:
    """Return True if an answer is empty or asks for more computation than any right answer would.

    Powers and factorials of written numbers are followed through towers: 2^{3^{2}} has the exponent
    9. This estimates the work of a computer-algebra system. Answers whose work is underestimated
    reach the limits of its process.

    Args:
        text: an answer that `normalize_answer` has rewritten.
    """
    if not 0 < len(text) <= MAX_CHARS:
        return True
    if text.count(",") > MAX_COMMAS or _LONG_NUMBER.search(text):
        return True
    depths = accumulate(_DEPTH_CHANGE.get(character, 0) for character in text)
    if max(depths) > MAX_DEPTH:
        return True
    try:
        for match in _BINOMIAL.finditer(text):
            _check_operand(int(match[1]))
        _estimate_size(text)
    except OverflowError:
        return True
    return False


def _estimate_size(text: str) -> int:
    """Estimate the value of an expression, at most _BEYOND, as a sum of products; a letter counts 1.

    Raises:
        OverflowError: an exponent, or the argument of a factorial, is above MAX_OPERAND.
    """
    total = 0
    product = 1
    factor = 1  # kept apart from the product, because a power or a factorial applies to it alone
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        assert token is not None, "the last alternative matches any character"
        position = token.end()
        if token["number"]:
            product *= factor
            factor = int(token["number"].split(".")[0])
            if token["decimals"]:
                factor += 1  # rounded up
        elif token["open"]:
            end = _closing_bracket(text, token.start())
            product *= factor
            factor = _estimate_size(text[position:end])
            position = end + 1
        elif token["power"]:
            end = _exponent_end(text, position)
            exponent = _check_operand(_estimate_size(text[position:end]))
            factor = _power(max(factor, 2), exponent)  # as bases, 1 and letters count 2
            position = end
        elif token["rest"] == "!":
            operand = _check_operand(factor)
            factor = min(math.factorial(min(operand, 8)), _BEYOND)  # 8! is beyond the bound
        elif token["rest"] in "+-":
            total = min(total + product * factor, _BEYOND)
            product = 1
            factor = 1
        else:
            product *= factor
            factor = 1
        # A 0 does not cancel the factors after it: an estimate is rather too large than too small.
        product = min(max(product, 1), _BEYOND)
    return min(total + product * factor, _BEYOND)


def _check_operand(size: int) -> int:
    """Return the size of an operand; raise OverflowError if it is above MAX_OPERAND."""
    if size > MAX_OPERAND:
        raise OverflowError
    return size


def _exponent_end(text: str, start: int) -> int:
    """Return the position after the exponent that starts at `start`.

    An exponent is a text in brackets, a number with its sign, or one character. If a `^` follows, the
    exponent goes on: that of 2 in `2^3^4` is `3^4`.
    """
    match = _EXPONENT.match(text, start)
    end = match.end() if match else start
    if match and match[0] in _DEPTH_CHANGE:  # the match is the bracket alone
        end = _closing_bracket(text, start) + 1
    if text.startswith("^", end):
        return _exponent_end(text, end + 1)
    return end


def _closing_bracket(text: str, start: int) -> int:
    """Return the position at which the bracket at `start` is closed; the text's end if it is not."""
    depth = 0
    for position in range(start, len(text)):
        depth += _DEPTH_CHANGE.get(text[position], 0)
        if depth <= 0:
            return position
    return len(text)


def _power(base: int, exponent: int) -> int:
    """Return base**exponent, at most _BEYOND."""
    if exponent * (base.bit_length() - 1) > MAX_OPERAND.bit_length():
        return _BEYOND
    value: int = base**exponent
    return min(value, _BEYOND)
