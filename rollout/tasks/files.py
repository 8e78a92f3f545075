"""Datasets (data files) as tasks: their rows, their published formats, and how they are read."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq
from pydantic import TypeAdapter

from mcore_mas.rollout.base.files import read_json, read_yaml
from mcore_mas.rollout.base.options import lookup
from mcore_mas.rollout.base.parquet import bounded_batches
from mcore_mas.rollout.records.files import RecordError, read_tasks
from mcore_mas.rollout.records.trajectory import Task
from mcore_mas.rollout.tasks.fields import BadRow, Fields, Format, Problem
from mcore_mas.rollout.tasks.programs import STYLES, Programs, swe_bench, tested

FORMATS: dict[str, Format] = {
    **TypeAdapter(dict[str, Fields]).validate_python(read_yaml(Path(__file__).with_name("formats.yaml"))),
    "swe_bench": Programs(read=swe_bench, env="repository", none="is no instance of SWE-bench"),
    **{name: Programs(read=partial(tested, read)) for name, read in STYLES.items()},
}

_BATCH_ROWS = 256
_MAX_CELL_CHARS = 1 << 24
_MOST_JSON, _MOST_LINE = 2 << 30, 64 << 20  # bytes of a file that is read whole, characters of a line


def read_rows(path: Path, suffix: str = "") -> Iterator[Mapping[str, Any]]:
    """The rows of `path` in their order, read as they are asked for, as a file named `suffix` if that is given.

    Raises:
        RecordError: the file is missing, is not what its name says, or holds something that is no row.
    """
    suffix = suffix or path.suffix
    if suffix not in READERS:
        raise RecordError(f"{path}: expected a file named {', '.join(READERS)}")
    try:
        for number, row in enumerate(READERS[suffix](path)):
            if not isinstance(row, Mapping):
                raise RecordError(f"{path}: row {number} is a {type(row).__name__}; expected an object with columns")
            yield row
    except FileNotFoundError as error:
        raise RecordError(f"{path}: no such file") from error
    except RecordError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise RecordError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def _parquet(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        for batch in bounded_batches(path, file, rows=_BATCH_ROWS):
            yield from batch.to_pylist()


def _json(path: Path) -> Iterator[Any]:
    value = read_json(path, _MOST_JSON)
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("data", "Data") if isinstance(value.get(key), list)), value)
    if not isinstance(value, list):
        raise RecordError(f"{path}: expected a list of rows, or an object with one under 'data'")
    yield from value


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_MOST_LINE + 1), ""), start=1):
            if len(line) > _MOST_LINE:
                raise RecordError(f"{path}: line {number} has more than {_MOST_LINE} characters")
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise RecordError(f"{path}: line {number} cannot be read ({error})") from error


def _csv(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        while (row := _next_row(rows)) is not None:
            yield row


def _next_row(rows: Iterator[dict[str, str]]) -> dict[str, str] | None:
    """The next row; its cells may be longer than this process allows elsewhere."""
    usual = csv.field_size_limit(_MAX_CELL_CHARS)
    try:
        return next(rows, None)
    finally:
        csv.field_size_limit(usual)


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".parquet": _parquet,
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
}

OWN = "tasks"  # the format of `mcore_mas.rollout.records.files.write_tasks`
READABLE: dict[str, Format | None] = {OWN: None, **FORMATS}

_COLUMNS = {"prompt": "question", "answer": "answers", "id": "name", "source": "source", "context": "context"}
Placed = tuple[str, Task]  # where a task is from, "file: row 7"


def read_task_file(
    path: Path, *, format: str, split: str, source: str = "", columns: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Placed]:
    """The tasks of a file with the rows they are from, counted from 0; rows with nothing to score are left out.

    A task's id is its source, the row's own id if there is one, and a digest of the question. Files of the format
    `tasks` bring ids, sources and splits of their own.

    Args:
        format: a name in READABLE, or the import path of a Format.
        split: train, validation or test.
        source: the data source to report under; "" is the row's own, or the format's name.
        columns: where a row has its prompt, answer, id, source or context, in place of the format's columns.

    Raises:
        RecordError: the file or a row of it is not of that format: says which, and what was expected.
        UnknownName: no such format.
    """
    known = lookup("data format", format, READABLE)
    if known is None:
        for number, task in enumerate(read_tasks(path)):
            yield f"{path}: row {number}", task
        return
    if columns:
        if not isinstance(known, Fields):
            raise RecordError(f"{path}: rows of format {format} are programs with tests; leave columns out")
        own: dict[str, Any] = {_COLUMNS[what]: (name.lower(),) for what, name in columns.items()}
        known = replace(known, **own)
    for number, row in enumerate(read_rows(path)):
        try:
            problem = known.problem(row)
        except BadRow as error:
            raise RecordError(f"{path}: row {number} of format {format} {error}") from error
        if problem is not None:
            label = source or problem.source or format.rpartition(":")[2]
            yield f"{path}: row {number}", problem_task(problem, known.env, split, label)


def distinct(placed: Iterable[Placed], seen: dict[str, Placed], *, drop: bool) -> Iterator[Task]:
    """Tasks whose ids are not in `seen`, which learns them; with `drop` the same task again is passed over.

    Raises:
        RecordError: an id comes again, and either `drop` is off or the task is another one.
    """
    for place, task in placed:
        if task.id not in seen:
            seen[task.id] = (place, task)
            yield task
            continue
        first, same = seen[task.id]
        if (same.prompt, same.answers) != (task.prompt, task.answers):
            raise RecordError(f"{place}: task {task.id} is in {first} with another prompt or answer; keep one of them")
        elif not drop:
            raise RecordError(f"{place}: task {task.id} is in {first} already; set data.duplicates: drop to keep one")


def problem_task(problem: Problem, env: str, split: str, source: str) -> Task:
    """The task of a row's problem, whose id is its source, the row's own id and a digest of the question."""
    digest = hashlib.blake2b(problem.question.encode(), digest_size=6).hexdigest()
    name = f"{problem.name}-{digest}" if problem.name else digest
    return Task(
        id=f"{source}/{name}", prompt=problem.prompt, answers=problem.answers, env=env, source=source, split=split
    )
