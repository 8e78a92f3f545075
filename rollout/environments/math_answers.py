"""Comparison of math answers: as normalized text, as integers, by their units, or as mathematics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rollout.base.errors import EnvError
from rollout.base.yaml_files import read_yaml
from rollout.environments.math_comparer import Comparer, ComparerError
from rollout.environments.math_equality import AnswerComparison
from rollout.environments.math_limits import is_refused
from rollout.environments.math_notation import normalize_answer
from rollout.environments.math_numbers import has_base, number_with_base

CompareMathematics = Callable[[str, str], AnswerComparison]

_INTEGER = re.compile(r"[+-]?\d+|[+-]?\d{1,3}(?:,\d{3})+")
_EQUALS_SIGN = re.compile(r"(?<![<>!:])=")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TUPLE = re.compile(r"\(.*,.*\)")
_NAME = re.compile(r"(?:^|,|\\lor |\\land )([a-zA-Z](?:_\{?\w+\}?)?)=")
_WORD = re.compile(r"[a-zA-Z]{4,}")
_CLOCK = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>[0-5]\d)(?:\\(?:text|mathrm)\{)?(?:(?P<half>[ap])\.?m\.?\}?)?",
    re.IGNORECASE,
)
_TEXT_ON_LOOP_CHARS = 200  # longer answers are compared on another thread
_COMPARER = Comparer()


def compare_answers(given: str, truth: str) -> AnswerComparison:
    """Compare an answer with the truth.

    DIFFERENT is also the result for a given answer that cannot be read, or that is over a limit
    (`is_refused`). UNDECIDED is the result for a truth over a limit, for two words with the same
    letters in another order (which may be products of variables), and if the comparison reached a
    limit of its process. It is also the result for equal answers if math-verify read only a part of
    one of them.

    Six rules are stricter than math-verify's. Every side of a given equation that is a number must
    equal the truth. If both answers name values and one has several names, the names must be the
    same. If both have units (math.yaml), these must be the same. If both are times with am or pm, they
    must be the same time of the day. A given set does not equal a tuple, though a given tuple may
    equal a set. A decimal with fewer than six digits is exact.

    Args:
        given: LaTeX of an answer.
        truth: LaTeX of the right answer.

    Raises:
        EnvError: the process that compares mathematics cannot be started.
    """
    return _compare(given, truth, _compare_as_mathematics)


async def compare_with_any(given: str, truths: Sequence[str]) -> AnswerComparison:
    """Compare an answer with several truths; return the best result.

    Short answers are compared on the event loop if their texts decide, others on a thread.
    """
    with suppress(_NotDecidedByText):
        if len(given) <= _TEXT_ON_LOOP_CHARS:
            return _best_comparison(given, truths, _raise_not_decided)
    return await asyncio.to_thread(_best_comparison, given, truths, _compare_as_mathematics)


def _best_comparison(
    given: str, truths: Sequence[str], compare_mathematics: CompareMathematics
) -> AnswerComparison:
    """Return EQUAL if the answer equals a truth, else UNDECIDED if one is undecided."""
    best = AnswerComparison.DIFFERENT
    if not given:
        return best
    for truth in truths:
        comparison = _compare(given, truth, compare_mathematics)
        if comparison is AnswerComparison.EQUAL:
            return comparison
        if comparison is AnswerComparison.UNDECIDED:
            best = comparison
    return best


def _compare(given: str, truth: str, compare_mathematics: CompareMathematics) -> AnswerComparison:
    """Compare two answers; `compare_mathematics` decides where their normalized texts do not."""
    given = normalize_answer(given)
    truth = normalize_answer(truth)
    if given == truth and truth:
        return AnswerComparison.EQUAL
    if is_refused(truth):
        return AnswerComparison.UNDECIDED
    if is_refused(given):
        return AnswerComparison.DIFFERENT
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(truth):
        return _verdict(equal=int(given.replace(",", "")) == int(truth.replace(",", "")))
    if _WORD.fullmatch(given) and _WORD.fullmatch(truth):
        return _compare_words(given.lower(), truth.lower())
    if has_base(given) or has_base(truth):
        return _verdict(equal=number_with_base(given) == number_with_base(truth))

    given_clock = _CLOCK.fullmatch(given)
    truth_clock = _CLOCK.fullmatch(truth)
    if given_clock and truth_clock and given_clock["half"] and truth_clock["half"]:
        return _verdict(equal=_clock_time(given_clock) == _clock_time(truth_clock))

    given_unit = _unit_powers(given)
    truth_unit = _unit_powers(truth)
    if given_unit and truth_unit and given_unit != truth_unit:
        return AnswerComparison.DIFFERENT

    given_names = set(_NAME.findall(given.lower()))
    truth_names = set(_NAME.findall(truth.lower()))
    # Lists of values with names, such as `x=1,y=2`, must have the same names.
    both_name_values = bool(given_names and truth_names)
    one_names_several = len(given_names) > 1 or len(truth_names) > 1
    if both_name_values and one_names_several and given_names != truth_names:
        return AnswerComparison.DIFFERENT

    given_is_set = given.rpartition("=")[2].startswith("\\{")
    if given_is_set and _TUPLE.fullmatch(truth):
        return AnswerComparison.DIFFERENT

    if "=" not in truth:
        *sides, last_side = _EQUALS_SIGN.split(given)
        for side in filter(_is_numeric, sides):
            comparison = _compare(side, truth, compare_mathematics)
            if comparison is not AnswerComparison.EQUAL:
                return comparison
        if sides and all(map(_is_numeric, sides)):
            return _compare(last_side, truth, compare_mathematics)
    return compare_mathematics(given, truth)


def _compare_words(given: str, truth: str) -> AnswerComparison:
    """Compare two words of four letters or more, which may also be products of their letters."""
    if given == truth:
        return AnswerComparison.EQUAL
    if sorted(given) == sorted(truth):
        return AnswerComparison.UNDECIDED
    return AnswerComparison.DIFFERENT


def _clock_time(clock: re.Match[str]) -> tuple[int, int, str]:
    """Return the hour, the minute and the half of the day, "a" or "p", of a time such as `10:30am`."""
    return int(clock["hour"]), int(clock["minute"]), clock["half"].lower()


def _verdict(*, equal: bool) -> AnswerComparison:
    return AnswerComparison.EQUAL if equal else AnswerComparison.DIFFERENT


def _is_numeric(side: str) -> bool:
    """Return True if a side of an equation has digits and no letters but those of commands."""
    has_letters = any(character.isalpha() for character in _COMMAND.sub("", side))
    return any(character.isdigit() for character in side) and not has_letters


def _compare_as_mathematics(given: str, truth: str) -> AnswerComparison:
    """Compare two normalized answers in a child process."""
    try:
        return _COMPARER.compare(given, truth)
    except ComparerError as error:
        raise EnvError(str(error)) from error


class _NotDecidedByText(Exception):
    """The texts of two answers do not say whether they are equal."""


def _raise_not_decided(given: str, truth: str) -> AnswerComparison:
    raise _NotDecidedByText


_UNIT_NAMES = read_yaml(Path(__file__).with_name("math.yaml"))
_UNITS: dict[str, str] = {unit: unit for unit in _UNIT_NAMES}  # unit by name
for _unit, _names in _UNIT_NAMES.items():
    _UNITS.update(dict.fromkeys(_names, _unit))
_MARKED_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\{([^{}]*)\}")
_DEGREE_SIGN = re.compile(r"\^(?:\\circ ?|\{\\circ ?\})")
_UNIT_QUOTIENT = re.compile(r"\\frac\{(~[^{}]*)\}\{(~[^{}]*)\}$")
_UNIT_PARTS = r"(?:[~/]*[a-zA-Z]+(?:\^\{?-?\d\}?)?)+$"
_UNIT_SUFFIX = re.compile(rf"~{_UNIT_PARTS}|(?<=\d){_UNIT_PARTS}")
_UNIT_PART = re.compile(r"([~/]*)(square|sq|cubic)?([a-zA-Z]+)(?:\^\{?(-?\d))?")
_POWER_OF_WORD = {"": 1, "square": 2, "sq": 2, "cubic": 3}


def _unit_powers(normalized: str) -> dict[str, int]:
    """Return the units at the end of an answer with their powers.

    Returns:
        Power by unit, such as {"m": 1, "s": -2}; {} without units, or if one of them is not in math.yaml.
    """
    suffix = _UNIT_SUFFIX.search(_write_units_plainly(normalized))
    if suffix is None:
        return {}

    powers: dict[str, int] = {}
    for separator, power_word, name, exponent in _UNIT_PART.findall(suffix[0]):
        unit = _known_unit(name, exponent)
        if unit is None:
            return {}
        power = int(exponent) if exponent else _POWER_OF_WORD[power_word]
        if "/" in separator:  # the slash divides by this unit only
            power = -power
        powers[unit] = powers.get(unit, 0) + power
    return powers


def _write_units_plainly(normalized: str) -> str:
    """Rewrite units in LaTeX: `5\\text{mpers}` becomes `5~m/s`, and `5^\\circ` becomes `5~degree`.

    A `~` marks where a rewritten unit begins; a normalized answer itself has no `~`.
    """
    text = _MARKED_TEXT.sub(lambda match: "~" + match[1].replace("per", "/"), normalized)
    text = _DEGREE_SIGN.sub("~degree", text).replace("\\%", "~percent")
    text = text.replace("\\cdot~", "~")
    return _UNIT_QUOTIENT.sub(r"\1/\2", text)


def _known_unit(name: str, exponent: str) -> str | None:
    """Return the unit of this name, also in the plural; None if it is not known."""
    word = name.lower().replace("metre", "meter")
    if word in _UNITS:
        return _UNITS[word]
    if exponent.startswith("-"):
        # A normalized answer has no spaces, so `m s^{-1}` is `ms^{-1}`: metres per second, no plural.
        return None
    return _UNITS.get(word.removesuffix("s"))
