"""Math environment: an exact answer in `\\boxed{}`, scored 1 or 0; agents may run programs on the way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rollout.base.errors import EnvError, Undecided
from rollout.base.yaml_files import read_yaml
from rollout.environments.math_equality import AnswerComparison, Comparer, ComparerError, is_refused
from rollout.environments.protocol import Step
from rollout.environments.running import CalculatingEnv
from rollout.records.trajectory import Task

_BOX = "\\boxed{"
_SPACING = re.compile(
    r"(?<!\\)\\[,;:! ]|\\(?:left|right)(?![a-zA-Z])|\\?\$|(?P<command>\\[a-zA-Z]+)\s+(?=[a-zA-Z])|\s"
)
_INTEGER = re.compile(r"[+-]?\d+|[+-]?\d{1,3}(?:,\d{3})+")
_SHOWN_CHARS = 60  # of an answer in an error
_COMPARER = Comparer()


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` after any thought, with balanced braces, None when there is none.

    A last box that never closes is no answer, even when an earlier one closed.
    """
    text = text.rpartition("</think>")[2]
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 0
    for end in range(start + len(_BOX) - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len(_BOX) : end].strip()
    return None


def compare_answers(given: str, truth: str) -> AnswerComparison:
    """Whether an answer is the truth: as normalised text, as integers, or as mathematics.

    A given answer that cannot be understood, or that asks for too much before it is read, is different. Undecided is
    what the truth itself makes too much, and what ran into a limit of the comparing process. Four rules are stricter
    than math-verify: every side of an equation that is a number has to be the truth; of two units of length, mass, time
    or angle, or powers and quotients of them, both are the same; a set is no tuple; a decimal is an exact truth only
    if 15 digits of it are.

    Raises:
        EnvError: the process that compares mathematics cannot be started.
    """
    return _compare(given, truth, _as_mathematics)


def _compare(
    given: str, truth: str, otherwise: Callable[[str, str], AnswerComparison]
) -> AnswerComparison:
    """As `compare_answers`; `otherwise` compares normalised answers that their texts do not decide."""
    given, truth = _normalise(given), _normalise(truth)
    if given == truth and truth:
        return AnswerComparison.EQUAL
    if is_refused(truth):
        return AnswerComparison.UNDECIDED
    if is_refused(given):
        return AnswerComparison.DIFFERENT
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(truth):
        same = int(given.replace(",", "")) == int(truth.replace(",", ""))
        return AnswerComparison.EQUAL if same else AnswerComparison.DIFFERENT
    if _unit(given) != _unit(truth) and _unit(given) and _unit(truth):
        return AnswerComparison.DIFFERENT
    if given.rpartition("=")[2].startswith("\\{") and _TUPLE.fullmatch(truth):
        return AnswerComparison.DIFFERENT
    if "=" not in truth:
        for side in _EQUATION.split(given)[:-1]:
            number = any(map(str.isdigit, side)) and not any(
                map(str.isalpha, _COMMAND.sub("", side))
            )
            if number and (found := _compare(side, truth, otherwise)) is not AnswerComparison.EQUAL:
                return found
    return otherwise(given, truth)


def _as_mathematics(given: str, truth: str) -> AnswerComparison:
    """By the comparing process."""
    try:
        return _COMPARER.compare(given, truth)
    except ComparerError as error:
        raise EnvError(str(error)) from error


class _NotAsText(Exception):
    """The texts of two answers do not say whether they are equal."""


def _as_text(given: str, truth: str) -> AnswerComparison:
    raise _NotAsText


_AT_ONCE_CHARS = 200  # of an answer that is compared as text on the event loop


async def _compare_any(given: str, truths: Sequence[str]) -> AnswerComparison:
    """How an answer compares with the nearest truth: at once where texts say it, else in a thread."""
    with suppress(_NotAsText):
        if len(given) <= _AT_ONCE_CHARS:
            return _nearest(given, truths, _as_text)
    return await asyncio.to_thread(_nearest, given, truths, _as_mathematics)


