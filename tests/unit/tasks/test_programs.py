"""Files of programming problems, in the formats in which they are published."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.environments.code import pack_solution, unpack_test
from rollout.records.files import RecordError
from rollout.records.trajectory import Task
from rollout.sandbox.judge import CallTest, StdinTest
from rollout.tasks.files import read_task_file
from rollout.tasks.programs import parse_tests, unpack_private


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


def load(path: Path, *, style: str, split: str, source: str = "") -> list[Task]:
    return [
        located.task for located in read_task_file(path, format=style, split=split, source=source)
    ]


def unpacked(task: Task) -> list[tuple[Any, bool]]:
    return [unpack_test(text) for text in task.answers]


def assert_hidden(task: Task, *texts: str) -> None:
    """Assert that a task's prompt has none of these texts."""
    assert task.env == "code"
    assert not [text for text in texts if text in task.prompt]


def pickled(text: str) -> bytes:
    """Return the pickle of a string, of protocol 4."""
    body = text.encode()
    return (
        b"\x80\x04\x95"
        + struct.pack("<Q", len(body) + 7)
        + b"X"
        + struct.pack("<I", len(body))
        + body
        + b"\x94."
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".json"])
def test_apps_and_taco(tmp_path: Path, suffix: str) -> None:
    rows = [
        {
            "problem_id": 7,
            "question": "Double the number.",
            "input_output": json.dumps(
                {"inputs": ["811\n", ["4", "5"]], "outputs": ["1622\n", ["8", "10"]]}
            ),
            "starter_code": "",
        },
        {
            "problem_id": 8,
            "question": "Write double(n).",
            "input_output": json.dumps(
                {"fn_name": "double", "inputs": [[811]], "outputs": [[1622]]}
            ),
            "starter_code": "def double(n):\n",
        },
        {"problem_id": 9, "question": "No tests.", "input_output": "", "starter_code": ""},
    ]
    first, second = load(write(tmp_path / f"train{suffix}", rows), style="taco", split="train")
    assert unpacked(first) == [
        (StdinTest(stdin="811\n", expected="1622\n"), False),
        (StdinTest(stdin="4\n5", expected="8\n10"), False),
    ]
    assert unpacked(second) == [
        (CallTest(function="double", arguments=(811,), accepted=([1622], 1622)), False)
    ]
    assert first.prompt == (
        "Double the number.\n\nWrite a Python program that reads from standard input and writes to standard output. "
        "Put the whole program into one block fenced by ```python and ```."
    )
    assert (
        "defines double as described, starting from:\n```python\ndef double(n):\n```"
        in second.prompt
    )
    assert (first.source, first.split, first.id.startswith("taco/7-")) == ("taco", "train", True)
    assert_hidden(first, "811", "1622")
    assert_hidden(second, "811", "1622")


def test_code_contests(tmp_path: Path) -> None:
    row = {
        "name": "1575_A. Sorting",
        "description": "Sort.\nInput\n2 1\nOutput\n1 2",
        "public_tests": {"input": ["2 1\n"], "output": ["1 2\n"]},
        "private_tests": {"input": ["31 29\n"], "output": ["29 31\n"]},
        "generated_tests": {"input": ["87 86\n"], "output": ["86 87\n"]},
        "difficulty": 7,
        "time_limit": {"seconds": 2, "nanos": 0},
    }
    (task,) = load(
        write(tmp_path / "x.parquet", [row]), style="code_contests", split="test", source="cc"
    )
    assert unpacked(task) == [
        (StdinTest(stdin="2 1\n", expected="1 2\n"), True),
        (StdinTest(stdin="31 29\n", expected="29 31\n"), False),
        (StdinTest(stdin="87 86\n", expected="86 87\n"), False),
    ]
    assert task.id.startswith("cc/1575_A. Sorting-")
    assert_hidden(task, "31 29", "29 31", "87 86", "86 87")


def test_live_code_bench(tmp_path: Path) -> None:
    private = json.dumps([{"input": "[31, 29]\n5", "output": "65", "testtype": "functional"}])
    rows = [
        {
            "question_id": "3026",
            "question_content": "Sum of a list and a number.",
            "starter_code": "class Solution:\n    def total(self, xs, n):\n        ",
            "public_test_cases": json.dumps(
                [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]
            ),
            "private_test_cases": base64.b64encode(zlib.compress(pickled(private))).decode(),
            "metadata": json.dumps({"func_name": "total"}),
        },
        {
            "question_id": "abc387_b",
            "question_content": "Echo.",
            "starter_code": "",
            "public_test_cases": json.dumps(
                [{"input": "1\n", "output": "1\n", "testtype": "stdin"}]
            ),
            "private_test_cases": json.dumps(
                [{"input": "977\n", "output": "977\n", "testtype": "stdin"}]
            ),
            "metadata": "{}",
        },
    ]
    calls, prints = load(
        write(tmp_path / "test6.jsonl", rows), style="live_code_bench", split="test"
    )
    assert unpacked(calls) == [
        (CallTest(function="total", arguments=([1, 2], 3), accepted=(6,)), True),
        (CallTest(function="total", arguments=([31, 29], 5), accepted=(65,)), False),
    ]
    assert unpacked(prints) == [
        (StdinTest(stdin="1\n", expected="1\n"), True),
        (StdinTest(stdin="977\n", expected="977\n"), False),
    ]
    assert_hidden(calls, "31, 29", "65")
    assert_hidden(prints, "977")


