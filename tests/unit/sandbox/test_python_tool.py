"""Python as a tool of agents."""

from __future__ import annotations

import asyncio

import pytest

from rollout.base.registry import lookup
from rollout.sandbox import Limits, Result, Sandbox, SandboxError, Verdict
from rollout.tools import TOOLS
from rollout.tools.protocol import BadArguments
from rollout.tools.workspace import Python, render


def result(verdict: Verdict, stdout: str = "", stderr: str = "") -> Result:
    return Result(verdict=verdict, stdout=stdout, stderr=stderr, exit_code=0, wall_s=0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (result(Verdict.OK, "1\n"), "1"),
        (result(Verdict.OK), "[no output]"),
        (result(Verdict.OK, "1\n", "careful\n"), "1\ncareful"),
        (result(Verdict.RE, "1\n", "ZeroDivisionError\n"), "1\nZeroDivisionError"),
        (result(Verdict.RE), "[it failed]"),
        (result(Verdict.TLE, "1\n"), "1\n[out of time]"),
        (result(Verdict.OK, "a" * 30 + "b" * 30), "aaaaaaaaaa\n[... 40 characters ...]\nbbbbbbbbbb"),
    ],
)
def test_what_a_model_reads(given: Result, text: str) -> None:
    assert render(given, 20) == text


def test_programs_and_cells(box: Sandbox) -> None:
    async def main() -> list[str]:
        program = lookup("tool", "python", TOOLS)(box)
        said = [await program(code="x = 6 * 7\nprint(x)"), await program(code="x")]
        async with box.session(Limits(memory_mb=256)) as session:
            cell = Python(session)
            said += [await cell(code="x = 6 * 7"), await cell(code="x")]
        return said

    first, second, third, fourth = asyncio.run(main())
    assert (first, third, fourth) == ("42", "[no output]", "42")
    assert second.endswith("NameError: name 'x' is not defined")


@pytest.mark.parametrize("arguments", [{}, {"code": 1}, {"code": "1", "shell": "sh"}])
def test_arguments_are_checked(arguments: dict[str, object]) -> None:
    class Never:
        async def run(self, source: str) -> Result:
            raise SandboxError("was asked")

    with pytest.raises(BadArguments, match="python: "):
        asyncio.run(Python(Never())(**arguments))
