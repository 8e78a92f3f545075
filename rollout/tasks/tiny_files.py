"""Generated data files in the published formats, small: what a run at the scale `tiny` reads."""

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
_ROWS = 14  # of a file
_TESTS, _SHOWN = 6, 2  # of a program

Row = dict[str, Any]

_FORMATS: Mapping[str, Mapping[str, str]] = read_yaml(Path(__file__).with_suffix(".yaml"))


def _row(row: str, texts: Mapping[str, object], **plain: object) -> Row:
    quoted = {name: json.dumps(text) for name, text in texts.items()}
    return dict(json.loads(Template(row).substitute(quoted, **plain)))


def _question(row: str, number: int, task: Task) -> Row:
    answer, source = task.answers[0], SEARCH_SOURCES[number % len(SEARCH_SOURCES)]
    texts = {
        "question": task.prompt,
        "answer": answer,
        "boxed": f"\\boxed{{{answer}}}",
        "source": source,
    }
    return _row(row, texts, value=answer, number=number)


def _program(row: str, number: int) -> Row:
    inputs, outputs = [f"{n}\n" for n in range(_TESTS)], [f"{n + number}\n" for n in range(_TESTS)]
    cases = [
        {"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)
    ]
    texts: dict[str, object] = {
        "question": f"Read a whole number and print it plus {number}.",
        "lists": json.dumps({"inputs": inputs, "outputs": outputs}),
        "typed_cases": json.dumps([{**case, "type": "stdin_stdout"} for case in cases]),
    }
    for name, part in (("shown", slice(_SHOWN)), ("hidden", slice(_SHOWN, None))):
        texts |= {f"{name}_inputs": inputs[part], f"{name}_outputs": outputs[part]}
        texts[f"{name}_cases"] = json.dumps([{**case, "testtype": "stdin"} for case in cases[part]])
    return _row(row, texts, number=number)


def write_tiny_file(path: Path, format: str) -> None:
    """Write `path` with a few generated rows of a published format; files of different names have different tasks.

    Raises:
        UnknownName: nothing is generated in that format.
    """
    seed = sum(map(ord, path.stem))
    if format in _FORMATS["programs"]:
        program = _FORMATS["programs"][format]
        rows = [_program(program, 100 * (seed % 997) + number) for number in range(1, _ROWS + 1)]
    else:
        row = lookup("generated data format", format, _FORMATS["questions"])
        tasks = (encyclopedia_tasks if format == "search" else arithmetic_tasks)(
            seed, {"train": _ROWS}
        )
        rows = [_question(row, number, task) for number, task in enumerate(tasks)]
    if path.suffix == ".parquet":
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_text(
            path,
            json.dumps(rows)
            if path.suffix == ".json"
            else "".join(f"{json.dumps(row)}\n" for row in rows),
        )
