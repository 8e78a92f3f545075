"""One of the trajectories of a file, and the tasks of the run that the file lies in."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_mas.reports.trajectory_files import read_run_tasks, select_trajectory
from rollout.records.files import RecordError, write_tasks
from tests.support.played import TASK, trajectory

FILE = Path("step_000000.parquet")
PLAYED = [trajectory(id="0/t/0"), trajectory(id="0/t/1")]


def test_a_trajectory_is_selected_by_index_or_id() -> None:
    assert select_trajectory(FILE, PLAYED, 1, None) is PLAYED[1]
    assert select_trajectory(FILE, PLAYED, 0, "0/t/1") is PLAYED[1]
    for index in (-1, 2):
        with pytest.raises(
            RecordError, match=f"no trajectory {index + 1}; it holds 2, counted from 1"
        ):
            select_trajectory(FILE, PLAYED, index, None)
    with pytest.raises(RecordError, match="no trajectory '0/u/0'; the first is '0/t/0'"):
        select_trajectory(FILE, PLAYED, 0, "0/u/0")
    with pytest.raises(RecordError, match="no trajectory '0/t/0'; the first is 'none'"):
        select_trajectory(FILE, [], 0, "0/t/0")


def test_tasks_are_those_of_the_run_around_a_file(tmp_path: Path) -> None:
    file = tmp_path / "r" / "train" / "trajectories" / FILE
    write_tasks(tmp_path / "r" / "tasks" / "train.parquet", [TASK])
    assert read_run_tasks(file) == [TASK]
    with pytest.raises(RecordError, match="in no run's folder"):
        read_run_tasks(tmp_path / FILE)
