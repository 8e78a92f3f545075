"""What an answer may hold before a computer-algebra system is asked to read it."""

from __future__ import annotations

import re

MAX_CHARS = 400
MAX_DEPTH = 30  # of brackets in each other
MAX_DIGITS = 100  # of one number
MAX_COMMAS = 100  # of one list
MAX_OPERAND = 10_000  # an exponent, what a factorial is taken of, what a binomial chooses from

_BEYOND = MAX_OPERAND + 1
_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1},}}")
_BINOMIAL = re.compile(r"binom\{*(\d+)")
_TOKEN = re.compile(r"(?P<number>\d+(?P<decimals>\.\d*)?)|(?P<open>[(\[{])|(?P<power>\^)|(?P<rest>.)", re.DOTALL)
_EXPONENT = re.compile(r"[-+]?\d+|.", re.DOTALL)
_STEP = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class Refused(ValueError):
    """An answer asks for more than any right one would: says what."""


def check_answer(text: str) -> None:
    """Refuse to have an answer, without spaces and `\\left`, read.

    Powers and factorials of written numbers are followed through towers: 2^{3^{2}} has the exponent 9. This estimates
    what a system would be made to compute; what slips through meets the limits of its process.

    Raises:
        Refused: it is empty, or too long, nested or numerous, or has too large operands.
    """
    if not text:
        raise Refused("nothing")
    if len(text) > MAX_CHARS:
        raise Refused(f"{len(text)} characters; at most {MAX_CHARS}")
    if text.count(",") > MAX_COMMAS:
        raise Refused(f"{text.count(',')} commas; at most {MAX_COMMAS}")
    if _LONG_NUMBER.search(text):
        raise Refused(f"a number of more than {MAX_DIGITS} digits")
    depth = deepest = 0
    for character in text:
        depth += _STEP.get(character, 0)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise Refused(f"{deepest} brackets in each other; at most {MAX_DEPTH}")
    for match in _BINOMIAL.finditer(text):
        _operand("a binomial", int(match[1]))
    _size(text)


def _size(text: str) -> int:
    """About how large an expression is, at most `_BEYOND`: a sum of products, in which a letter counts 1."""
    total, product, factor, at = 0, 1, 1, 0
    while token := _TOKEN.match(text, at):
        at = token.end()
        if token["number"]:
            product, factor = product * factor, int(token["number"].split(".")[0]) + bool(token["decimals"])
        elif token["open"]:
            end = _closing(text, token.start())
            product, factor, at = product * factor, _size(text[at:end]), end + 1
        elif token["power"]:
            end = _exponent_end(text, at)
            factor, at = _power(max(factor, 2), _operand("an exponent", _size(text[at:end]))), end
        elif token["rest"] == "!":
            factor = _factorial(_operand("a factorial", factor))
        elif token["rest"] in "+-":
            total, product, factor = min(total + product * factor, _BEYOND), 1, 1
        else:
            product, factor = product * factor, 1
        product = min(max(product, 1), _BEYOND)
    return min(total + product * factor, _BEYOND)


def _operand(what: str, size: int) -> int:
    if size > MAX_OPERAND:
        raise Refused(f"{what} of more than {MAX_OPERAND}")
    return size


def _exponent_end(text: str, start: int) -> int:
    """Where an exponent ends that starts there: a bracket, a number with its sign, or one character; and its powers."""
    base = _EXPONENT.match(text, start)
    end = base.end() if base else start
    if base and base[0] in _STEP:
        end = _closing(text, start) + 1
    return _exponent_end(text, end + 1) if text.startswith("^", end) else end


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens there is closed; the text's end if it is not."""
    depth = 0
    for at in range(start, len(text)):
        depth += _STEP.get(text[at], 0)
        if depth <= 0:
            return at
    return len(text)


def _factorial(n: int) -> int:
    value = 1
    for factor in range(2, n + 1):
        value *= factor
        if value > MAX_OPERAND:
            return _BEYOND
    return value


def _power(base: int, exponent: int) -> int:
    if exponent * (base.bit_length() - 1) > MAX_OPERAND.bit_length():
        return _BEYOND
    value: int = base**exponent
    return min(value, _BEYOND)
