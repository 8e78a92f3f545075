"""Code environment: programs are run on visible and hidden tests of a problem in a sandbox.

`pack_test` and `pack_solution` write a task's `answers`; `CodeEnv` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from rollout.base.errors import Unscorable
from rollout.environments.fenced_programs import last_program, without_programs
from rollout.environments.protocol import Case, Step, ToolCall, last_tag
from rollout.environments.running import SandboxedEnv
from rollout.records.trajectory import Task
from rollout.sandbox.judge import CallTest, CompareBy, StdinTest, Test, judge_all
from rollout.sandbox.records import ENDINGS, RunResult, Verdict

SOLUTION = '{"solution":'  # prefix of an entry of `answers` that is a program and no test
_SHOWN_CHARS = 400  # maximum length of an input, an output or an error in a report to an agent
# Verdicts on a test in the words of a report.
VERDICT_TEXTS = {**ENDINGS, Verdict.WA: "wrong answer", Verdict.RE: "failed"}


def pack_test(test: Test, *, visible: bool) -> str:
    """Encode a test as one of a task's `answers`; agents are shown visible tests only."""
    return json.dumps(asdict(test) | {"visible": visible})


def unpack_test(text: str) -> tuple[Test, bool]:
    """Decode a test; return it with True if it is visible.

    Raises:
        ValueError: the text is not a packed test.
    """
    try:
        fields = json.loads(text)
        visible = bool(fields["visible"])
        if "stdin" in fields:
            return StdinTest(stdin=fields["stdin"], expected=fields["expected"]), visible
        call_test = CallTest(
            accepted=tuple(fields["accepted"]),
            function=fields["function"],
            arguments=tuple(fields["arguments"]),
        )
        return call_test, visible
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"not a test of a program: {text[:80]!r} ({type(error).__name__})"
        ) from error


def pack_solution(program: str) -> str:
    """Encode a program that solves the task as one of its `answers`; agents are not shown it."""
    return json.dumps({"solution": program})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """Decoded `answers` of a task: its tests, and a program that solves it if there is one."""

    visible: list[Test]
    hidden: list[Test]
    solution: str | None

    @classmethod
    def of_task(cls, task: Task) -> _Answers:
        """Decode the answers of a task.

        Raises:
            Unscorable: they cannot be decoded, or none of them is a test.
        """
        visible: list[Test] = []
        hidden: list[Test] = []
        solution = None
        try:
            for text in task.answers:
                if text.startswith(SOLUTION):
                    solution = str(json.loads(text)["solution"])
                    continue
                test, is_visible = unpack_test(text)
                if is_visible:
                    visible.append(test)
                else:
                    hidden.append(test)
        except ValueError as error:
            raise Unscorable(f"task {task.id}: {error}") from error
        if not visible and not hidden:
            raise Unscorable(f"task {task.id} has no tests; a code task needs at least one")
        return cls(visible=visible, hidden=hidden, solution=solution)

    def tests_of_cases(self, cases: Sequence[Case]) -> list[Test]:
        """Convert an agent's tests to the form of the task's tests; leave out those that do not fit.

        If the task's tests call a function, the input of a case must be a JSON list of arguments, and
        the expected output JSON too.
        """
        example = (self.hidden or self.visible)[0]
        if isinstance(example, StdinTest):
            return [StdinTest(stdin=f"{given}\n", expected=expected) for given, expected in cases]

        tests: list[Test] = []
        for given, expected in cases:
            try:
                arguments = json.loads(given)
                result = json.loads(expected)
            except (ValueError, RecursionError):  # no JSON, or nested too deeply
                continue
            if isinstance(arguments, list):
                test = CallTest(
                    function=example.function, arguments=tuple(arguments), accepted=(result,)
                )
                tests.append(test)
        return tests


