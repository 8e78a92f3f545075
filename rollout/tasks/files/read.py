"""Tasks from a data file of a named format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from rollout.records import RecordError, Task, read_tasks
from rollout.registry import lookup
from rollout.tasks.files.formats import FORMATS
from rollout.tasks.files.problem import BadRow, Format, Problem
from rollout.tasks.files.rows import rows

OWN = "tasks"  # the format of `rollout.records.write_tasks`
READABLE: dict[str, Format | None] = {OWN: None, **FORMATS}

Placed = tuple[str, Task]  # where a task is from, "file: row 7"


def read(path: Path, *, format: str, split: str, source: str = "") -> Iterator[Placed]:
    """The tasks of a file with the rows they are from, counted from 0; rows with nothing to score are left out.

    A task's id is its source, the row's own id if there is one, and a digest of the question. Files of the format
    `tasks` bring ids, sources and splits of their own.

    Args:
        format: a name in READABLE, or the import path of a Format.
        split: train, validation or test.
        source: the data source to report under; "" is the row's own, or the format's name.

    Raises:
        RecordError: the file or a row of it is not of that format: says which, and what was expected.
        UnknownName: no such format.
    """
    known = lookup("data format", format, READABLE)
    if known is None:
        for number, task in enumerate(read_tasks(path)):
            yield f"{path}: row {number}", task
        return
    for number, row in enumerate(rows(path)):
        try:
            problem = known.problem(row)
        except BadRow as error:
            raise RecordError(f"{path}: row {number} of format {format} {error}") from error
        if problem is not None:
            label = source or problem.source or format.rpartition(":")[2]
            yield f"{path}: row {number}", _task(problem, known.env, split, label)


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


def _task(problem: Problem, env: str, split: str, source: str) -> Task:
    digest = hashlib.blake2b(problem.question.encode(), digest_size=6).hexdigest()
    name = f"{problem.name}-{digest}" if problem.name else digest
    return Task(
        id=f"{source}/{name}", prompt=problem.prompt, answers=problem.answers, env=env, source=source, split=split
    )