def test_a_pickle_is_read_and_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()
    with pytest.raises(ValueError, match="not a pickle of one text; the pickle has GLOBAL"):
        unpack_private(base64.b64encode(zlib.compress(code)).decode())
    assert not marker.exists()
    with pytest.raises(ValueError, match="not a pickle of one text; the pickle has NONE"):
        unpack_private(base64.b64encode(zlib.compress(b"\x80\x04N.")).decode())
    with pytest.raises(ValueError, match="not a pickle of one text; the pickle has 0 texts"):
        unpack_private(base64.b64encode(zlib.compress(b"\x80\x04.")).decode())
    with pytest.raises(ValueError, match="are not compressed by zlib"):
        unpack_private(base64.b64encode(b"not compressed").decode())
    assert unpack_private(base64.b64encode(zlib.compress(pickled("[é]"))).decode()) == "[é]"


@pytest.mark.parametrize(
    ("tests", "metadata", "expected"),
    [
        (  # primeintellect
            [{"type": "stdin_stdout", "input": "1\n", "output": "2\n"}],
            None,
            StdinTest(stdin="1\n", expected="2\n"),
        ),
        (
            [{"type": "function_call", "fn_name": "inc", "input": [1], "output": [2]}],
            None,
            CallTest(function="inc", arguments=(1,), accepted=([2], 2)),
        ),
        (
            {"inputs": ["1\n"], "outputs": ["2\n"]},
            None,
            StdinTest(stdin="1\n", expected="2\n"),
        ),  # taco
        (  # lcbv5
            [
                {
                    "input": "1",
                    "output": "2",
                    "testtype": "functional",
                    "metadata": {"func_name": "inc"},
                }
            ],
            None,
            CallTest(function="inc", arguments=(1,), accepted=(2,)),
        ),
        (
            [{"input": "1", "output": "2", "testtype": "functional"}],
            {"func_name": "inc"},
            CallTest(function="inc", arguments=(1,), accepted=(2,)),
        ),
        (
            [{"input": "1\n", "output": "2\n"}],
            None,
            StdinTest(stdin="1\n", expected="2\n"),
        ),  # codeforces
    ],
)
def test_deep_coder(tmp_path: Path, tests: Any, metadata: Any, expected: Any) -> None:
    row = {"problem": "Add one.", "tests": json.dumps(tests), "metadata": metadata}
    (task,) = load(write(tmp_path / "x.jsonl", [row]), style="deep_coder", split="train")
    assert unpacked(task) == [(expected, False)]
    assert parse_tests(tests, function=(metadata or {}).get("func_name")) == [expected]


def test_deep_coder_shown_shows_three_tests_and_hides_the_others(tmp_path: Path) -> None:
    tests = [StdinTest(stdin=f"{n}\n", expected=f"{n + 1}\n") for n in range(5)]
    entries = [
        {"type": "stdin_stdout", "input": test.stdin, "output": test.expected} for test in tests
    ]
    row = {"problem": "Add one.", "tests": json.dumps(entries)}
    (task,) = load(write(tmp_path / "x.jsonl", [row]), style="deep_coder_shown", split="train")
    assert unpacked(task) == [
        *((test, True) for test in tests[:3]),
        *((test, False) for test in tests[3:]),
    ]


@pytest.mark.parametrize(
    ("solutions", "program"),
    [
        (["print(1)", "print(2)"], "print(1)\n"),
        (json.dumps(["", "```python\nprint(1)\n```"]), "print(1)\n"),
        (
            {"language": [2, 3, 3], "solution": ["int main() {}", "print(1)", "print(2)"]},
            "print(1)\n",
        ),
        ({"language": [2], "solution": ["int main() {}"]}, None),
        ("", None),
        (None, None),
    ],
)
def test_a_solution_is_an_answer_and_not_in_the_prompt(
    tmp_path: Path, solutions: Any, program: Any
) -> None:
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})
    row = {"question": "Print 1.", "input_output": tests, "solutions": solutions}
    (task,) = load(write(tmp_path / "x.jsonl", [row]), style="apps", split="train")
    assert list(task.answers[1:]) == ([pack_solution(program)] if program else [])
    assert_hidden(task, "print(")


@pytest.mark.parametrize(
    ("name", "content", "style", "message"),
    [
        (
            "x.jsonl",
            '{"question": "?"}',
            "apps",
            "line 1 of format apps is not a programming problem with tests .KeyError: 'input_output'",
        ),
        ("x.jsonl", "\n{", "apps", "x.jsonl: line 2 cannot be read"),
        ("x.txt", "", "apps", "expected a file named .parquet, .jsonl, .json, .csv"),
        (
            "x.jsonl",
            '{"problem": "?", "tests": "[{\\"type\\": \\"x\\"}]"}',
            "deep_coder",
            "unknown kind of test 'x'",
        ),
        (
            "x.jsonl",
            '{"question": "?", "input_output": "{\\"inputs\\": [1], \\"outputs\\": []}"}',
            "apps",
            "line 1 of format apps is not a programming problem with tests .ValueError",
        ),
    ],
)
def test_an_unreadable_file_is_an_error(
    tmp_path: Path, name: str, content: str, style: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(RecordError, match=message):
        load(tmp_path / name, style=style, split="train")


def test_unknown_style(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown data format 'codeforce'; known: 2wikimultihopqa"):
        load(tmp_path / "x.jsonl", style="codeforce", split="train")
