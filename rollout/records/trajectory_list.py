"""Lazy reading of trajectory files: a list of what is in one without its texts and tokens, and one trajectory of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mcore_mas.rollout.base.parquet import bounded_table
from mcore_mas.rollout.records.files import RecordError, arrow_errors, trajectory_of
from mcore_mas.rollout.records.trajectory import Trajectory

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
        bounded = self.low is not None or self.high is not None
        low, high = (-inf if self.low is None else self.low), (inf if self.high is None else self.high)
        return (
            self.text.casefold() in f"{row.task_id}\n{row.answer}\n{row.error}".casefold()
            and (not self.agent or self.agent in row.agents)
            and self.status in ("", row.status)
            and (not bounded or (reward is not None and low <= reward <= high))
        )


def _open(path: Path) -> pq.ParquetFile:
    with arrow_errors(path, "not a readable parquet file"):
        return pq.ParquetFile(path, memory_map=True)


def count_trajectories(path: Path) -> int:
    """How many are in a file, by its footer.

    Raises:
        RecordError: it is no parquet file.
    """
    with _open(path) as file:
        return int(file.metadata.num_rows)


def list_trajectories(path: Path, shown: TrajectoryFilter, *, first: int = 0, limit: int = 100) -> list[TrajectoryRow]:
    """At most `limit` trajectories of a file that `shown` lets through, from index `first` on; no further are read.

    Raises:
        RecordError: it is no file of trajectories.
    """
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
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    for group, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        if end > first:
            yield group, start


def _rows(path: Path, file: pq.ParquetFile, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for group, start in _groups(file, first):
        with arrow_errors(path, "a damaged file"):
            table = bounded_table(path, file, [*_LIGHT, *_OF_TURNS], [group])
        if missing := {*_LIGHT, "turns"} - set(table.column_names):
            raise RecordError(f"{path}: no column {', '.join(sorted(missing))}; expected a file of trajectories")
        batches = table.slice(max(0, first - start)).to_batches(max_chunksize=1024)  # a page needs few of them
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), max(start, first))


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
            with arrow_errors(path, "a damaged file"):
                table = bounded_table(path, file, groups=[group])
            return trajectory_of(path, table.slice(index - start, 1))
        raise RecordError(f"{path}: no trajectory {index}; it holds {file.metadata.num_rows}, counted from 0")
