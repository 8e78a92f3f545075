"""Small generated data files in the published formats, which runs at the scale `tiny` read."""

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.base.files import write_text
from rollout.base.lookup import lookup
from rollout.base.yaml_files import read_yaml
from rollout.records.trajectory import Task
from rollout.tasks.arithmetic import arithmetic_tasks
from rollout.tasks.encyclopedia import encyclopedia_tasks

SEARCH_SOURCES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")

ROWS_PER_FILE = 14
_TESTS_PER_PROGRAM = 6
_SHOWN_TESTS = 2

Row = dict[str, Any]

# Rows of each format as JSON templates, by format and by kind: "questions" or "programs".
_FORMATS: Mapping[str, Mapping[str, str]] = read_yaml(Path(__file__).with_suffix(".yaml"))


def write_tiny_file(path: Path, format: str) -> None:
    """Write a few generated rows of a published format; the name of the file is their seed.

    Args:
        path: path of the file, which is a .parquet, .json or .jsonl.
        format: name of the format.

    Raises:
        UnknownName: nothing is generated in this format.
    """
    seed = sum(map(ord, path.stem))
    rows = _make_rows(seed, format)
    if path.suffix == ".parquet":
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        write_text(path, json.dumps(rows))
    else:
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def _make_rows(seed: int, format: str) -> list[Row]:
    if format in _FORMATS["programs"]:
        template = _FORMATS["programs"][format]
        first = 100 * (seed % 997) + 1
        return [_program_row(template, first + index) for index in range(ROWS_PER_FILE)]

    template = lookup("generated data format", format, _FORMATS["questions"])
    make_tasks = encyclopedia_tasks if format == "search" else arithmetic_tasks
    tasks = make_tasks(seed, {"train": ROWS_PER_FILE})
    return [_question_row(template, number, task) for number, task in enumerate(tasks)]


def _question_row(template: str, number: int, task: Task) -> Row:
    answer = task.answers[0]
    texts = {
        "question": task.prompt,
        "answer": answer,
        "boxed": f"\\boxed{{{answer}}}",
        "source": SEARCH_SOURCES[number % len(SEARCH_SOURCES)],
    }
    return _fill(template, texts, value=answer, number=number)


def _program_row(template: str, number: int) -> Row:
    """Return the row of a program that reads a number and prints it plus `number`."""
    inputs = [f"{n}\n" for n in range(_TESTS_PER_PROGRAM)]
    outputs = [f"{n + number}\n" for n in range(_TESTS_PER_PROGRAM)]
    cases = [
        {"input": given, "output": expected}
        for given, expected in zip(inputs, outputs, strict=True)
    ]
    texts: dict[str, object] = {
        "question": f"Read a whole number and print it plus {number}.",
        "lists": json.dumps({"inputs": inputs, "outputs": outputs}),
        "typed_cases": json.dumps([{**case, "type": "stdin_stdout"} for case in cases]),
    }
    parts = {"shown": slice(_SHOWN_TESTS), "hidden": slice(_SHOWN_TESTS, None)}
    for name, part in parts.items():
        texts[f"{name}_inputs"] = inputs[part]
        texts[f"{name}_outputs"] = outputs[part]
        texts[f"{name}_cases"] = json.dumps([{**case, "testtype": "stdin"} for case in cases[part]])
    return _fill(template, texts, number=number)


def _fill(template: str, json_values: Mapping[str, object], **texts: object) -> Row:
    """Fill in the gaps of a JSON template.

    Args:
        template: JSON with gaps.
        json_values: values that are inserted as JSON.
        texts: values that are inserted as they are.
    """
    quoted = {name: json.dumps(value) for name, value in json_values.items()}
    return dict(json.loads(Template(template).substitute(quoted, **texts)))
