"""A restart uses finished steps and trajectories, and samples all others again with their seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.training.collected_steps import CollectedBatches, CollectedSteps
from mcore_mas.training.loop import train_steps
from rollout.records.collection_log import CollectionLog
from rollout.records.files import RecordError, trajectory_metadata
from rollout.records.trajectory import Task, Trajectory
from tests.support import played
from tests.support.restarts import (
    STEPS,
    restarted_session,
    sampled_by,
    token_count,
    train,
    trajectories_of,
)
from tests.support.simulated import Log
from tests.support.virtual_time import run_virtually


@dataclass(frozen=True, kw_only=True)
class Unbroken:
    """Outcome of a training that was not killed.

    Attributes:
        seconds: virtual time at the end of its last step.
        trajectories: trajectories of all its steps.
    """

    seconds: float
    trajectories: list[Trajectory]


@pytest.fixture(scope="module")
def unbroken_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Unbroken]:
    """Return a function that trains once for each staleness, and returns the outcome."""

    @cache
    def train_unbroken(staleness: int) -> Unbroken:
        folder = tmp_path_factory.mktemp("unbroken")
        step_ends: list[float] = []
        log = Log(lambda step, metrics: step_ends.append(asyncio.get_running_loop().time()))
        session = replace(restarted_session(folder, staleness), logbook=log)
        assert train(session)
        trajectories = trajectories_of(folder)
        assert sampled_by(session) == token_count(trajectories)
        return Unbroken(seconds=step_ends[-1], trajectories=trajectories)

    return train_unbroken


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("share", [0.13, 0.5, 0.77])
def test_finished_trajectories_are_kept_and_none_is_left_out(
    tmp_path: Path, unbroken_of: Callable[[int], Unbroken], staleness: int, share: float
) -> None:
    """A run that is killed after a share of its time is compared with one that is not."""
    unbroken = unbroken_of(staleness)
    folder = tmp_path / "killed"
    assert not train(restarted_session(folder, staleness), share * unbroken.seconds)
    complete_files = {
        path: path.read_bytes()
        for path in (folder / "trajectories").glob("*.parquet")
        if trajectory_metadata(path)["complete"] == "true"
    }
    complete_steps = {int(path.stem.removeprefix("step_")) for path in complete_files}
    logs = [CollectionLog(path) for path in (folder / "collection").glob("*.jsonl")]
    resumed = restarted_session(folder, staleness)
    assert train(resumed)

    for path, content in complete_files.items():
        assert path.read_bytes() == content
    trajectories = trajectories_of(folder)
    ids = [trajectory.id for trajectory in trajectories]
    assert len(set(ids)) == len(ids)
    assert set(ids) == {trajectory.id for trajectory in unbroken.trajectories}

    sampled_again = []
    for trajectory in trajectories:
        logged = [log.trajectory(trajectory.id) for log in logs]
        finished = [entry for entry in logged if entry is not None]
        for entry in finished:
            assert completions_of(entry) == completions_of(trajectory)
        if trajectory.step not in complete_steps and not finished:
            sampled_again.append(trajectory)
    assert sampled_by(resumed) == token_count(sampled_again)
    if staleness == 0:
        assert trajectories == unbroken.trajectories


def completions_of(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    return [(turn.seed, turn.completion_ids, turn.versions) for turn in trajectory.turns]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_with_deterministic_neither_time_nor_a_kill_decides_which_weights_sample_what(
    tmp_path: Path, staleness: int
) -> None:
    deterministic = "+engine.deterministic=true"

    def turns_of(name: str, update_s: float, killed_at_s: float | None = None) -> list[Any]:
        """Train, killed once if a time is given; return the turns of all trajectories."""
        folder = tmp_path / name
        if killed_at_s is not None:
            session = restarted_session(folder, staleness, deterministic, update_s=update_s)
            assert not train(session, killed_at_s)
        assert train(restarted_session(folder, staleness, deterministic, update_s=update_s))
        return [
            (trajectory.id, turn.seed, turn.versions, turn.text)
            for trajectory in trajectories_of(folder)
            for turn in trajectory.turns
        ]

    turns = turns_of("quick", update_s=0.5)
    assert turns == turns_of("slow", update_s=50.0)
    assert turns == turns_of("killed", update_s=5.0, killed_at_s=70.0)

    # all of a step is sampled by the oldest weights with which its collection may begin
    versions = {
        (int(id.split("/")[0]), span.version) for id, _, spans, _ in turns for span in spans
    }
    assert versions == {(step, max(0, step - staleness)) for step in range(STEPS)}


@pytest.mark.slow
def test_a_run_that_is_stopped_while_weights_wait_comes_to_the_same_trajectories(
    tmp_path: Path,
) -> None:
    deterministic = "+engine.deterministic=true"
    assert train(restarted_session(tmp_path / "unbroken", 1, deterministic, update_s=0.5))
    session = restarted_session(tmp_path / "stopped", 1, deterministic, update_s=0.5)

    async def train_until_stopped() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(60.0, session.stop.request)
        message = r"^stopped by its caller; the same command continues from the newest"
        with pytest.raises(Stopped, match=message):
            await train_steps(session, 0)
        assert loop.time() == pytest.approx(60.0)

    run_virtually(train_until_stopped())
    assert train(restarted_session(tmp_path / "stopped", 1, deterministic, update_s=0.5))
    stopped, unbroken = (
        [(trajectory.id, trajectory.turns) for trajectory in trajectories_of(tmp_path / name)]
        for name in ("stopped", "unbroken")
    )
    assert stopped == unbroken


def test_trajectories_of_another_recipe_are_not_used(tmp_path: Path) -> None:
    session = restarted_session(tmp_path, 0, recipe="a")
    assert not train(session, 40.0)
    assert sampled_by(session)
    other = restarted_session(tmp_path, 0, recipe="b")
    assert train(other)
    assert sampled_by(other) == token_count(trajectories_of(tmp_path))


def test_a_damaged_file_of_trajectories_is_sampled_again_and_so_is_what_newer_weights_sampled(
    tmp_path: Path,
) -> None:
    assert train(restarted_session(tmp_path, 0))
    trajectories = trajectories_of(tmp_path)
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    damaged_step = 3
    file = tmp_path / "trajectories" / f"step_{damaged_step:06d}.parquet"
    file.write_bytes(file.read_bytes()[:-100])

    session = restarted_session(tmp_path, 0)
    assert train(session)
    assert trajectories_of(tmp_path) == trajectories
    later = [trajectory for trajectory in trajectories if trajectory.step >= damaged_step]
    assert sampled_by(session) == token_count(later)


def test_a_file_of_newer_weights_than_come_again_is_removed(tmp_path: Path) -> None:
    """Turns of step 2 are of version 1 of the weights, which step 0 has yet to train again."""
    task = Task(id="t", prompt="", answers=(), env="", source="", split="")
    versions_by_step = {1: (0, 0), 2: (0, 1), 3: (0, 0)}
    for step, versions in versions_by_step.items():
        turns = [
            replace(played.turn(index), policy_version=version)
            for index, version in enumerate(versions)
        ]
        step_trajectory = played.trajectory(*turns, task_id="t")
        collected = CollectedSteps(tmp_path)
        collected.write(step, [step_trajectory], batches=1, complete=True)
        log = collected.log(step)
        log.add_trajectory("n", step_trajectory)
        log.add_call("c", 7)

    restarted = CollectedSteps(tmp_path, first_step=0)
    assert [restarted.read(step).complete for step in (1, 2, 3)] == [True, False, True]
    assert [restarted.log(step).call_result("c") for step in (1, 2, 3)] == [7, None, 7]
    [group] = restarted.read(1).groups([task])
    assert group.task == task
    assert len(group.trajectories[0].turns) == 2
    with pytest.raises(RecordError, match="no such file"):
        trajectory_metadata(restarted.path(2))


@pytest.mark.parametrize(
    ("recorded", "batches", "complete", "covered"),
    [
        (CollectedBatches(), 1, True, False),
        (CollectedBatches(count=2), 1, False, True),
        (CollectedBatches(count=2), 2, False, True),
        (CollectedBatches(count=2), 2, True, False),
        (CollectedBatches(count=2), 3, False, False),
        (CollectedBatches(count=2, complete=True), 2, True, True),
    ],
)
def test_a_file_is_written_for_a_new_batch_and_for_the_end_of_its_step(
    recorded: CollectedBatches, batches: int, complete: bool, covered: bool
) -> None:
    assert recorded.covers(batches, complete=complete) == covered


def test_a_recorded_step_ends_with_its_last_batch_if_it_is_complete() -> None:
    complete = CollectedBatches(count=2, complete=True)
    assert [complete.ends_with(batches) for batches in (1, 2)] == [False, True]
    assert not CollectedBatches(count=2).ends_with(2)


def test_a_log_that_cannot_be_written_stops_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "collection").write_text("a file in place of the folder")
    assert train(restarted_session(tmp_path, 0))
    lines = [line for line in capfd.readouterr().err.splitlines() if "cannot be written" in line]
    assert len(lines) == STEPS
    assert lines[0].startswith(f"{tmp_path}/collection/step_000000.jsonl: cannot be written (")
