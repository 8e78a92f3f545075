"""Code environment (programming problems): programs are run on visible and hidden tests in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from rollout.base.errors import EnvError
from rollout.environments.protocol import Case, Step, ToolCall, last_tag
from rollout.environments.running import SandboxedEnv
from rollout.records.trajectory import Task
from rollout.sandbox.judge import CallTest, CompareBy, StdinTest, Test, judge_all
from rollout.sandbox.records import ENDINGS, RunResult, Verdict

_THOUGHT = "</think>"
_FENCE = re.compile(
    r"^```(?:python|py|python3)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
SOLUTION = '{"solution":'  # with which an answer begins that is a program and no test
_SHOWN_CHARS = 400  # of an input, an expected or a given output, in what a model reads
_WORDS = {**ENDINGS, Verdict.WA: "wrong answer", Verdict.RE: "failed"}


def last_program(text: str) -> str | None:
    """The last closed fenced block after any thought, None when there is none or it is blank."""
    blocks = _FENCE.findall(text.rpartition(_THOUGHT)[2])
    return blocks[-1] if blocks and blocks[-1].strip() else None


def pack_test(test: Test, *, visible: bool) -> str:
    """A test as one of a task's `answers`; only a visible one is ever shown to a model."""
    return json.dumps(asdict(test) | {"visible": visible})


def unpack_test(text: str) -> tuple[Test, bool]:
    """A test and whether it is visible; ValueError if the text is no packed test."""
    try:
        fields = json.loads(text)
        visible = bool(fields["visible"])
        if "stdin" in fields:
            return StdinTest(stdin=fields["stdin"], expected=fields["expected"]), visible
        accepted = tuple(fields["accepted"])
        return CallTest(
            function=fields["function"], arguments=tuple(fields["arguments"]), accepted=accepted
        ), visible
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"not a test of a program: {text[:80]!r} ({type(error).__name__})"
        ) from error


def pack_solution(program: str) -> str:
    """A program that solves the task, as one of its `answers`; no model ever sees it."""
    return json.dumps({"solution": program})


@dataclass(frozen=True, slots=True)
class _Answers:
    visible: list[Test]
    hidden: list[Test]
    solution: str | None

    @classmethod
    def of(cls, task: Task) -> _Answers:
        """What the task's answers say; EnvError if they cannot be read, or there is no test among them."""
        solution, tests = None, []
        try:
            for text in task.answers:
                if text.startswith(SOLUTION):
                    solution = str(json.loads(text)["solution"])
                else:
                    tests.append(unpack_test(text))
        except ValueError as error:
            raise EnvError(f"task {task.id}: {error}") from error
        if not tests:
            raise EnvError(f"task {task.id} has no tests; a code task needs at least one")
        hidden = [test for test, shown in tests if not shown]
        return cls([test for test, shown in tests if shown], hidden, solution)

    def read(self, cases: Sequence[Case]) -> list[Test]:
        """An agent's tests in the form of the task's own; those that do not have it are left out.

        Where the task calls a function, a case is its arguments as a JSON list, and its result as JSON.
        """
        own = (self.hidden or self.visible)[0]
        if isinstance(own, StdinTest):
            return [StdinTest(stdin=f"{given}\n", expected=expected) for given, expected in cases]
        read: list[Test] = []
        for given, expected in cases:
            try:
                arguments, result = json.loads(given), json.loads(expected)
            except ValueError:
                continue
            if isinstance(arguments, list):
                read.append(
                    CallTest(function=own.function, arguments=tuple(arguments), accepted=(result,))
                )
        return read


