"""Numbers in the notations of people and programs, rewritten as LaTeX that math-verify reads."""

import re
from decimal import Decimal

_MAX_PLAIN_EXPONENT = 40  # greater powers of ten are written as powers
_BASE_NAMES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "eleven": 11,
    "twelve": 12,
    "sixteen": 16,
}
_BASES_OF_PREFIXES = {"x": 16, "b": 2, "o": 8}
_MAGNITUDES = {
    "dozen": "12",
    "hundred": "100",
    "thousand": "1000",
    "million": "10^{6}",
    "billion": "10^{9}",
    "trillion": "10^{12}",
}
# Words behind a number that are not a unit: they change it, or are a function.
_MATH_WORDS = {
    "and",
    "base",
    "cos",
    "cot",
    "cubed",
    "exp",
    "factorial",
    "fifths",
    "fourths",
    "half",
    "halves",
    "infinity",
    "infty",
    "less",
    "log",
    "minus",
    "mod",
    "more",
    "of",
    "or",
    "over",
    "plus",
    "pi",
    "quarters",
    "sin",
    "sqrt",
    "squared",
    "tan",
    "than",
    "thirds",
    "times",
    "to",
}
_BASE = rf"(?P<base>\d+|{'|'.join(_BASE_NAMES)})"
_MARK = r"\\(?:text|textrm|mathrm|mbox)"

_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,4})(?!\w|\.\d)")
# `0.1\overline{6}`, `0.1\bar6`, `0.(16)`, and `0.\dot{1}4\dot{2}` with dots over the first and last digit.
_REPEATING = re.compile(
    r"(?<![\d.])(?P<whole>\d{0,20})\.(?P<fixed>\d{0,20})"
    r"(?:\\(?:overline|bar)\s*(?:\{(?P<line>\d{1,20})\}|(?P<digit>\d))|(?<=\.)\((?P<bracket>\d{1,20})\)"
    r"|\\dot\s*\{?(?P<first>\d)\}?(?:(?P<middle>\d{0,18})\\dot\s*\{?(?P<last>\d)\}?)?)"
)
_COMPLEX_LITERAL = re.compile(r"\s*\(?([-+]?[\d.]+\s*[-+]\s*[\d.]+)j\)?\s*")
_FRACTION_CALL = re.compile(r"(?:Fraction|Rational)\(\s*(-?\d+)\s*,\s*(-?\d+)\s*\)")
_PERCENT = re.compile(rf"(?<=[\d)}}])\s*(?:{_MARK}\{{\s*per\s?cent\s*\}}|per\s?cent(?![a-z]))")
_MAGNITUDE = re.compile(
    rf"(?<=[\d}})])\s*(?:{_MARK}\{{\s*)?(?P<name>{'|'.join(_MAGNITUDES)})s?(?![a-z])(?P<rest>[a-z ]*)\}}?"
)
_COUNT = re.compile(
    r"\s*([-+]?\d[\d.,]*(?:(?:\s+\d+)?\s*/\s*\d+)?)\s+([a-z]{3,}(?:\s+[a-z]+)*)\.?\s*"
)
_BASE_SUBSCRIPT = re.compile(
    rf"(?<=[\w)])_\s*\{{?\s*(?:{_MARK}\s*\{{\s*)?{_BASE}(?!\w)\s*\}}{{0,2}}"
)
_BASE_WORD = re.compile(
    rf"(?<=[0-9A-Fa-f])\s*(?:{_MARK}\{{)?\s*\(?(?:in\s+)?base[\s-]+(?:{_MARK}\{{)?{_BASE}(?!\w)\)?\s*\}}?"
)
_DIGITS_IN_BRACKETS = re.compile(r"\(([0-9A-Za-z.]+)\)(?=_)")
_PREFIXED = re.compile(r"(?<![\w.])0([xbo])([0-9a-fA-F]+)(?!\w)")
_NUMBER_WITH_BASE = re.compile(r"([0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)_(?:\{(\d+)\}|(\d))")
_DECIMAL = re.compile(r"\d+(?:\.\d+)?")
_THOUSANDS = re.compile(r"(\d{1,3}(?:,\d{3})+)(?=_|$)")


