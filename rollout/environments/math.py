"""Math environment: an exact answer in `\\boxed{}`, scored 1 or 0; agents may run programs on the way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from mcore_mas.rollout.base.errors import EnvError, Undecided
from mcore_mas.rollout.environments.math_equality import (
    AnswerComparison,
    AnswerRefused,
    Comparer,
    ComparerError,
    check_answer,
)
from mcore_mas.rollout.environments.protocol import Step
from mcore_mas.rollout.environments.running import CalculatingEnv
from mcore_mas.rollout.records.trajectory import Task

_BOX = "\\boxed{"
_THOUGHT = "</think>"
_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\(?:left|right)(?![a-zA-Z])|\\?\$|(?P<command>\\[a-zA-Z]+)\s+(?=[a-zA-Z])|\s")
_INTEGER = re.compile(r"[+-]?\d+|[+-]?\d{1,3}(?:,\d{3})+")
_SHOWN_CHARS = 60  # of an answer in an error
_COMPARER = Comparer()


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` after any thought, with balanced braces, None when there is none.

    A last box that never closes is no answer, even when an earlier one closed.
    """
    text = text.rpartition(_THOUGHT)[2]
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
    what the truth itself makes too much, and what ran into a limit of the comparing process.

    Raises:
        ComparerError: the process that compares mathematics cannot be started.
    """
    given, truth = _normalise(given), _normalise(truth)
    if given == truth and truth:
        return AnswerComparison.EQUAL
    if _refused(truth):
        return AnswerComparison.UNDECIDED
    if _refused(given):
        return AnswerComparison.DIFFERENT
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(truth):
        same = int(given.replace(",", "")) == int(truth.replace(",", ""))
        return AnswerComparison.EQUAL if same else AnswerComparison.DIFFERENT
    return _COMPARER.compare(given, truth)


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
        try:
            found = await asyncio.to_thread(_compare_any, given, self.task.answers)
        except ComparerError as error:
            raise EnvError(str(error)) from error
        if found is AnswerComparison.UNDECIDED:
            raise Undecided(f"task {self.task.id}: it cannot be decided whether '{_short(given)}' is right")
        right = found is AnswerComparison.EQUAL
        metrics = {"answered": float(bool(given))}
        if given and not right and _refused(_normalise(given)):
            metrics["refused"] = 1.0
        return Step(reward=float(right), done=True, answer=_normalise(given), metrics=metrics)

    async def preview(self, action: str) -> Step:
        return await self.step(action)  # which changes nothing

    async def same(self, answer: str, other: str) -> bool:
        """Whether two answers are known to be mathematically equal; undecided ones do not agree.

        Raises:
            EnvError: they cannot be compared on this machine.
        """
        try:
            return await asyncio.to_thread(compare_answers, answer, other) is AnswerComparison.EQUAL
        except ComparerError as error:
            raise EnvError(str(error)) from error


def _compare_any(given: str, truths: Sequence[str]) -> AnswerComparison:
    found = AnswerComparison.DIFFERENT
    for truth in truths if given else ():
        one = compare_answers(given, truth)
        if one is AnswerComparison.EQUAL:
            return one
        if one is AnswerComparison.UNDECIDED:
            found = one
    return found


def _refused(normalised: str) -> bool:
    try:
        check_answer(normalised)
    except AnswerRefused:
        return True
    return False


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _normalise(answer: str) -> str:
    text = answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("**", "^")
    text = _SPACING.sub(lambda found: f"{command} " if (command := found["command"]) else "", text)
    return text.rstrip(".").removeprefix("+")
