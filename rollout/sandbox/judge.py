"""Judging programs by tests.

A program gets the inputs of a test only. Its answers are compared with the expected ones outside of
the sandbox, so that a program cannot find them there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rollout.base.async_tasks import gather_or_cancel
from rollout.sandbox.records import RunLimits, RunResult, Verdict
from rollout.sandbox.runner import Runner

_CALLER = (Path(__file__).resolve().parent / "guest" / "caller.py").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    """Test of a program that reads `stdin` and must print `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """Test of a function, which must return one of the `accepted` values.

    The function is the program's, or a method of its class `Solution`. Arguments and accepted
    values are JSON values.
    """

    function: str
    arguments: tuple[Any, ...]
    accepted: tuple[Any, ...]


Test = StdinTest | CallTest


async def judge(
    runner: Runner,
    source: str,
    test: Test,
    *,
    compare: CompareBy = "tokens",
    limits: RunLimits | None = None,
    files: Mapping[str, bytes] | None = None,
) -> RunResult:
    """Run a program on one test; the verdict is `WA` if its answer is not the expected one.

    Args:
        runner: runs the program.
        source: Python code.
        test: input and expected answer.
        compare: name of a comparison in `COMPARES`, for a `StdinTest`.
        limits: limits of the runs, instead of the runner's.
        files: files of the working folder, by relative path.

    Raises:
        SandboxError: there is no verdict.
        ValueError: the path of a file leads out of the folder.
    """
    if isinstance(test, StdinTest):
        limits = _allow_output(test.expected, limits or runner.limits)
        result = await runner.run(source, stdin=test.stdin, limits=limits, files=files)
        is_right = COMPARES[compare](result.stdout, test.expected)
    else:
        call = {"source": source, "function": test.function, "arguments": test.arguments}
        result = await runner.run(_CALLER, stdin=json.dumps(call), limits=limits, files=files)
        is_right = any(same_value(result.stdout, value) for value in test.accepted)

    if result.verdict is Verdict.OK and not is_right:
        return replace(result, verdict=Verdict.WA)
    return result


def _allow_output(expected: str, limits: RunLimits) -> RunLimits:
    """Return the limits, raised to twice the size of the expected output if that is more."""
    needed_kb = 2 * len(expected.encode(errors="replace")) // 1024
    if needed_kb <= limits.output_kb:
        return limits
    file_mb = max(limits.file_mb, -(-needed_kb // 1024))
    return replace(limits, output_kb=needed_kb, file_mb=file_mb)


async def judge_all(
    runner: Runner,
    source: str,
    tests: Sequence[Test],
    *,
    compare: CompareBy = "tokens",
    limits: RunLimits | None = None,
) -> list[RunResult]:
    """Run a program on every test; return the results in order (see `judge`).

    Raises:
        SandboxError: there is no verdict on one of the tests.
    """
    return await gather_or_cancel(
        judge(runner, source, test, compare=compare, limits=limits) for test in tests
    )


TOLERANCE = 1e-6  # relative and absolute
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d+")

Compare = Callable[[str, str], bool]  # (answer, expected) -> equal


def same_lines(answer: str, expected: str) -> bool:
    """Return True if the lines are equal, up to trailing white space and trailing empty lines."""
    return _lines(answer) == _lines(expected)


def same_tokens(answer: str, expected: str) -> bool:
    """Return True if the words are equal, whatever white space is between them."""
    return answer.split() == expected.split()


def same_floats(answer: str, expected: str) -> bool:
    """Return True if each word equals the expected one, or both are numbers within TOLERANCE.

    Two integers must be equal: within a relative tolerance, a long integer would match its neighbours.
    """
    words = answer.split()
    expected_words = expected.split()
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


CompareBy = Literal["lines", "tokens", "floats"]
COMPARES: dict[CompareBy, Compare] = {
    "lines": same_lines,
    "tokens": same_tokens,
    "floats": same_floats,
}


def same_value(answer: str, expected: Any) -> bool:
    """Return True if a JSON text is the expected value, with floats within TOLERANCE.

    Lists also match tuples, and True matches 1, as in Python. A text that is not JSON matches
    nothing.
    """
    try:
        return _same(json.loads(answer), json.loads(json.dumps(expected)))
    except (ValueError, RecursionError):  # not JSON, a number that is too long, or too deep lists
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if _INTEGER.fullmatch(word) and _INTEGER.fullmatch(expected):
        return False
    if not _NUMBER.fullmatch(word) or not _NUMBER.fullmatch(expected):
        return False
    return _is_close(float(word), float(expected))


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(map(_same, value, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_same(value[key], expected[key]) for key in expected)
        )
    if isinstance(value, float) or isinstance(expected, float):
        are_numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return are_numbers and _is_close(value, expected)

    types = {type(value), type(expected)}
    are_comparable = len(types) == 1 or types == {bool, int}
    return are_comparable and bool(value == expected)


def _is_close(value: float, expected: float) -> bool:
    try:
        return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond any float
        return False
