"""Files of records: tasks and trajectories as parquet, their Arrow schemas, and lists of trajectories, read lazily."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from rollout.base.files import atomic_path
from rollout.base.parquet import bounded_table
from rollout.base.yaml_files import read_yaml
from rollout.records.trajectory import Task, Trajectory


class RecordError(ValueError):
    """A file of records cannot be read: says which file, what is wrong and what to do."""


def _arrow_type(told: Any) -> pa.DataType:
    if isinstance(told, list):
        return pa.list_(_arrow_type(told[0]))
    if isinstance(told, dict):
        return pa.struct([(name, _arrow_type(kind)) for name, kind in told.items()])
    return pa.map_(pa.string(), pa.float64()) if told == "numbers" else pa.type_for_alias(told)


_SCHEMAS = read_yaml(Path(__file__).with_name("schemas.yaml"))
TASK_SCHEMA, TRAJECTORY_SCHEMA = (
    pa.schema(_arrow_type(_SCHEMAS[name])) for name in ("task", "trajectory")
)
_ROW_GROUP = 256  # rows that are read together, where one is looked at
_TOGETHER = 16  # trajectories that become columns in one call, during which no other thread runs


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Write tasks with their digest as parquet, complete or not at all."""
    rows = [asdict(task) for task in tasks]
    _write(
        path,
        pa.Table.from_pylist(
            rows, schema=TASK_SCHEMA.with_metadata({_DIGEST: tasks_digest(tasks)})
        ),
    )


def read_tasks(path: Path) -> list[Task]:
    """Read tasks written by `write_tasks`, or by anyone with the same columns.

    Raises:
        RecordError: the file is missing, is not parquet, lacks a column, is not what `write_tasks` wrote, or has a task
            without an id, a prompt or a value of another column.
    """
    rows = _read(path, TASK_SCHEMA)
    for number, row in enumerate(rows):
        if fault := _fault(row):
            raise RecordError(f"{path}: row {number}: {fault}; make the file again")
    tasks = [Task(**{**row, "answers": tuple(row["answers"])}) for row in rows]
    written = (pq.read_schema(path).metadata or {}).get(_DIGEST)
    if written is not None and written != tasks_digest(tasks).encode():
        raise RecordError(
            f"{path}: not what was written (its digest is another); make the file again"
        )
    return tasks


def tasks_digest(tasks: Sequence[Task]) -> str:
    """What tells tasks from others, in their order: SHA-256, in hexadecimal."""
    digest = hashlib.sha256(
        b"["
    )  # of one list in JSON, which would take several times the memory of tasks with tests
    for place, task in enumerate(tasks):
        digest.update(f"{', ' if place else ''}{json.dumps(asdict(task))}".encode())
    digest.update(b"]")
    return digest.hexdigest()


_DIGEST = b"mcore_mas.sha256"
_METADATA = b"mcore_mas.metadata"
_PATH_LIKE = re.compile(r"^[/~]|(^|/)\.\.?(/|$)|[\x00-\x1f\x7f\\]")


def _fault(row: Mapping[str, Any]) -> str:
    """What is wrong with a task's row, "" if nothing is."""
    if missing := [
        name
        for name, value in row.items()
        if value is None or (name == "answers" and None in value)
    ]:
        return f"no {missing[0]}"
    if not row["id"] or _PATH_LIKE.search(row["id"]):
        return f"id {row['id'][:100]!r}; expected a name without `..`, backslashes and control characters"
    return ""


def write_trajectories(
    path: Path, trajectories: Iterable[Trajectory], metadata: Mapping[str, str] | None = None
) -> None:
    """Write trajectories as parquet with every id and token, complete or not at all.

    Args:
        metadata: texts that `trajectory_metadata` returns.
    """
    # what `asdict` gives, in a fifteenth of the time
    rows = (_TRAJECTORY.dump_python(trajectory, warnings=False) for trajectory in trajectories)
    tables = [TRAJECTORY_SCHEMA.empty_table()]
    while some := list(islice(rows, _TOGETHER)):
        tables.append(pa.Table.from_pylist(some, schema=TRAJECTORY_SCHEMA))
    table = pa.concat_tables(tables)
    if metadata:
        table = table.replace_schema_metadata({_METADATA: json.dumps(metadata)})
    _write(path, table)