@dataclass(eq=False, kw_only=True)
class CodeEnv(SandboxedEnv):
    """A programming problem, scored by its tests in a sandbox.

    `<run>` around a fenced program tries it on the visible tests and shows what went wrong. Any other text ends the
    trajectory: its last fenced program is scored on the hidden tests, or on the visible ones if there are no others.
    Metrics: `pass_rate`, `solved` (1 when every test is), `answered` (there was a program), `tests`, `runs`; of a try
    `visible_rate`, 1 without visible tests.

    Args:
        compare: how printed output is compared.
        reward: `all`, 1 when every test passes, else 0; or `rate`, the fraction that does.
        max_tests: score on so many tests, those with the longest inputs; 0 is all.
    """

    compare: CompareBy = "tokens"
    reward: Literal["all", "rate"] = "all"
    max_tests: NonNegativeInt = 0
    cpu_s: PositiveInt = 6
    _runs: int = field(default=0, init=False)

    def reset(self, task: Task) -> str:
        self.task, self._runs = task, 0
        return task.prompt

    async def step(self, action: str) -> Step:
        """Try a program, or score the last one of the text."""
        step = await self.preview(action)
        if not step.done:
            self._runs += 1
        return step

    async def preview(self, action: str) -> Step:
        answers = _Answers.of(self.task)
        text = action.rpartition(_THOUGHT)[2]
        tried = last_tag(text, "run")
        if (
            tried is not None and last_tag(_FENCE.sub("", text), "run") is not None
        ):  # one in a program is no tag
            program = last_program(tried) or last_program(text) or tried
            step = await self._try(program, answers.visible, "There are no visible tests.")
            rate = 1.0 if not answers.visible else step.metrics["check_rate"]
            return replace(step, metrics={"runs": float(self._runs + 1), "visible_rate": rate})
        tests = answers.hidden or answers.visible
        if self.max_tests:  # the hardest; of equals in their order
            tests = sorted(tests, key=lambda test: -len(_input(test)))[: self.max_tests]
        return await self._score(last_program(action), tests)

    async def check(self, program: str, cases: Sequence[Case]) -> Step:
        """Run a program on an agent's tests (see `PlayedEnv`); a test that is not of the task's form does not pass."""
        tests = _Answers.of(self.task).read(cases)
        step = await self._try(program, tests, "None of the tests can be used.")
        rate = step.metrics["check_rate"] * len(tests) / max(len(cases), 1)
        return replace(step, metrics={"check_rate": rate})

    async def agreement(self, cases: Sequence[Case]) -> float | None:
        answers = _Answers.of(self.task)
        if answers.solution is None:
            return None
        return _passed(await self._judge(answers.solution, answers.read(cases))) / max(
            len(cases), 1
        )

    async def _judge(self, program: str, tests: Sequence[Test]) -> list[RunResult]:
        return await judge_all(
            self.runner, program, tests, compare=self.compare, limits=self.limits
        )

    async def _try(self, program: str, tests: Sequence[Test], nothing: str) -> Step:
        judged = await self._judge(program, tests)
        lines = [
            _report(number, *pair)
            for number, pair in enumerate(zip(tests, judged, strict=True), start=1)
        ]
        observation = "\n".join(lines) or nothing
        rate = _passed(judged) / max(len(tests), 1)
        call = ToolCall(tool="run", query=program, result=observation)
        return Step(observation=observation, tools=(call,), metrics={"check_rate": rate})

    async def _score(self, program: str | None, tests: Sequence[Test]) -> Step:
        judged = [] if program is None else await self._judge(program, tests)
        rate = _passed(judged) / len(tests)
        solved = float(rate == 1)
        metrics = {"pass_rate": rate, "solved": solved, "answered": float(program is not None)}
        counts = {"tests": float(len(tests)), "runs": float(self._runs)}
        reward = solved if self.reward == "all" else rate
        return Step(
            reward=reward, done=True, answer=(program or "").strip(), metrics=metrics | counts
        )


def _passed(judged: Sequence[RunResult]) -> int:
    return sum(one.verdict is Verdict.OK for one in judged)


def _input(test: Test) -> str:
    return test.stdin if isinstance(test, StdinTest) else json.dumps(test.arguments)


def _report(number: int, test: Test, judged: RunResult) -> str:
    """What a model reads about its program on a visible test."""
    if judged.verdict is Verdict.OK:
        return f"Test {number}: passed"
    expected = test.expected if isinstance(test, StdinTest) else json.dumps(test.accepted[0])
    lines = [
        f"Test {number}: {_WORDS[judged.verdict]}",
        f"Input: {_short(_input(test))}",
        f"Expected: {_short(expected)}",
    ]
    if judged.verdict is Verdict.WA:
        lines.append(f"Output: {_short(judged.stdout)}")
    elif judged.stderr:
        lines.append(f"Error: {judged.stderr.strip()[-_SHOWN_CHARS:]}")
    return "\n".join(lines)


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
