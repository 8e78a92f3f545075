"""What a model reads of a program that was run."""

from __future__ import annotations

import pytest

from rollout.sandbox.records import RunResult, Verdict, render_result


def result(verdict: Verdict, stdout: str = "", stderr: str = "") -> RunResult:
    return RunResult(verdict=verdict, stdout=stdout, stderr=stderr, exit_code=0, wall_s=0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (result(Verdict.OK, "1\n"), "1"),
        (result(Verdict.OK), "[no output]"),
        (result(Verdict.OK, "1\n", "careful\n"), "1\ncareful"),
        (result(Verdict.RE, "1\n", "ZeroDivisionError\n"), "1\nZeroDivisionError"),
        (result(Verdict.RE), "[it failed]"),
        (result(Verdict.TLE, "1\n"), "1\n[out of time]"),
        (
            result(Verdict.OK, "a" * 30 + "b" * 30),
            "aaaaaaaaaa\n[... 40 characters ...]\nbbbbbbbbbb",
        ),
    ],
)
def test_what_a_model_reads(given: RunResult, text: str) -> None:
    assert render_result(given, 20) == text