@dataclass(eq=False, kw_only=True)
class CodeEnv(SandboxedEnv):
    """A programming problem, scored by its tests in a sandbox.

    A text with `<run>` around a fenced program tries the program on the visible tests; the
    observation has the result of each. Any other text ends the trajectory: its last fenced program
    is scored on the hidden tests, or on the visible ones if there are no others. Metrics are
    `pass_rate`, `solved` (1 if every test passes), `answered` (1 if there was a program), `tests`
    and `runs`. A step that only tries a program has the metrics `runs` and `visible_rate`: the share
    of the visible tests that pass, or 1 if there are none.

    Args:
        compare: unit by which printed output is compared.
        reward: `all`, 1 if every test passes, else 0; or `rate`, the fraction of tests that pass.
        max_tests: number of tests to score on, those with the longest inputs; 0: all tests.
    """

    compare: CompareBy = "tokens"
    reward: Literal["all", "rate"] = "all"
    max_tests: NonNegativeInt = 0
    cpu_s: PositiveInt = 6
    _runs: int = field(default=0, init=False)

    def reset(self, task: Task) -> str:
        self.task = task
        self._runs = 0
        return task.prompt

    async def step(self, action: str) -> Step:
        """Try a program, or score the last one of the text."""
        step = await self.preview(action)
        if not step.done:
            self._runs += 1
        return step

    async def preview(self, action: str) -> Step:
        answers = _Answers.of_task(self.task)
        program = _program_to_try(action)
        if program is not None:
            step = await self._try(program, answers.visible, "There are no visible tests.")
            visible_rate = step.metrics["check_rate"] if answers.visible else 1.0
            metrics = {"runs": float(self._runs + 1), "visible_rate": visible_rate}
            return replace(step, metrics=metrics)

        tests = answers.hidden or answers.visible
        if self.max_tests:
            by_input_length = sorted(tests, key=lambda test: len(_input(test)), reverse=True)
            tests = by_input_length[: self.max_tests]
        return await self._score(last_program(action), tests)

    async def check(self, program: str, cases: Sequence[Case]) -> Step:
        """Run a program on an agent's tests; see `PlayedEnv.check`.

        A test that has another form than the task's counts as failed.
        """
        tests = _Answers.of_task(self.task).tests_of_cases(cases)
        step = await self._try(program, tests, "None of the tests can be used.")
        # The rate of `_try` is of the tests that fit; the others count as failed.
        rate = step.metrics["check_rate"] * len(tests) / max(len(cases), 1)
        return replace(step, metrics={"check_rate": rate})

    async def agreement(self, cases: Sequence[Case]) -> float | None:
        answers = _Answers.of_task(self.task)
        if answers.solution is None:
            return None
        results = await self._judge(answers.solution, answers.tests_of_cases(cases))
        # Tests that have another form than the task's count as failed.
        return _count_passed(results) / max(len(cases), 1)

    async def _judge(self, program: str, tests: Sequence[Test]) -> list[RunResult]:
        return await judge_all(
            self.runner, program, tests, compare=self.compare, limits=self.limits
        )

    async def _try(self, program: str, tests: Sequence[Test], no_tests_message: str) -> Step:
        """Run a program on tests that its author may see, and report each result."""
        results = await self._judge(program, tests)
        reports = [
            _report(number, test, result)
            for number, (test, result) in enumerate(zip(tests, results, strict=True), start=1)
        ]
        observation = "\n".join(reports) or no_tests_message
        return Step(
            observation=observation,
            tools=(ToolCall(tool="run", query=program, result=observation),),
            metrics={"check_rate": _count_passed(results) / max(len(tests), 1)},
        )

    async def _score(self, program: str | None, tests: Sequence[Test]) -> Step:
        """Score a program on tests; return the step that ends the trajectory.

        Args:
            program: None if the text has none, which scores 0.
            tests: at least one.
        """
        results = [] if program is None else await self._judge(program, tests)
        pass_rate = _count_passed(results) / len(tests)
        solved = float(pass_rate == 1)
        return Step(
            reward=solved if self.reward == "all" else pass_rate,
            done=True,
            answer=(program or "").strip(),
            metrics={
                "pass_rate": pass_rate,
                "solved": solved,
                "answered": float(program is not None),
                "tests": float(len(tests)),
                "runs": float(self._runs),
            },
        )


def _program_to_try(action: str) -> str | None:
    """Return the program that a reply asks to try; None if no `<run>` stands outside of programs.

    The text up to the last `</think>` is ignored. The program is the last fenced one in the last
    `<run>`. If that has none, it is the last fenced program of the reply, or else the content of the
    `<run>` as it is.
    """
    reply = action.rpartition("</think>")[2]
    content = last_tag(reply, "run")
    # A program may contain the tags as text, such as in a call of `print`.
    has_run = last_tag(without_programs(reply), "run") is not None
    if content is None or not has_run:
        return None
    return last_program(content) or last_program(reply) or content


def _count_passed(results: Sequence[RunResult]) -> int:
    return sum(result.verdict is Verdict.OK for result in results)


def _input(test: Test) -> str:
    """Return the input of a test as text."""
    if isinstance(test, StdinTest):
        return test.stdin
    return json.dumps(test.arguments)


def _report(number: int, test: Test, result: RunResult) -> str:
    """Describe the result of a visible test to the program's author."""
    if result.verdict is Verdict.OK:
        return f"Test {number}: passed"

    expected = test.expected if isinstance(test, StdinTest) else json.dumps(test.accepted[0])
    lines = [
        f"Test {number}: {VERDICT_TEXTS[result.verdict]}",
        f"Input: {_shorten(_input(test))}",
        f"Expected: {_shorten(expected)}",
    ]
    if result.verdict is Verdict.WA:
        lines.append(f"Output: {_shorten(result.stdout)}")
    elif result.stderr:
        lines.append(f"Error: {result.stderr.strip()[-_SHOWN_CHARS:]}")
    return "\n".join(lines)


def _shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
