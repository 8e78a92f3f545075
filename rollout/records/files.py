"""Files of records: tasks and trajectories as parquet, with the Arrow schemas of `schemas.yaml`."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from rollout.base.files import atomic_path
from rollout.base.parquet import bounded_table, open_parquet
from rollout.base.yaml_files import read_yaml
from rollout.records.trajectory import Task, Trajectory

_DIGEST_KEY = b"mcore_mas.sha256"
_METADATA_KEY = b"mcore_mas.metadata"
_ROW_GROUP_ROWS = 256  # rows that are read together when one of them is shown
# Trajectories that are converted to columns in one call; no other Python thread runs during the call.
_ROWS_PER_CONVERSION = 16
_PATH_LIKE = re.compile(r"^[/~]|(^|/)\.\.?(/|$)|[\x00-\x1f\x7f\\]")
_TRAJECTORY = TypeAdapter(Trajectory)


class RecordError(ValueError):
    """A file of records cannot be read; the message names the file, the problem and the remedy."""


def _arrow_type(description: Any) -> pa.DataType:
    """Return the Arrow type that `schemas.yaml` describes by a name, a list or a mapping."""
    if isinstance(description, list):
        return pa.list_(_arrow_type(description[0]))
    if isinstance(description, dict):
        return pa.struct([(name, _arrow_type(field)) for name, field in description.items()])
    if description == "numbers":
        return pa.map_(pa.string(), pa.float64())
    return pa.type_for_alias(description)


_SCHEMAS = read_yaml(Path(__file__).with_name("schemas.yaml"))
TASK_SCHEMA = pa.schema(_arrow_type(_SCHEMAS["task"]))
TRAJECTORY_SCHEMA = pa.schema(_arrow_type(_SCHEMAS["trajectory"]))

# --- tasks


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Write tasks and their digest as parquet; a failure leaves no partial file."""
    rows = [asdict(task) for task in tasks]
    schema = TASK_SCHEMA.with_metadata({_DIGEST_KEY: tasks_digest(tasks)})
    _write_table(path, pa.Table.from_pylist(rows, schema=schema))


def read_tasks(path: Path) -> list[Task]:
    """Read tasks that `write_tasks` or another program wrote with the same columns.

    Raises:
        RecordError: the file is missing, is not parquet, lacks a column, has changed since
            `write_tasks` wrote it, or has a task that lacks a value.
    """
    rows = table_rows(path, _read_table(path, TASK_SCHEMA), TASK_SCHEMA)
    for number, row in enumerate(rows, start=1):
        problem = _task_problem(row)
        if problem:
            raise RecordError(f"{path}: row {number}: {problem}; make the file again")
    tasks = [Task(**{**row, "answers": tuple(row["answers"])}) for row in rows]

    digest = _file_metadata(path).get(_DIGEST_KEY)
    if digest is not None and digest != tasks_digest(tasks).encode():
        raise RecordError(
            f"{path}: the tasks do not have the digest that was written with them; "
            "make the file again"
        )
    return tasks


def stored_tasks_digest(path: Path) -> str:
    """Return the digest that `write_tasks` stored in a file, without reading its tasks.

    Return "" if there is no such file, or if another program wrote it.
    """
    try:
        digest = _file_metadata(path).get(_DIGEST_KEY, b"")
    except (pa.ArrowException, OSError):
        return ""
    return digest.decode()


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Return the SHA-256 of tasks in their order, in hexadecimal."""
    # The digest is that of one JSON list. The list is hashed task by task, because tasks with tests
    # would take several times their memory as one text.
    digest = hashlib.sha256(b"[")
    for number, task in enumerate(tasks):
        separator = ", " if number else ""
        digest.update(f"{separator}{json.dumps(asdict(task))}".encode())
    digest.update(b"]")
    return digest.hexdigest()


def _task_problem(row: Mapping[str, Any]) -> str:
    """Return the first problem of a task's row, or ""."""
    for name, value in row.items():
        if value is None or (name == "answers" and None in value):
            return f"no {name}"
    return task_id_problem(row["id"])


def task_id_problem(task_id: str) -> str:
    """Return the reason why a text cannot be a task's id, or ""; ids become names of files."""
    if task_id and not _PATH_LIKE.search(task_id):
        return ""
    return (
        f"id {task_id[:100]!r}; expected a name that does not begin with `/` or `~`, without the parts "
        "`.` and `..`, backslashes and control characters"
    )


# --- trajectories


def write_trajectories(
    path: Path, trajectories: Iterable[Trajectory], metadata: Mapping[str, str] | None = None
) -> None:
    """Write trajectories with all ids and tokens as parquet; a failure leaves no partial file.

    Args:
        metadata: texts about the file, by name; `trajectory_metadata` returns them.
    """
    # dump_python returns the same as dataclasses.asdict, 15 times faster
    rows = (_TRAJECTORY.dump_python(trajectory, warnings=False) for trajectory in trajectories)
    tables = [TRAJECTORY_SCHEMA.empty_table()]
    while True:
        next_rows = list(islice(rows, _ROWS_PER_CONVERSION))
        if not next_rows:
            break
        tables.append(pa.Table.from_pylist(next_rows, schema=TRAJECTORY_SCHEMA))

    table = pa.concat_tables(tables)
    if metadata:
        table = table.replace_schema_metadata({_METADATA_KEY: json.dumps(metadata)})
    _write_table(path, table)


