"""Texts that models read about the results of programs."""

from __future__ import annotations

import pytest

from rollout.sandbox.records import RunResult, Verdict, render_result


def result_of(verdict: Verdict, stdout: str = "", stderr: str = "") -> RunResult:
    return RunResult(verdict=verdict, stdout=stdout, stderr=stderr, exit_code=0, wall_s=0)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (result_of(Verdict.OK, "1\n"), "1"),
        (result_of(Verdict.OK), "[no output]"),
        (result_of(Verdict.OK, "1\n", "careful\n"), "1\ncareful"),
        (result_of(Verdict.RE, "1\n", "ZeroDivisionError\n"), "1\nZeroDivisionError"),
        (result_of(Verdict.RE), "[it failed]"),
        (result_of(Verdict.TLE, "1\n"), "1\n[out of time]"),
        (
            result_of(Verdict.OK, "a" * 30 + "b" * 30),
            "aaaaaaaaaa\n[... 40 characters ...]\nbbbbbbbbbb",
        ),
    ],
)
def test_rendered_results(result: RunResult, text: str) -> None:
    assert render_result(result, 20) == text