def trajectory_metadata(path: Path) -> dict[str, str]:
    """Return the metadata that `write_trajectories` wrote, after all checksums of the file have been compared.

    Raises:
        RecordError: the file is missing or damaged, or is not parquet.
    """
    _read_table(path, TRAJECTORY_SCHEMA)
    metadata: dict[str, str] = json.loads(
        (pq.read_schema(path).metadata or {}).get(_METADATA, "{}")
    )
    return metadata


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read trajectories written by `write_trajectories`, also of a version that recorded less of turns and tools.

    Of a folder of such files, all of them in the order of their names.

    Raises:
        RecordError: the file is missing, is not parquet, lacks a column, or a row of it is no trajectory.
    """
    files = sorted(path.glob("*.parquet")) or [path]
    return [_trajectory(file, row) for file in files for row in _read(file, TRAJECTORY_SCHEMA)]


# what of a turn takes long to read: texts and tokens, and how a record stands without them
_SAID: dict[str, Any] = {
    "messages": (),
    "prompt_ids": (),
    "completion_ids": (),
    "logprobs": (),
    "text": "",
}
_SAID |= {"versions": (), "routing": b""}
_TURNS = TRAJECTORY_SCHEMA.get_field_index("turns")
_SCORED = pa.list_(
    pa.struct(
        [part for part in TRAJECTORY_SCHEMA.field(_TURNS).type.value_type if part.name not in _SAID]
    )
)
_SCORES = TRAJECTORY_SCHEMA.set(_TURNS, pa.field("turns", _SCORED)).remove(
    TRAJECTORY_SCHEMA.get_field_index("tools")
)
_OF_SCORES = [name for name in _SCORES.names if name != "turns"]
_OF_SCORES += [f"turns.list.element.{part.name}" for part in _SCORED.value_type]


def read_scores(path: Path) -> list[Trajectory]:
    """What `read_trajectories` reads of a file, without what was read and said."""
    rows = _read(path, _SCORES, _OF_SCORES)
    return [
        _trajectory(
            path, {**row, "turns": [{**_SAID, **turn} for turn in row["turns"]], "tools": []}
        )
        for row in rows
    ]


def _trajectory(path: Path, row: Mapping[str, Any]) -> Trajectory:
    try:
        return trajectory_of_row(row)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise RecordError(
            f"{path}: {where}: {wrong['msg']}; the file is damaged, make it again"
        ) from error


_TRAJECTORY = TypeAdapter(Trajectory)


def trajectory_of_row(row: Mapping[str, Any]) -> Trajectory:
    """A trajectory from its fields as plain values; ValidationError if they are not those of one."""
    turns = row["turns"] and [
        {**_known(turn), "messages": _all_known(turn["messages"])} for turn in row["turns"]
    ]
    return _TRAJECTORY.validate_python({**row, "turns": turns, "tools": _all_known(row["tools"])})


def _all_known(rows: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if rows is None else [*map(_known, rows)]  # None: a damaged file


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without what an older file does not have, for which the record has a default."""
    return {name: value for name, value in row.items() if value is not None}


def _write(path: Path, table: pa.Table) -> None:
    # zstd finds what repeats by itself; tokens and choices of experts would be encoded twice
    how = {
        "compression": "zstd",
        "use_dictionary": False,
        "row_group_size": _ROW_GROUP,
        "write_page_checksum": True,
    }
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, **how)


