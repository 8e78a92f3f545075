"""Judging programs by tests: right and wrong answers, spoofs, and comparisons."""

from __future__ import annotations

import asyncio

import pytest

from rollout.sandbox import RunLimits, Sandbox, SandboxError, Verdict
from rollout.sandbox.judge import (
    CallTest,
    StdinTest,
    Test,
    judge,
    judge_all,
    same_floats,
    same_lines,
    same_tokens,
    same_value,
)

SUM = StdinTest(stdin="20 22\n", expected="42\n")
ADD = CallTest(function="add", arguments=(20, 22), accepted=(42,))


def verdict(box: Sandbox, source: str, test: Test) -> Verdict:
    return asyncio.run(judge(box, source, test)).verdict


# --- programs that print

HONEST = "print(sum(map(int, input().split())))"
FRAMES = """
import sys, gc
for frame in sys._current_frames().values():
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if "42" in str(value) and "20 22" not in str(value):
                print(str(value)); raise SystemExit
        frame = frame.f_back
for thing in gc.get_objects():
    if isinstance(thing, dict) and "expected" in thing:
        print(thing["expected"]); raise SystemExit
print("nothing")
"""
SPOOFS = {
    "frame walk": FRAMES,
    "object that equals everything": "class E(str):\n    __eq__ = lambda s, o: True\nprint(E('x'))",
    "patched comparison": (
        "import builtins, json\nstr.split\nbuiltins.all = lambda *_: True\njson.loads = lambda *_: 42\nprint('x')"
    ),
    "patched grader": (
        "import sys\nfor m in list(sys.modules.values()):\n    for n in ('same_lines', 'same_tokens', 'judge'):\n"
        "        if m is not None and hasattr(m, n): setattr(m, n, lambda *a, **k: True)\nprint('x')"
    ),
    "exit status 0": "raise SystemExit(0)",
    "exit without a word": "import os\nos._exit(0)",
    "a word": "print('PASS')\nprint('OK')\nprint('all tests passed')",
    "a verdict": "import os\nprint({'exit': 0, 'verdict': 'OK'})",
    "the report's channel": (
        "import os, json\nfor n in range(3, 64):\n    try: os.write(n, json.dumps({'exit': 0, 'job': 1}).encode())\n"
        "    except OSError: pass"
    ),
    "both answers": "print(41)\nprint(42)",
    "every answer": "for n in range(100): print(n)",
}


def test_right_programs_pass_and_wrong_ones_do_not(box: Sandbox) -> None:
    assert verdict(box, HONEST, SUM) is Verdict.OK
    assert verdict(box, "print(41)", SUM) is Verdict.WA


@pytest.mark.parametrize("name", SPOOFS)
def test_a_spoof_is_a_wrong_answer(box: Sandbox, name: str) -> None:
    assert verdict(box, SPOOFS[name], SUM) is Verdict.WA


def test_right_output_before_a_failure_is_not_right(box: Sandbox) -> None:
    assert verdict(box, "print(42)\n1 / 0", SUM) is Verdict.RE


# --- functions that are called

CALL_SPOOFS = {
    "object that equals everything": "class E(int):\n    __eq__ = lambda s, o: True\ndef add(a, b): return E(7)",
    "object that is no value": "class E:\n    __eq__ = lambda s, o: True\ndef add(a, b): return E()",
    "patched encoder": "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 7",
    "output of its own": "import os\nos.write(1, b'42')\ndef add(a, b): return 41",
    "answer and exit": (
        "import os\nfor n in range(64):\n    try: os.write(n, b'[42]')\n    except OSError: pass\nos._exit(0)"
    ),
    "frame walk": (
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in frame.f_locals.values():\n            if value == 42: return value\n"
        "            if isinstance(value, dict) and 'expected' in value: return value['expected']\n"
        "        frame = frame.f_back"
    ),
    "exit status 0": "def add(a, b): raise SystemExit(0)",
    "nothing": "def add(a, b): pass",
    "no such function": "def subtract(a, b): return a - b",
}


@pytest.mark.parametrize(
    "source",
    [
        "def add(a, b):\n    print('thinking')\n    return a + b",
        "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b",
        "class Solution:\n    def add(self, a: int, b: Optional[int]):\n        return reduce(operator.add, (a, b))",
        "import numpy\ndef add(a, b): return numpy.int64(a + b)",
        "def add(a, b): return a + b\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))",
    ],
    ids=["function", "method", "imports of the site", "array scalar", "main"],
)
def test_a_right_function_passes(box: Sandbox, source: str) -> None:
    assert verdict(box, source, ADD) is Verdict.OK


@pytest.mark.parametrize("name", CALL_SPOOFS)
def test_a_spoofing_function_fails(box: Sandbox, name: str) -> None:
    assert verdict(box, CALL_SPOOFS[name], ADD) in (Verdict.WA, Verdict.RE)


def test_expected_answers_are_not_sent_to_the_sandbox() -> None:
    sent = []

    class Spy:
        limits = RunLimits()

        async def run(
            self, source: str, *, stdin: str | bytes = b"", limits: object = None, **_: object
        ) -> object:
            sent.append((source, stdin))
            raise SandboxError("enough")

    for test in (
        StdinTest(stdin="in", expected="the-hidden-answer"),
        CallTest(function="f", arguments=("in",), accepted=("the-hidden-answer",)),
    ):
        with pytest.raises(SandboxError):
            asyncio.run(judge(Spy(), "pass", test))  # type: ignore[arg-type]
    assert len(sent) == 2
    assert "in" in sent[0][1] and "in" in sent[1][1]
    assert "the-hidden-answer" not in repr(sent)


