"""Tasks of data files: the published formats, and the conversion of rows to tasks."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from rollout.base.lookup import lookup
from rollout.base.yaml_files import read_yaml
from rollout.records.files import RecordError, read_tasks
from rollout.records.trajectory import Task
from rollout.tasks.fields import BadRow, Fields, Format, Problem
from rollout.tasks.programs import READERS_OF_TESTS, ProgramFormat, swe_bench, tested_problem
from rollout.tasks.rows import located_rows

_FIELDS = TypeAdapter(dict[str, Fields]).validate_python(
    read_yaml(Path(__file__).with_name("formats.yaml"))
)
PLAIN = _FIELDS["plain"]

_UNSAFE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\]")
_RELATIVE_SEGMENT = re.compile(r"(?<![^/])\.\.?(?![^/])")
_PATH_START = re.compile(r"^[/~]")

# Formats of rows by name.
FORMATS: dict[str, Format] = {
    **_FIELDS,
    "swe_bench": ProgramFormat(
        read=swe_bench, env="repository", error="is not an instance of SWE-bench"
    ),
}
for _name, _read in READERS_OF_TESTS.items():
    FORMATS[_name] = ProgramFormat(read=partial(tested_problem, _read))

# Name of the format of `rollout.records.files.write_tasks`.
TASKS_FORMAT = "tasks"

# All formats that `read_task_file` reads.
READABLE: dict[str, Format | None] = {TASKS_FORMAT: None, **FORMATS}

# Fields of `Fields` by the keys of `data.columns`.
_FIELD_OF_COLUMN = {
    "prompt": "question",
    "answer": "answers",
    "id": "name",
    "source": "source",
    "context": "context",
}


@dataclass(frozen=True, slots=True)
class LocatedTask:
    """Task with the row that it was read from.

    Attributes:
        location: file and row for errors, such as "train.jsonl: line 7"; rows in memory have their
            index, such as "rows[6]".
        task: the task.
    """

    location: str
    task: Task


def read_task_file(
    path: Path,
    rows: Iterable[Mapping[str, Any]] | None = None,
    *,
    format: str,
    split: str,
    source: str = "",
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[LocatedTask]:
    """Yield the tasks of a data file, without the rows that have nothing to score.

    The id of a task consists of its source, the row's id if there is one, and a digest of the
    question. Rows of the format "tasks" already have an id, a source and a split.

    Args:
        path: path of the file.
        rows: rows of the file, if they are in memory; None reads the file.
        format: name in `READABLE`, or import path of a `Format`.
        split: "train", "validation" or "test".
        source: name of the data source; "" takes the source of each row, or else the name of the
            format.
        columns: names of the columns with prompt, answer, id, source and context, which replace
            those of the format.

    Raises:
        RecordError: the file or a row of it is not of the format.
        UnknownName: there is no such format.
    """
    if rows is None and lookup("data format", format, READABLE) is None:
        for number, task in enumerate(read_tasks(path), start=1):
            yield LocatedTask(f"{path}: row {number}", task)
        return

    row_format = lookup("data format", format, FORMATS)
    if columns:
        if not isinstance(row_format, Fields):
            raise RecordError(f"{path}: format {format} reads fixed columns; leave columns out")
        changes: dict[str, Any] = {
            _FIELD_OF_COLUMN[key]: (column.lower(),) for key, column in columns.items()
        }
        needs_answer = row_format.needs_answer or "answer" in columns
        row_format = replace(row_format, needs_answer=needs_answer, **changes)
    if rows is None:
        locations_and_rows = ((f"{path}: {location}", row) for location, row in located_rows(path))
    else:
        locations_and_rows = ((f"{path}[{index}]", row) for index, row in enumerate(rows))
    for location, row in locations_and_rows:
        try:
            problem = row_format.problem(row)
        except BadRow as error:
            raise RecordError(f"{location} of format {format} {error}") from error
        if problem is not None:
            row_source = source or problem.source or format.rpartition(":")[2]
            yield LocatedTask(location, problem_task(problem, row_format.env, split, row_source))


def distinct_tasks(
    located: Iterable[LocatedTask], seen: dict[str, LocatedTask], *, drop: bool
) -> Iterator[Task]:
    """Yield the tasks whose ids are not in `seen` yet, and add them to it.

    Args:
        located: tasks to check.
        seen: earlier tasks by id.
        drop: leave out a task that is equal to an earlier one, instead of raising an error.

    Raises:
        RecordError: a task has the id of an earlier one, and `drop` is False or it is another task.
    """
    for entry in located:
        task = entry.task
        earlier = seen.setdefault(task.id, entry)
        if earlier is entry:
            yield task
        elif (earlier.task.prompt, earlier.task.answers) != (task.prompt, task.answers):
            raise RecordError(
                f"{entry.location}: task {task.id} is in {earlier.location} with another prompt or "
                "answer; keep one of them"
            )
        elif not drop:
            raise RecordError(
                f"{entry.location}: task {task.id} is in {earlier.location} already; set "
                "data.duplicates: drop to keep one"
            )


def _without_path_parts(task_id: str) -> str:
    """Replace relative path segments, backslashes and control characters of a task's id by `_`.

    Ids become names of folders. The digest in each id still distinguishes the tasks.
    """
    task_id = _UNSAFE_CHARACTERS.sub("_", task_id)
    task_id = _RELATIVE_SEGMENT.sub("_", task_id)
    return _PATH_START.sub("_", task_id)


def problem_task(problem: Problem, env: str, split: str, source: str) -> Task:
    """Convert a problem to a task, whose id is SOURCE/NAME-DIGEST or SOURCE/DIGEST."""
    question = problem.question.encode(errors="surrogatepass")
    digest = hashlib.blake2b(question, digest_size=6).hexdigest()
    name = f"{problem.name}-{digest}" if problem.name else digest
    return Task(
        id=_without_path_parts(f"{source}/{name}"),
        prompt=problem.prompt,
        answers=problem.answers,
        env=env,
        source=source,
        split=split,
    )