def _read(
    path: Path, schema: pa.Schema, columns: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    return _rows_of(path, _read_table(path, schema, columns), schema)


def _read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    if not path.is_file():
        raise RecordError(
            f"{path}: no such file; expected a parquet file with columns {', '.join(schema.names)}"
        )
    what, advice = "not a readable parquet file", "; name another, or make it again"
    with (
        _arrow_errors(path, what, advice),
        pq.ParquetFile(path, page_checksum_verification=True) as file,
    ):
        table = bounded_table(file, columns)
        if (
            table.num_rows != file.metadata.num_rows
        ):  # a page's header, which has no checksum, can hide its page
            raise ValueError(f"{table.num_rows} of {file.metadata.num_rows} rows are here")
    return table


@contextmanager
def _arrow_errors(path: Path, problem: str, advice: str = "") -> Iterator[None]:
    """Say on one line, as a RecordError, what pyarrow complains of in the block."""
    try:
        yield
    except (pa.ArrowException, ValueError, OSError) as error:
        raise RecordError(f"{path}: {problem} ({' '.join(str(error).split())}){advice}") from error


def _rows_of(path: Path, table: pa.Table, schema: pa.Schema) -> list[dict[str, Any]]:
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise RecordError(
            f"{path}: no column {', '.join(missing)}; expected {', '.join(schema.names)}"
        )
    with _arrow_errors(path, "a column has another type than expected", "; make the file again"):
        rows: list[dict[str, Any]] = (
            table.select(schema.names).cast(schema).to_pylist(maps_as_pydicts="lossy")
        )
    return rows


# columns of which a list of trajectories is made: without texts and tokens
_LIGHT = ["id", "task_id", "source", "sample", "step", "outcome", "answer", "status", "error"]
_OF_TURNS = ["turns.list.element.agent", "turns.list.element.reward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """What a list says of a trajectory."""

    index: int  # in its file
    id: str
    task_id: str
    source: str
    sample: int
    step: int
    outcome: float | None
    answer: str
    status: str
    error: str
    turns: int
    agents: tuple[str, ...]  # who spoke, in the order of their first turns
    reward: float | None  # mean over the turns that have one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFilter:
    """Which trajectories a list shows; what is left out lets all through."""

    text: str = ""  # part of the task's id, the answer or the error, in any case
    agent: str = ""  # who spoke
    status: str = ""
    low: float | None = None  # least mean reward, of an evaluation least outcome
    high: float | None = None

    def keeps(self, row: TrajectoryRow) -> bool:
        """Whether the list shows `row`."""
        reward = row.outcome if row.reward is None else row.reward
        return (
            self.text.casefold() in f"{row.task_id}\n{row.answer}\n{row.error}".casefold()
            and (not self.agent or self.agent in row.agents)
            and self.status in ("", row.status)
            and (self.low is None or (reward is not None and reward >= self.low))
            and (self.high is None or (reward is not None and reward <= self.high))
        )


def _open(path: Path) -> pq.ParquetFile:
    with _arrow_errors(path, "not a readable parquet file"):
        return pq.ParquetFile(path, memory_map=True)


def count_trajectories(path: Path) -> int:
    """How many are in a file, by its footer."""
    with _open(path) as file:
        return int(file.metadata.num_rows)


def list_trajectories(
    path: Path, shown: TrajectoryFilter, *, first: int = 0, limit: int = 100
) -> list[TrajectoryRow]:
    """At most `limit` trajectories of a file that `shown` lets through, from index `first` on; no further are read."""
    found: list[TrajectoryRow] = []
    with _open(path) as file:
        for index, row in _rows(path, file, first):
            listed = _listed(index, row)
            if shown.keeps(listed):
                found.append(listed)
            if len(found) == limit:
                break
    return found


def _groups(file: pq.ParquetFile, first: int) -> Iterator[tuple[int, int]]:
    """Number and first row of the groups of rows that have row `first` or later ones."""
    sizes = [
        file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)
    ]
    for group, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        if end > first:
            yield group, start


def _rows(path: Path, file: pq.ParquetFile, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for group, start in _groups(file, first):
        with _arrow_errors(path, "a damaged file"):
            table = bounded_table(file, [*_LIGHT, *_OF_TURNS], [group])
        if missing := {*_LIGHT, "turns"} - set(table.column_names):
            raise RecordError(
                f"{path}: no column {', '.join(sorted(missing))}; expected a file of trajectories"
            )
        batches = table.slice(max(0, first - start)).to_batches(
            max_chunksize=1024
        )  # a page needs few of them
        yield from enumerate(
            (row for batch in batches for row in batch.to_pylist()), max(start, first)
        )


def _listed(index: int, row: dict[str, Any]) -> TrajectoryRow:
    turns = row.pop("turns")
    rewards = [turn["reward"] for turn in turns if turn["reward"] is not None]
    return TrajectoryRow(
        index=index,
        turns=len(turns),
        agents=tuple(dict.fromkeys(turn["agent"] for turn in turns)),
        reward=sum(rewards) / len(rewards) if rewards else None,
        **row,
    )


def trajectory_at(path: Path, index: int) -> Trajectory:
    """One trajectory of a file; only the group of rows that it is in is read.

    Raises:
        RecordError: it is no file of trajectories, or has none of this index.
    """
    with _open(path) as file:
        if 0 <= index < file.metadata.num_rows:
            group, start = next(_groups(file, index))
            with _arrow_errors(path, "a damaged file"):
                table = bounded_table(file, groups=[group])
            return _trajectory(
                path, _rows_of(path, table.slice(index - start, 1), TRAJECTORY_SCHEMA)[0]
            )
        raise RecordError(
            f"{path}: no trajectory {index}; it holds {file.metadata.num_rows}, counted from 0"
        )
