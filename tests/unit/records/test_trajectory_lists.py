"""Lists of a file's trajectories are filtered, and read no more of the file than they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollout.records.files import RecordError, write_trajectories
from rollout.records.trajectory import Trajectory
from rollout.records.trajectory_lists import (
    TrajectoryFilter,
    count_trajectories,
    list_trajectories,
    trajectory_at,
)
from tests.support.played import trajectory, turn


def rewarded(number: int) -> Trajectory:
    """Return a trajectory of the task tNUMBER with the mean reward NUMBER + 0.5."""
    turns = (
        turn(0, reward=float(number)),
        turn(1, "verifier", reward=number + 1.0),
    )
    return trajectory(*turns, sample=number, task_id=f"t{number}")


def test_a_list_has_agents_and_mean_rewards_and_is_filtered(tmp_path: Path) -> None:
    file = tmp_path / "step_000000.parquet"
    write_trajectories(file, [rewarded(number) for number in range(3)])
    rows = list_trajectories(file, TrajectoryFilter())
    assert [(row.index, row.task_id, row.turns, row.agents, row.reward) for row in rows] == [
        (number, f"t{number}", 2, ("solver", "verifier"), number + 0.5) for number in range(3)
    ]
    for filters, indices in (
        ({"low": 1.0}, [1, 2]),
        ({"high": 1.5}, [0, 1]),
        ({"text": "T2"}, [2]),
        ({"agent": "coder"}, []),
        ({"status": "failed"}, []),
    ):
        filtered = list_trajectories(file, TrajectoryFilter(**filters))  # type: ignore[arg-type]
        assert [row.index for row in filtered] == indices, filters
    (row,) = list_trajectories(file, TrajectoryFilter(), first=1, limit=1)
    assert row.index == 1
    assert count_trajectories(file) == 3


def test_only_the_rows_of_a_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "many.parquet"
    write_trajectories(file, [rewarded(number) for number in range(600)])  # 256 in a row group
    read_groups: list[tuple[int, bool]] = []  # row group, whether with all columns
    iter_batches = pq.ParquetFile.iter_batches

    def record_groups(
        self: pq.ParquetFile, rows: int, *, columns: list[str] | None, row_groups: list[int]
    ) -> Any:
        read_groups.extend((group, columns is None) for group in row_groups)
        return iter_batches(self, rows, columns=columns, row_groups=row_groups)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", record_groups)
    rows = list_trajectories(file, TrajectoryFilter(), first=300, limit=2)
    assert [row.index for row in rows] == [300, 301]
    assert trajectory_at(file, 599).task_id == "t599"
    assert read_groups == [(1, False), (2, True)]
    with pytest.raises(RecordError, match="no trajectory 601; it holds 600"):
        trajectory_at(file, 600)
