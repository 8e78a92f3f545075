"""Lists of the trajectories in a file, for which only the row groups and columns shown are read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from retrieval.regular_files import check_regular
from rollout.base.parquet import bounded_table
from rollout.records.files import (
    TRAJECTORY_SCHEMA,
    RecordError,
    arrow_errors,
    parse_trajectory,
    table_rows,
)
from rollout.records.trajectory import Trajectory

_MAX_BATCH_ROWS = 1024  # rows of a large row group that are converted at a time

# Columns that a list needs, without texts and tokens.
_COLUMNS = ["id", "task_id", "source", "sample", "step", "outcome", "answer", "status", "error"]
_TURN_COLUMNS = ["turns.list.element.agent", "turns.list.element.reward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """A trajectory in a list.

    Attributes:
        index: position in the file.
        turns: number of turns.
        agents: agents in the order of their first turns.
        reward: mean over the turns that have a reward; None if none has one.
    """

    index: int
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
    agents: tuple[str, ...]
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFilter:
    """Conditions on the trajectories of a list; the defaults let all trajectories through.

    Attributes:
        text: part of the task's id, the answer or the error, case-insensitive.
        agent: agent that has a turn.
        status: status of the trajectory.
        low: minimum of the mean reward, or of the outcome if no turn has a reward; None: no bound.
        high: maximum of the same value; None: no bound.
    """

    text: str = ""
    agent: str = ""
    status: str = ""
    low: float | None = None
    high: float | None = None

    def matches(self, row: TrajectoryRow) -> bool:
        """Return True if a trajectory fulfils all conditions."""
        searched = f"{row.task_id}\n{row.answer}\n{row.error}".casefold()
        if self.text.casefold() not in searched:
            return False
        if self.agent and self.agent not in row.agents:
            return False
        if self.status and self.status != row.status:
            return False

        reward = row.outcome if row.reward is None else row.reward
        if self.low is not None and (reward is None or reward < self.low):
            return False
        return self.high is None or (reward is not None and reward <= self.high)


def count_trajectories(path: Path) -> int:
    """Return the number of trajectories in a file; only its footer is read.

    Raises:
        RecordError: the file is not a parquet file.
    """
    with _open(path) as file:
        return int(file.metadata.num_rows)


def list_trajectories(
    path: Path, conditions: TrajectoryFilter, *, first: int = 0, limit: int = 100
) -> list[TrajectoryRow]:
    """Return the trajectories of a file that match, in order, from index `first` on.

    Args:
        conditions: conditions on the trajectories.
        first: index in the file at which the search begins.
        limit: maximum number of trajectories that are returned.

    Raises:
        RecordError: the file is not a file of trajectories.
    """
    matching: list[TrajectoryRow] = []
    with _open(path) as file:
        for row in _rows(path, file, first):
            if conditions.matches(row):
                matching.append(row)
            if len(matching) == limit:
                break
    return matching


def trajectory_at(path: Path, index: int) -> Trajectory:
    """Return one trajectory of a file; only the row group that has it is read.

    Raises:
        RecordError: the file is not a file of trajectories, or has none of this index.
    """
    with _open(path) as file:
        row_count = file.metadata.num_rows
        if not 0 <= index < row_count:
            raise RecordError(
                f"{path}: no trajectory {index + 1}; it holds {row_count}, counted from 1"
            )
        group = next(_row_groups(file, index))
        with arrow_errors(path, "a damaged file"):
            table = bounded_table(file, groups=[group.number])
        selected = table.slice(index - group.start, 1)
        (row,) = table_rows(path, selected, TRAJECTORY_SCHEMA)
        return parse_trajectory(path, row)


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """A row group of a parquet file, and the index of its first row in the file."""

    number: int
    start: int


def _open(path: Path) -> pq.ParquetFile:
    with arrow_errors(path, "not a readable parquet file"):
        check_regular(path)
        return pq.ParquetFile(path, memory_map=True)


def _row_groups(file: pq.ParquetFile, first: int) -> Iterator[_RowGroup]:
    """Yield the row groups that have the row of index `first` or later rows."""
    start = 0
    for number in range(file.metadata.num_row_groups):
        end = start + file.metadata.row_group(number).num_rows
        if end > first:
            yield _RowGroup(number, start)
        start = end


def _rows(path: Path, file: pq.ParquetFile, first: int) -> Iterator[TrajectoryRow]:
    """Yield the rows of a file from index `first` on."""
    for group in _row_groups(file, first):
        with arrow_errors(path, "a damaged file"):
            table = bounded_table(file, [*_COLUMNS, *_TURN_COLUMNS], [group.number])
        missing = {*_COLUMNS, "turns"} - set(table.column_names)
        if missing:
            raise RecordError(
                f"{path}: no column {', '.join(sorted(missing))}; expected a file of trajectories"
            )
        index = max(group.start, first)
        for batch in table.slice(index - group.start).to_batches(max_chunksize=_MAX_BATCH_ROWS):
            for row in batch.to_pylist():
                yield _trajectory_row(index, row)
                index += 1


def _trajectory_row(index: int, row: dict[str, Any]) -> TrajectoryRow:
    turns = row.pop("turns")
    rewards = [turn["reward"] for turn in turns if turn["reward"] is not None]
    return TrajectoryRow(
        index=index,
        turns=len(turns),
        agents=tuple(dict.fromkeys(turn["agent"] for turn in turns)),
        reward=sum(rewards) / len(rewards) if rewards else None,
        **row,
    )
