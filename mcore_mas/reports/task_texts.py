"""Questions and right answers of tasks, looked up by id in a run's files of tasks."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rollout.base.parquet import bounded_batches, open_parquet
from rollout.records.files import RecordError, arrow_errors, table_rows

# Columns that are read of a file of tasks.
_SCHEMA = pa.schema({"id": pa.string(), "prompt": pa.string(), "answers": pa.list_(pa.string())})
_BATCH_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskText:
    """Question of a task and all its accepted answers."""

    question: str
    answers: tuple[str, ...]


def read_task_texts(paths: Collection[Path], task_ids: Collection[str]) -> dict[str, TaskText]:
    """Return the texts of tasks by id; tasks that no readable file has are left out.

    A file is read once and searched in Arrow, because a run may have a million tasks.
    """
    texts: dict[str, TaskText] = {}
    for path in paths:
        missing = [task_id for task_id in task_ids if task_id not in texts]
        if missing:
            texts.update(_search_file(path, missing))
    return texts


def find_task_texts(file: Path, task_ids: Collection[str]) -> dict[str, TaskText]:
    """Return the texts of tasks by id, from the run that a file of trajectories lies in.

    Tasks that the run does not have are left out. The result is {} if the file lies in no run's folder.
    """
    for folder in file.resolve().parents:
        if (folder / "tasks").is_dir():
            return read_task_texts(sorted((folder / "tasks").glob("*.parquet")), task_ids)
    return {}


def _search_file(path: Path, task_ids: Collection[str]) -> Iterator[tuple[str, TaskText]]:
    """Yield id and text of the tasks of a file that have one of the ids; none if it cannot be read."""
    try:
        tasks = _read_columns(path, path.stat().st_mtime_ns)
        with arrow_errors(path, "a column has another type than expected"):
            matches = tasks.filter(pc.is_in(tasks["id"], pa.array(task_ids, pa.string())))
        rows = table_rows(path, matches, _SCHEMA)
    except (OSError, RecordError):
        return  # a list of trajectories without questions is better than none
    for row in rows:
        question = row["prompt"] or ""
        yield row["id"], TaskText(question=question, answers=tuple(row["answers"] or ()))


@lru_cache(maxsize=8)
def _read_columns(path: Path, modified_ns: int) -> pa.Table:
    """Read id, prompt and answers of the tasks in a file, as far as it has these columns.

    The time of modification is a key of the cache, so that a modified file is read again.

    Raises:
        RecordError: the file cannot be read, or has no ids.
    """
    with arrow_errors(path, "not a readable file of tasks"), open_parquet(path) as file:
        batches = list(bounded_batches(file, rows=_BATCH_ROWS, columns=_SCHEMA.names))
        # A file without rows has no batches.
        table = pa.Table.from_batches(batches) if batches else file.read(columns=_SCHEMA.names)
    if "id" not in table.column_names:
        raise RecordError(f"{path}: no column id; expected {', '.join(_SCHEMA.names)}")
    return table
