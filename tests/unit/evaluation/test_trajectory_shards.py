"""Files of an evaluation's trajectories."""

import asyncio
from pathlib import Path

import pytest

from mcore_mas.evaluation.trajectory_shards import TrajectoryShards
from rollout.records.trajectory import Trajectory
from tests.support.played import trajectory


def task_trajectory(task: str, sample: int = 0) -> Trajectory:
    return trajectory(id=f"{task}/{sample}", task_id=task, sample=sample)


def write_trajectories_of(identity: str, folder: Path) -> None:
    """Write two trajectories to a folder."""
    shards = TrajectoryShards(folder, identity)
    for sample in range(2):
        asyncio.run(shards.add(task_trajectory("t", sample)))
    shards.flush()


def tasks_in(folder: Path, identity: str) -> list[str]:
    return [trajectory.task_id for trajectory in TrajectoryShards(folder, identity).read()]


@pytest.mark.parametrize("content", [b"", b"[" * 200_000, b"\xff"])
def test_trajectories_of_an_unknown_identity_are_removed(tmp_path: Path, content: bytes) -> None:
    write_trajectories_of("one model", tmp_path)
    assert len(tasks_in(tmp_path, "one model")) == 2
    (tmp_path / "identity.json").write_bytes(content)
    assert tasks_in(tmp_path, "one model") == []


def test_trajectories_of_another_model_are_removed(tmp_path: Path) -> None:
    write_trajectories_of("one model", tmp_path)
    assert tasks_in(tmp_path, "another") == []
    assert list(tmp_path.glob("*.parquet")) == []


def test_a_missing_file_does_not_hide_later_ones(tmp_path: Path) -> None:
    """Files are written side by side, and a kill may leave only the second of two."""
    shards = TrajectoryShards(tmp_path, "one model")
    for task in ("easy", "hard"):
        asyncio.run(shards.add(task_trajectory(task)))
        shards.flush()
    (tmp_path / "part_000000.parquet").unlink()

    shards = TrajectoryShards(tmp_path, "one model")
    assert [trajectory.task_id for trajectory in shards.read()] == ["hard"]
    asyncio.run(shards.add(task_trajectory("easy")))
    shards.flush()
    assert tasks_in(tmp_path, "one model") == ["hard", "easy"]
