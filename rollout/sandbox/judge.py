"""Judging programs by tests: a program gets inputs only, and its answers are compared outside the sandbox."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rollout.base.async_tasks import gather_or_cancel
from rollout.sandbox.box import Runner
from rollout.sandbox.records import RunLimits, RunResult, Verdict

_CALLER = (Path(__file__).resolve().parent / "guest" / "caller.py").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    """A program reads `stdin` and is to print `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """`function`, of the program or of its class Solution, is to return one of `accepted`."""

    function: str
    arguments: tuple[Any, ...]  # JSON values
    accepted: tuple[Any, ...]  # JSON values


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
    """Run a program on one test, whose verdict knows what was expected; `compare` is a name in COMPARES.

    Raises:
        SandboxError: there is no verdict.
        ValueError: `files`, which it finds in its folder, are not paths in one.
    """
    if isinstance(test, StdinTest):
        result = await runner.run(source, stdin=test.stdin, limits=limits, files=files)
        right = COMPARES[compare](result.stdout, test.expected)
    else:
        request = {"source": source, "function": test.function, "arguments": test.arguments}
        result = await runner.run(_CALLER, stdin=json.dumps(request), limits=limits, files=files)
        right = any(same_value(result.stdout, value) for value in test.accepted)
    return (
        result if right or result.verdict is not Verdict.OK else replace(result, verdict=Verdict.WA)
    )


async def judge_all(
    runner: Runner,
    source: str,
    tests: Sequence[Test],
    *,
    compare: CompareBy = "tokens",
    limits: RunLimits | None = None,
) -> list[RunResult]:
    """Run a program on every test, in order; SandboxError if there is no verdict on one of them."""
    return await gather_or_cancel(
        judge(runner, source, test, compare=compare, limits=limits) for test in tests
    )


TOLERANCE = 1e-6  # relative and absolute
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d+")

Compare = Callable[[str, str], bool]  # (given, expected)


def same_lines(given: str, expected: str) -> bool:
    """Equal lines, but for white space at their ends and empty lines at the end."""
    return _lines(given) == _lines(expected)


def same_tokens(given: str, expected: str) -> bool:
    """Equal words, whatever white space is between them."""
    return given.split() == expected.split()


def same_floats(given: str, expected: str) -> bool:
    """Equal words, where an expected decimal number may be missed by TOLERANCE; integers are exact."""
    words, wanted = given.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


CompareBy = Literal["lines", "tokens", "floats"]
COMPARES: dict[CompareBy, Compare] = {
    "lines": same_lines,
    "tokens": same_tokens,
    "floats": same_floats,
}


def same_value(given: str, expected: Any) -> bool:
    """Whether a JSON text is the value `expected`, floats within TOLERANCE; False if it is no JSON.

    Lists stand for tuples too, True for 1, as in Python.
    """
    try:
        return _same(json.loads(given), json.loads(json.dumps(expected)))
    except (
        ValueError,
        RecursionError,
    ):  # no JSON, a number of too many digits, or nested without end
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    # An integer's neighbour is within any relative tolerance if it is long enough: integers are compared as text.
    if _INTEGER.fullmatch(expected) or not (
        _NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected)
    ):
        return False
    return _close(float(given), float(expected))


def _same(given: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(given, list)
            and len(given) == len(expected)
            and all(map(_same, given, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(given, dict)
            and given.keys() == expected.keys()
            and all(_same(given[key], value) for key, value in expected.items())
        )
    if isinstance(given, float) or isinstance(expected, float):
        return (
            isinstance(given, int | float)
            and isinstance(expected, int | float)
            and _close(given, expected)
        )
    alike = type(given) is type(expected) or {type(given), type(expected)} == {bool, int}
    return alike and bool(given == expected)


def _close(given: float, expected: float) -> bool:
    try:
        return math.isclose(given, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond any float
        return False