def test_all_tests_in_order(box: Sandbox) -> None:
    tests = [StdinTest(stdin=f"{n}\n", expected=f"{abs(n)}\n") for n in (1, -2, 3, -4)]
    for source, verdicts in (
        ("print(input())", "OK WA OK WA"),
        ("print(abs(int(input())))", "OK OK OK OK"),
    ):
        results = asyncio.run(judge_all(box, source, tests))
        assert [result.verdict for result in results] == verdicts.split()
        assert results[0].stdout == "1\n"


def test_a_failure_at_one_test_cancels_the_others() -> None:
    class Failing:
        limits = RunLimits()

        async def run(
            self, source: str, *, stdin: str | bytes = b"", limits: object = None, **_: object
        ) -> object:
            if stdin == "b":
                raise SandboxError("gone")
            await asyncio.sleep(30)
            raise AssertionError("was not cancelled")

    with pytest.raises(SandboxError, match="gone"):
        asyncio.run(judge_all(Failing(), "", [StdinTest(stdin=s, expected="") for s in "abc"]))  # type: ignore[arg-type]


# --- comparing


@pytest.mark.parametrize(
    ("answer", "expected", "lines", "tokens", "floats"),
    [
        ("1 2\n3", "1 2\n3\n", True, True, True),
        ("1 2  \n3\n\n", "1 2\n3\n", True, True, True),
        ("1  2\n3", "1 2\n3\n", False, True, True),
        ("1\n2\n3", "1 2\n3\n", False, True, True),
        (" 1 2\n3", "1 2\n3\n", False, True, True),
        ("", "\n", True, True, True),
        ("", "0", False, False, False),
        ("0.3333333", "0.33333333", False, False, True),
        ("0.3334", "0.33333333", False, False, False),
        ("1e3", "1000.0", False, False, True),
        ("3", "3.0", False, False, True),
        ("3.0", "3", False, False, True),
        ("12345678901234567", "12345678901234568", False, False, False),
        ("nan", "1.5", False, False, False),
        ("inf", "1e999", False, False, False),
        ("1_0.5", "10.5", False, False, False),
        ("YES", "yes", False, False, False),
    ],
)
def test_compare(answer: str, expected: str, lines: bool, tokens: bool, floats: bool) -> None:
    assert same_lines(answer, expected) is lines
    assert same_tokens(answer, expected) is tokens
    assert same_floats(answer, expected) is floats


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("[1, 2]", (1, 2), True),
        ("[1, 2]", [2, 1], False),
        ("[1]", [1, 1], False),
        ("0.30000000000000004", 0.3, True),
        ("0.31", 0.3, False),
        ("NaN", 0.3, False),
        ("1", True, True),
        ("true", 1, True),
        ("1", "1", False),
        ('"1"', 1, False),
        ("null", None, True),
        ("0", None, False),
        ('{"a": [1]}', {"a": [1]}, True),
        ('{"a": [1], "b": 2}', {"a": [1]}, False),
        ("", None, False),
        ("41\n42", 42, False),
        ("[" * 100_000, [], False),
        ("9" * 5000, 1, False),
        ("1" + "0" * 400, 0.5, False),
        ("12345678901234567", 12345678901234568, False),
    ],
)
def test_same_value(answer: str, expected: object, same: bool) -> None:
    assert same_value(answer, expected) is same


# --- programs that end as `python main.py` would


@pytest.mark.parametrize(
    "source",
    [
        "print(42)\nquit()\nprint(1)",
        "print(42)\nexit(0)",
        (
            "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
            "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(42)"
        ),
        "class A:\n    def __del__(self): print(42)\na = A()",
        "class A:\n    def __del__(self): print(42)\na = A()\na.itself = a\ndel a",
        "import sys\nprint(42)\nsys.stdout.close()",
        "import sys, threading\nthreading.Thread(target=lambda: sys.exit(3)).start()\nprint(42)",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print(42))).start()",
        "import os\nprint(42, flush=True)\nos._exit(0)",
        "out = open(1, 'w')\nout.write('42')",
        "import os\nout = os.fdopen(1, 'wb')\nout.write(b'42')",
        "class Out:\n    def __init__(self):\n        self.file = open(1, 'w')\no = Out()\no.file.write('42')",
    ],
)
def test_output_is_kept_as_the_interpreter_keeps_it(box: Sandbox, source: str) -> None:
    assert verdict(box, source, SUM) is Verdict.OK


def test_quit_with_a_status_is_a_failure(box: Sandbox) -> None:
    assert verdict(box, "print(42)\nquit(3)", SUM) is Verdict.RE


def test_a_test_may_expect_more_output_than_the_limit(box: Sandbox) -> None:
    expected = "x" * (box.limits.output_kb * 1024 + 5000)
    test = StdinTest(stdin="", expected=expected)
    assert verdict(box, f"print('x' * {len(expected)})", test) is Verdict.OK
    assert verdict(box, f"print('x' * {len(expected) - 1})", test) is Verdict.WA
    assert verdict(box, f"print('x' * {3 * len(expected)})", test) is Verdict.OLE


@pytest.mark.parametrize(
    ("answer", "expected", "equal"),
    [
        ("7.0", "7", True),
        ("0.000000", "0", True),
        ("6.9999999", "7", True),
        ("7.1", "7", False),
        ("7", "7.0", True),
        ("7", "7.2", False),
        ("1000000000000000001", "1000000000000000000", False),
        ("seven", "7", False),
    ],
)
def test_floats_compare_as_floats_and_integers_exactly(
    answer: str, expected: str, equal: bool
) -> None:
    assert same_floats(answer, expected) is equal
