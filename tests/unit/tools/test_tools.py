"""The calculator by hand, and the work folder of a real session."""

from __future__ import annotations

import asyncio
import math

import pytest

from rollout.base.registry import lookup
from rollout.sandbox import Limits
from rollout.tools import TOOLS
from rollout.tools.calculator import calculate
from rollout.tools.protocol import BadArguments
from tests.support.sandboxes import started


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("1 + 2 * 3", "7"),
        ("-(2 ^ 10) // 3", "-342"),
        ("1/3 + 1/6", "1/2 = 0.5"),
        ("6/3", "2"),
        ("2 ** -2", "1/4 = 0.25"),
        ("17 % 5", "2"),
        ("sqrt(2) * sqrt(2)", "2"),
        ("max(1, gcd(12, 18), +2)", "6"),
        ("round(10 / 4)", "2"),
        ("0.1 + 0.2", "0.3"),
        ("2 ^ 200", str(2**200)),
        ("0.5 ^ 100 * 2.0 ^ 100", "1"),
        ("round(12.345, 2)", "12.35"),
        ("2 ^ 1000 * 2 ^ 1000 / 3", f"{2**2000}/3"),
    ],
)
def test_it_calculates(expression: str, shown: str) -> None:
    assert asyncio.run(lookup("tool", "calculator", TOOLS)()(expression=expression)) == shown


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 +", "has no value"),
        ("1 / 0", "has no value"),
        ("log(-1)", "has no value"),
        ("(-8) ** 0.5", "no real number"),
        ("9 ** 9 ** 9", "the power is too large"),
        ("(10 ** 999) ** 2", "the power is too large"),
        ("2 ** (10 ** 300)", "the power is too large"),
        ("round(5, -10 ** 9)", "at most 100 digits"),
        ("__import__('os')", "is no arithmetic"),
        ("pi.real", "is no arithmetic"),
        ("True + 1", "is no arithmetic"),
        ("'a' * 3", "is no arithmetic"),
        ("sqrt(x=2)", "is no arithmetic"),
        ("(" * 150 + ")" * 151, "at most 300"),
        ("1e308 * 1e308 - 1e308 * 1e308 + floor(1e308 * 10)", "has no value"),
    ],
)
def test_what_is_no_arithmetic_is_said_to_the_agent(expression: str, message: str) -> None:
    with pytest.raises(BadArguments, match=message):
        calculate(expression)
    with pytest.raises(BadArguments, match="calculator: "):
        asyncio.run(lookup("tool", "calculator", TOOLS)()(expression=expression))


def test_names_have_their_values() -> None:
    assert calculate("2 * pi") == 2 * math.pi
    with pytest.raises(BadArguments, match="calculator: "):
        asyncio.run(lookup("tool", "calculator", TOOLS)()(formula="1"))


def test_files_are_listed_read_and_written_in_the_session_alone() -> None:
    box = started("auto")

    async def main() -> None:
        async with box.session(Limits(memory_mb=256, file_mb=1)) as session:
            files = TOOLS["files"](session, max_chars=4)
            assert await files(action="list") == "[no files]"
            assert await files(action="write", path="a/b.txt", content="äbc") == "a/b.txt has 4 bytes."
            assert (await session.run("print(open('a/b.txt').read())")).stdout == "äbc\n"
            await session.run("open('long', 'w').write('12345'); open('raw', 'wb').write(b'\\xff')")
            assert await files(action="list") == "a/b.txt (4 bytes)\nlong (5 bytes)\nraw (1 bytes)"
            assert await files(action="read", path="a/b.txt") == "äbc"
            assert await files(action="read", path="long") == "1234\n[... of 5 characters]"
            for wrong, message in (
                ({"action": "read", "path": "none"}, "there is no file none"),
                ({"action": "read", "path": "/etc/passwd"}, "files: "),
                ({"action": "read", "path": "../x"}, "files: "),
                ({"action": "write", "path": "../x", "content": ""}, "files: "),
                ({"action": "read", "path": "raw"}, "can't decode"),
                ({"action": "write", "path": "x"}, "write needs content"),
                ({"action": "delete", "path": "long"}, "files: action"),
            ):
                with pytest.raises(BadArguments, match=message):
                    await files(**wrong)

    try:
        asyncio.run(main())
    finally:
        box.close()
