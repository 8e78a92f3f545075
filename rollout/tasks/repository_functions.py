"""Functions of generated repositories: correct ones, each with variants that have one bug.

Agents see the source of the functions below the helpers, so these functions have no annotations.
`_chunks_dropped` is the bug `dropped` of `chunks`: agents see its body under the name and docstring of
`chunks`. A decorator must fit on one line, because exactly one line is stripped.
"""

# mypy: disable-error-code="no-untyped-def, var-annotated"

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

_Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class FunctionBug:
    """Variant of a function with one bug.

    Attributes:
        function: the variant.
        complaint: sentence of a user about it.
    """

    function: _Function
    complaint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionWithBugs:
    """Correct function and its variants with one bug each.

    Attributes:
        correct: the correct function.
        draw_arguments: draws arguments, which are JSON values.
        bugs: variants by the name of their bug.
    """

    correct: _Function
    draw_arguments: Callable[[Random], tuple[Any, ...]]
    bugs: dict[str, FunctionBug] = field(default_factory=dict)


FUNCTIONS_WITH_BUGS: list[FunctionWithBugs] = []


def _correct(
    draw_arguments: Callable[[Random], tuple[Any, ...]],
) -> Callable[[_Function], _Function]:
    """Register a correct function."""

    def register(function: _Function) -> _Function:
        FUNCTIONS_WITH_BUGS.append(
            FunctionWithBugs(correct=function, draw_arguments=draw_arguments)
        )
        return function

    return register


def _bug(complaint: str) -> Callable[[_Function], _Function]:
    """Register a variant, with one bug, of the last correct function above it."""

    def register(function: _Function) -> _Function:
        family = FUNCTIONS_WITH_BUGS[-1]
        name = function.__name__.removeprefix(f"_{family.correct.__name__}_")
        family.bugs[name] = FunctionBug(function, complaint)
        return function

    return register


def _draw_numbers(random: Random, min_length: int = 0) -> list[int]:
    return [random.randint(-9, 9) for _ in range(random.randint(min_length, 8))]


def _draw_intervals(random: Random) -> list[list[int]]:
    starts = [random.randint(0, 12) for _ in range(random.randint(0, 4))]
    return [[start, start + random.randint(1, 6)] for start in starts]


@_correct(lambda r: (_draw_numbers(r), r.randint(1, 4)))
def window_sums(values, size):
    """The sum of every run of `size` neighbouring values, from left to right."""
    return [sum(values[i : i + size]) for i in range(len(values) - size + 1)]


@_bug("The last window is missing from the result.")
def _window_sums_short(values, size):
    return [sum(values[i : i + size]) for i in range(len(values) - size)]


@_bug("There are too many windows: the last ones have fewer values than asked for.")
def _window_sums_long(values, size):
    return [sum(values[i : i + size]) for i in range(len(values))]


@_correct(lambda r: (_draw_intervals(r),))
def merge_intervals(intervals):
    """Sorted intervals [start, end] that cover the same as `intervals`; touching ones become one."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


@_bug("Intervals like [1, 2] and [2, 3] stay apart.")
def _merge_intervals_touching(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


@_bug("An interval within a longer one cuts the longer one off.")
def _merge_intervals_inside(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    return merged


@_correct(lambda r: (_draw_numbers(r), r.randint(1, 4)))
def chunks(values, size):
    """The values in lists of `size`; the last one may be shorter."""
    return [values[i : i + size] for i in range(0, len(values), size)]


@_bug("Values at the end get lost when their number is no multiple of the size.")
def _chunks_dropped(values, size):
    return [values[i : i + size] for i in range(0, len(values) - size + 1, size)]


@_bug("Some values are in two lists.")
def _chunks_overlapping(values, size):
    return [values[i : i + size] for i in range(0, len(values), size - 1 or 1)]


@_correct(lambda r: (_draw_numbers(r), r.randint(0, 10)))
def rotate(values, places):
    """The values moved to the right by `places`, those at the end to the front."""
    if not values:
        return []
    places %= len(values)
    return values[len(values) - places :] + values[: len(values) - places]


@_bug("Values move in the wrong direction.")
def _rotate_left(values, places):
    if not values:
        return []
    places %= len(values)
    return values[places:] + values[:places]


@_bug("Moving by more places than there are values repeats or loses some.")
def _rotate_far(values, places):
    if not values:
        return []
    return values[len(values) - places :] + values[: len(values) - places]


@_correct(lambda r: (r.choice((0, r.randint(1, 60))), r.randint(2, 9)))
def in_base(number, base):
    """A number from 0 on, in a base from 2 to 10, as text."""
    digits = ""
    while number:
        digits = str(number % base) + digits
        number //= base
    return digits or "0"


@_bug("Zero comes out as an empty text.")
def _in_base_zero(number, base):
    digits = ""
    while number:
        digits = str(number % base) + digits
        number //= base
    return digits


@_bug("The digits are in the wrong order.")
def _in_base_reversed(number, base):
    digits = ""
    while number:
        digits = digits + str(number % base)
        number //= base
    return digits or "0"


@_correct(lambda r: (_draw_numbers(r, 1),))
def middle(values):
    """The median of some numbers: the mean of the two in the middle where their count is even."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


@_bug("With an even number of values the result is one of them.")
def _middle_upper(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half]


@_bug("The result depends on the order of the values.")
def _middle_unsorted(values):
    half = len(values) // 2
    if len(values) % 2:
        return values[half]
    return (values[half - 1] + values[half]) / 2


@_correct(lambda r: (_draw_numbers(r), r.randint(-6, -1), r.randint(1, 6)))
def clipped(values, low, high):
    """The values, those below `low` as `low` and those above `high` as `high`."""
    return [min(max(value, low), high) for value in values]


@_bug("Values that are too small are left as they are.")
def _clipped_low(values, low, high):
    return [min(value, high) for value in values]


@_bug("The result has fewer values than there were.")
def _clipped_out(values, low, high):
    return [value for value in values if low <= value <= high]


@_correct(lambda r: ("".join(r.choice("aab") for _ in range(r.randint(0, 7))),))
def runs(text):
    """Each run of equal letters as the letter and how often it stands there: "aab" is "a2b1"."""
    found = []
    for letter in text:
        if found and found[-1][0] == letter:
            found[-1][1] += 1
        else:
            found.append([letter, 1])
    return "".join(f"{letter}{count}" for letter, count in found)


@_bug("A letter that stands alone has no number.")
def _runs_ones(text):
    found = []
    for letter in text:
        if found and found[-1][0] == letter:
            found[-1][1] += 1
        else:
            found.append([letter, 1])
    return "".join(f"{letter}{count if count > 1 else ''}" for letter, count in found)


@_bug("Runs of the same letter with others between them are counted together.")
def _runs_apart(text):
    found = {}
    for letter in text:
        found[letter] = found.get(letter, 0) + 1
    return "".join(f"{letter}{count}" for letter, count in found.items())