def trajectory_metadata(path: Path) -> dict[str, str]:
    """Return the metadata that `write_trajectories` wrote, after a check of the whole file.

    Raises:
        RecordError: the file is missing or damaged, or is not parquet.
    """
    _read_table(path, TRAJECTORY_SCHEMA)  # verifies the checksums of all pages
    metadata: dict[str, str] = json.loads(_file_metadata(path).get(_METADATA_KEY, "{}"))
    return metadata


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read trajectories that `write_trajectories` wrote, also in an earlier version with fewer fields.

    Args:
        path: a file, or a folder whose files are read in the order of their names.

    Raises:
        RecordError: a file is missing, is not parquet, lacks a column, or has a row that is no
            trajectory.
    """
    trajectories = []
    for file in sorted(path.glob("*.parquet")) or [path]:
        rows = table_rows(file, _read_table(file, TRAJECTORY_SCHEMA), TRAJECTORY_SCHEMA)
        trajectories += [parse_trajectory(file, row) for row in rows]
    return trajectories


# Fields of a turn that take long to read, texts and tokens, with their values in `read_scores`.
_UNREAD_TURN_FIELDS: dict[str, Any] = {
    "messages": (),
    "prompt_ids": (),
    "completion_ids": (),
    "logprobs": (),
    "text": "",
    "versions": (),
    "routing": b"",
    "grammar": "",
}


def _schema_of_scores() -> pa.Schema:
    """Return the schema of trajectories without tool calls, texts and tokens."""
    turns_index = TRAJECTORY_SCHEMA.get_field_index("turns")
    turn_fields = TRAJECTORY_SCHEMA.field(turns_index).type.value_type
    read_fields = [field for field in turn_fields if field.name not in _UNREAD_TURN_FIELDS]
    turns = pa.field("turns", pa.list_(pa.struct(read_fields)))
    tools_index = TRAJECTORY_SCHEMA.get_field_index("tools")
    return TRAJECTORY_SCHEMA.set(turns_index, turns).remove(tools_index)


_SCORES_SCHEMA = _schema_of_scores()
_SCORES_COLUMNS = [name for name in _SCORES_SCHEMA.names if name != "turns"]
_SCORES_COLUMNS += [
    f"turns.list.element.{field.name}" for field in _SCORES_SCHEMA.field("turns").type.value_type
]


def read_scores(path: Path) -> list[Trajectory]:
    """Read the trajectories of a file without their texts, tokens and tool calls, which is faster.

    Raises:
        RecordError: as in `read_trajectories`.
    """
    table = _read_table(path, _SCORES_SCHEMA, _SCORES_COLUMNS)
    trajectories = []
    for row in table_rows(path, table, _SCORES_SCHEMA):
        turns = [{**_UNREAD_TURN_FIELDS, **turn} for turn in row["turns"]]
        trajectories.append(parse_trajectory(path, {**row, "turns": turns, "tools": []}))
    return trajectories


def parse_trajectory(path: Path, row: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory in a row of the file `path`; raise RecordError if it is none."""
    try:
        return validate_trajectory(row)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise RecordError(
            f"{path}: {field}: {problem['msg']}; the file is damaged, make it again"
        ) from error


def validate_trajectory(row: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory in a row of plain values.

    Fields that an older file lacks are None in its rows; they get their defaults.

    Raises:
        ValidationError: a field is missing or has a wrong type.
    """
    turns = row["turns"]
    if turns:
        turns = [
            {**_without_nones(turn), "messages": _rows_without_nones(turn["messages"])}
            for turn in turns
        ]
    tools = _rows_without_nones(row["tools"])
    return _TRAJECTORY.validate_python({**row, "turns": turns, "tools": tools})


def _without_nones(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _rows_without_nones(rows: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if rows is None:  # the file is damaged, and the validation that follows raises an error
        return None
    return [_without_nones(row) for row in rows]


# --- parquet


def _write_table(path: Path, table: pa.Table) -> None:
    with atomic_path(path) as temporary:
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            use_dictionary=False,  # zstd finds repetitions itself
            row_group_size=_ROW_GROUP_ROWS,
            write_page_checksum=True,
        )


def _read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a parquet file, and verify the checksums of the pages that are read.

    Args:
        schema: columns that the file should have, for the error about a missing file.
        columns: names of the columns to read; None: all.

    Raises:
        RecordError: the file is missing, damaged, or not a parquet file.
    """
    if not path.is_file():
        raise RecordError(
            f"{path}: no such file; expected a parquet file with columns {', '.join(schema.names)}"
        )
    with (
        arrow_errors(path, "not a readable parquet file", "; name another, or make it again"),
        open_parquet(path, page_checksum_verification=True) as file,
    ):
        table = bounded_table(file, columns)
        # The header of a page has no checksum, and a damaged one can hide its page.
        if table.num_rows != file.metadata.num_rows:
            raise ValueError(f"{table.num_rows} of {file.metadata.num_rows} rows are here")
    return table


def _file_metadata(path: Path) -> dict[bytes, bytes]:
    metadata: dict[bytes, bytes] = pq.read_schema(path).metadata or {}
    return metadata


@contextmanager
def arrow_errors(path: Path, problem: str, advice: str = "") -> Iterator[None]:
    """Raise errors of reading a file in this context as a RecordError of one line."""
    try:
        yield
    except (pa.ArrowException, ValueError, OSError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RecordError(f"{path}: {problem} ({reason}){advice}") from error


def table_rows(path: Path, table: pa.Table, schema: pa.Schema) -> list[dict[str, Any]]:
    """Return the rows of a table of the file `path`, with the columns of `schema` and their types.

    Raises:
        RecordError: the table lacks a column, or has one that cannot be converted to its type.
    """
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise RecordError(
            f"{path}: no column {', '.join(missing)}; expected {', '.join(schema.names)}"
        )
    with arrow_errors(path, "a column has another type than expected", "; make the file again"):
        columns = table.select(schema.names).cast(schema)
        rows: list[dict[str, Any]] = columns.to_pylist(maps_as_pydicts="lossy")
    return rows