def _nearest(
    given: str, truths: Sequence[str], otherwise: Callable[[str, str], AnswerComparison]
) -> AnswerComparison:
    found = AnswerComparison.DIFFERENT
    for truth in truths if given else ():
        one = _compare(given, truth, otherwise)
        if one is AnswerComparison.EQUAL:
            return one
        if one is AnswerComparison.UNDECIDED:
            found = one
    return found


_EQUATION = re.compile(r"(?<![<>!:])=")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TUPLE = re.compile(r"\(.*,.*\)")
_NAMES = read_yaml(Path(__file__).with_suffix(".yaml"))
_UNITS: dict[str, str] = {name: unit for unit, names in _NAMES.items() for name in (unit, *names)}
_MARKED = re.compile(r"\\(?:text|textrm|mathrm|mbox)\{([^{}]*)\}")
_QUOTIENT = re.compile(r"\\frac\{(~[^{}]*)\}\{(~[^{}]*)\}$")
_PARTS = r"(?:[~/]*[a-zA-Z]+(?:\^\{?-?\d\}?)?)+$"
_UNIT = re.compile(rf"~{_PARTS}|(?<=\d){_PARTS}")
_PART = re.compile(r"([~/]*)(square|sq|cubic)?([a-zA-Z]+)(?:\^\{?(-?\d))?")


def _unit(normalised: str) -> dict[str, int]:
    """The units that an answer ends with, each with its power; {} without one, or where one is not known."""
    text = _MARKED.sub(lambda found: "~" + found[1].replace("per", "/"), normalised).replace(
        "\\cdot~", "~"
    )
    end = _UNIT.search(_QUOTIENT.sub(r"\1/\2", text).replace("²", "^2").replace("³", "^3"))
    powers: dict[str, int] = {}
    for before, area, name, power in _PART.findall(end[0]) if end else ():
        word = name.lower().replace("metre", "meter")
        unit = _UNITS.get(word) or (
            power[:1] != "-" and _UNITS.get(word.removesuffix("s"))
        )  # `m s^{-1}` is no plural
        if not unit:
            return {}
        size = int(power or {"": 1, "cubic": 3}.get(area, 2))
        powers[unit] = powers.get(unit, 0) + (-size if "/" in before else size)
    return powers


class MathEnv(CalculatingEnv):
    """A math task in one step: the text's boxed answer is compared with the task's answers."""

    def reset(self, task: Task) -> str:
        self.task = task
        return task.prompt

    async def step(self, action: str) -> Step:
        """Score the solver's text: reward 1 for the right answer, 0 otherwise.

        Metrics: `answered`, whether it had an answer, and `refused`, 1, where that is over a limit and so wrong.

        Raises:
            EnvError: the task has no answer, or answers cannot be compared on this machine;
                `Undecided` when none of the task's answers is known to be equal and one is not known to be different.
        """
        if not self.task.answers:
            raise EnvError(f"task {self.task.id} has no answers; a math task needs at least one")
        given = last_boxed(action) or ""
        found = await _compare_any(given, self.task.answers)
        if found is AnswerComparison.UNDECIDED:
            shown = given if len(given) <= _SHOWN_CHARS else f"{given[:_SHOWN_CHARS]}..."
            raise Undecided(f"task {self.task.id}: it cannot be decided whether '{shown}' is right")
        right = found is AnswerComparison.EQUAL
        metrics = {"answered": float(bool(given))}
        if given and not right and is_refused(_normalise(given)):
            metrics["refused"] = 1.0
        return Step(reward=float(right), done=True, answer=_normalise(given), metrics=metrics)

    async def preview(self, action: str) -> Step:
        return await self.step(action)  # which changes nothing

    async def same(self, answer: str, other: str) -> bool:
        """Whether two answers are known to be mathematically equal; undecided ones do not agree."""
        return await _compare_any(answer, (other,)) is AnswerComparison.EQUAL


def _normalise(answer: str) -> str:
    text = answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("**", "^")
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = _SPACING.sub(lambda found: f"{command} " if (command := found["command"]) else "", text)
    return text.rstrip(".").removeprefix("+")
