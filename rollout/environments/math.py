"""Math environment: an exact answer in `\\boxed{}`, scored 1 or 0; agents may run programs first."""

from __future__ import annotations

from rollout.base.errors import Undecided, Unscorable
from rollout.environments.math_answers import compare_with_any
from rollout.environments.math_equality import AnswerComparison
from rollout.environments.math_limits import is_refused
from rollout.environments.math_notation import last_boxed, normalize_answer
from rollout.environments.protocol import Step
from rollout.environments.running import CalculatingEnv
from rollout.records.trajectory import Task

_SHOWN_CHARS = 60  # length of a shown answer in an error


class MathEnv(CalculatingEnv):
    """Math task in one step: the text's boxed answer is compared with the task's answers."""

    def reset(self, task: Task) -> str:
        self.task = task
        return task.prompt

    async def step(self, action: str) -> Step:
        """Score the solver's text: reward 1 for the right answer, 0 otherwise.

        Metrics: `answered` is 1 if the text has an answer; `refused` is 1 if the answer is over a limit
        and therefore wrong, and is left out otherwise.

        Raises:
            Unscorable: the task has no answer.
            EnvError: answers cannot be compared on this machine.
            Undecided: the answer may be right; no answer of the task is known to be equal.
        """
        if not self.task.answers:
            raise Unscorable(f"task {self.task.id} has no answers; a math task needs at least one")
        given = last_boxed(action) or ""
        comparison = await compare_with_any(given, self.task.answers)
        if comparison is AnswerComparison.UNDECIDED:
            shown = given if len(given) <= _SHOWN_CHARS else f"{given[:_SHOWN_CHARS]}..."
            raise Undecided(f"task {self.task.id}: it cannot be decided whether '{shown}' is right")

        is_right = comparison is AnswerComparison.EQUAL
        answer = normalize_answer(given)
        metrics = {"answered": float(bool(given))}
        if given and not is_right and is_refused(answer):
            metrics["refused"] = 1.0
        return Step(reward=float(is_right), done=True, answer=answer, metrics=metrics)

    async def preview(self, action: str) -> Step:
        """Score a text without taking a step; a step changes nothing either."""
        return await self.step(action)

    async def same(self, answer: str, other: str) -> bool:
        """Return True if two answers are known to be equal; undecided ones are not."""
        return await compare_with_any(answer, (other,)) is AnswerComparison.EQUAL
