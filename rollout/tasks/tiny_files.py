"""Generated data files in the published formats, small: what a run at the scale `tiny` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_mas.rollout.base.files import read_yaml, write_text
from mcore_mas.rollout.base.options import lookup
from mcore_mas.rollout.records.trajectory import Task
from mcore_mas.rollout.tasks.arithmetic import arithmetic_tasks
from mcore_mas.rollout.tasks.encyclopedia import encyclopedia_tasks

SEARCH_SOURCES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_ROWS = 14  # of a file
_TESTS = 6  # of a program

Row = dict[str, Any]


_QUESTIONS: Mapping[str, str] = read_yaml(Path(__file__).with_suffix(".yaml"))


def _question(row: str, number: int, task: Task) -> Row:
    answer, source = task.answers[0], SEARCH_SOURCES[number % len(SEARCH_SOURCES)]
    texts = {"question": task.prompt, "answer": answer, "boxed": f"\\boxed{{{answer}}}", "source": source}
    quoted = {name: json.dumps(text) for name, text in texts.items()}
    return dict(json.loads(Template(row).substitute(quoted, value=answer, number=number)))


def _tests(given: list[str], wanted: list[str], **kind: str) -> str:
    return json.dumps([{"input": one, "output": other, **kind} for one, other in zip(given, wanted, strict=True)])


# (number, question, inputs and outputs of its tests)
_PROGRAMS: dict[str, Callable[[int, str, list[str], list[str]], Row]] = {
    "apps": lambda n, q, given, wanted: {
        "problem_id": n,
        "question": q,
        "input_output": json.dumps({"inputs": given, "outputs": wanted}),
        "starter_code": "",
    },
    "code_contests": lambda n, q, given, wanted: {
        "name": f"made_{n}",
        "description": q,
        "public_tests": {"input": given[:2], "output": wanted[:2]},
        "private_tests": {"input": given[2:], "output": wanted[2:]},
    },
    "live_code_bench": lambda n, q, given, wanted: {
        "question_id": f"made_{n}",
        "question_content": q,
        "public_test_cases": _tests(given[:2], wanted[:2], testtype="stdin"),
        "private_test_cases": _tests(given[2:], wanted[2:], testtype="stdin"),
        "metadata": "{}",
    },
    "deep_coder": lambda n, q, given, wanted: {"problem": q, "tests": _tests(given, wanted, type="stdin_stdout")},
}
_PROGRAMS |= {"deep_coder_shown": _PROGRAMS["deep_coder"]}


def _program(format: str, number: int) -> Row:
    question, given = f"Read a whole number and print it plus {number}.", range(_TESTS)
    return _PROGRAMS[format](number, question, [f"{n}\n" for n in given], [f"{n + number}\n" for n in given])


def write_tiny_file(path: Path, format: str) -> None:
    """Write `path` with a few generated rows of a published format; files of different names have different tasks.

    Raises:
        UnknownName: nothing is generated in that format.
    """
    seed = sum(map(ord, path.stem))
    if format in _PROGRAMS:
        rows = [_program(format, 100 * (seed % 997) + number) for number in range(1, _ROWS + 1)]
    else:
        row = lookup("generated data format", format, _QUESTIONS)
        tasks = (encyclopedia_tasks if format == "search" else arithmetic_tasks)(seed, {"train": _ROWS})
        rows = [_question(row, number, task) for number, task in enumerate(tasks)]
    if path.suffix == ".parquet":
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_text(
            path, json.dumps(rows) if path.suffix == ".json" else "".join(f"{json.dumps(row)}\n" for row in rows)
        )