def rewrite_numbers(text: str) -> str:
    """Return an answer whose numbers are plain decimals, fractions and powers.

    These are rewritten: `1.5e-7`, repeating decimals such as `0.1\\overline{6}`, Python's complex
    numbers and fractions, `percent`, `million`, counts such as `5 apples`, and bases in words or
    with Python's prefixes.
    """
    text = _EXPONENT.sub(lambda match: _write_exponent(match[1], int(match[2])), text)
    text = _REPEATING.sub(_write_repeating, text)
    text = _FRACTION_CALL.sub(r"(\\frac{\1}{\2})", text)
    text = _PERCENT.sub(r"\\%", text)
    text = _MAGNITUDE.sub(_write_magnitude, text)
    count = _COUNT.fullmatch(text)
    if count and _MATH_WORDS.isdisjoint(count[2].split()):
        text = f"{count[1]}\\text{{ {count[2]}}}"
    complex_literal = _COMPLEX_LITERAL.fullmatch(text)
    if complex_literal:
        text = f"{complex_literal[1]}i"
    text = _BASE_WORD.sub(_write_base, text)
    text = _PREFIXED.sub(lambda match: f"{match[2]}_{{{_BASES_OF_PREFIXES[match[1]]}}}", text)
    text = _BASE_SUBSCRIPT.sub(_write_base, text)
    return _DIGITS_IN_BRACKETS.sub(r"\1", text)


def number_with_base(text: str) -> tuple[str, int] | None:
    """Return the digits and the base of a number such as `1101_2`.

    A decimal without a base has base 10. For other texts the result is None, also for a
    variable with an index, such as `x_1`: its letter is no digit of the base.
    """
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    if _DECIMAL.fullmatch(text):
        return text.lstrip("0") or "0", 10
    match = _NUMBER_WITH_BASE.fullmatch(text)
    if match is None:
        return None
    digits, braced_base, short_base = match.groups()
    base = int(braced_base or short_base)
    letters = [digit for digit in digits if digit.isalpha()]
    if any(base > 36 or int(letter, 36) >= base for letter in letters):
        return None
    return digits.lower().lstrip("0") or "0", base


def has_base(text: str) -> bool:
    """Return True if a text is a number with a base, such as `1101_2`."""
    return "_" in text and number_with_base(text) is not None


def _write_exponent(mantissa: str, exponent: int) -> str:
    if abs(exponent) > _MAX_PLAIN_EXPONENT:
        return f"{mantissa}\\times10^{{{exponent}}}"
    return f"{Decimal(mantissa).scaleb(exponent):f}"


def _write_repeating(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction: 0.1666... is (16 - 1) / 90."""
    period = match["line"] or match["digit"] or match["bracket"]
    if period is None:
        period = f"{match['first']}{match['middle'] or ''}{match['last'] or ''}"
    digits_before_period = f"0{match['whole']}{match['fixed']}"
    numerator = int(f"{digits_before_period}{period}") - int(digits_before_period)
    denominator = (10 ** len(period) - 1) * 10 ** len(match["fixed"])
    return f"(\\frac{{{numerator}}}{{{denominator}}})"


def _write_magnitude(match: re.Match[str]) -> str:
    """Return a word such as `million` as a factor, with the unit after it as text."""
    unit = match["rest"].strip()
    factor = f"\\times {_MAGNITUDES[match['name']]}"
    return f"{factor}\\text{{ {unit}}}" if unit else factor


def _write_base(match: re.Match[str]) -> str:
    base = match["base"]
    return f"_{{{_BASE_NAMES.get(base, base)}}}"
