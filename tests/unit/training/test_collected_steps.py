"""A restart uses the steps and trajectories that were finished, and samples the others again with the same seeds."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.training.collected_steps import CollectedSteps
from mcore_mas.training.loop import train_steps
from rollout.records.collection_log import CollectionLog
from rollout.records.files import RecordError, trajectory_metadata
from rollout.records.trajectory import Task, Trajectory
from tests.support.played import trajectory, turn
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


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("share", [0.13, 0.5, 0.77])
def test_finished_trajectories_are_kept_and_none_is_left_out(
    tmp_path: Path, staleness: int, share: float
) -> None:
    ended: list[float] = []
    log = Log(lambda step, metrics: ended.append(asyncio.get_running_loop().time()))
    whole = replace(restarted_session(tmp_path / "whole", staleness), logbook=log)
    assert train(whole)
    assert sampled_by(whole) == token_count(trajectories_of(tmp_path / "whole"))

    killed = tmp_path / "killed"
    first = restarted_session(killed, staleness)
    assert not train(first, share * ended[-1])
    complete = {
        path: path.read_bytes()
        for path in (killed / "trajectories").glob("*.parquet")
        if trajectory_metadata(path)["complete"] == "true"
    }
    logs = [CollectionLog(path) for path in (killed / "collection").glob("*.jsonl")]
    second = restarted_session(killed, staleness)
    assert train(second)

    for path, content in complete.items():
        assert path.read_bytes() == content
    trajectories = trajectories_of(killed)
    names = Counter(t.id for t in trajectories)
    assert names == Counter(t.id for t in trajectories_of(tmp_path / "whole"))
    assert set(names.values()) == {1}

    steps = {int(path.stem.removeprefix("step_")) for path in complete}
    sampled_again = []
    for found in trajectories:
        logged = [log.trajectory(found.id) for log in logs if log.trajectory(found.id)]
        for kept in logged:
            assert completions(kept) == completions(found)
        if found.step not in steps and not logged:
            sampled_again.append(found)
    assert sampled_by(second) == token_count(sampled_again)
    if not staleness:
        assert trajectories == trajectories_of(tmp_path / "whole")


def completions(found: Trajectory | None) -> list[tuple[Any, ...]]:
    return [(t.seed, t.completion_ids, t.versions) for t in found.turns] if found else []


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_with_deterministic_neither_time_nor_a_kill_decides_which_weights_sample_what(
    tmp_path: Path, staleness: int
) -> None:
    found = []
    deterministic = "+engine.deterministic=true"
    for name, update_s in (("quick", 0.5), ("slow", 50.0), ("killed", 5.0)):
        folder = tmp_path / name
        if name == "killed":
            first = restarted_session(folder, staleness, deterministic, update_s=update_s)
            assert not train(first, 70.0)
        assert train(restarted_session(folder, staleness, deterministic, update_s=update_s))
        turns = [
            (t.id, turn.seed, turn.versions, turn.text)
            for t in trajectories_of(folder)
            for turn in t.turns
        ]
        found.append(turns)
    quick, slow, killed = found
    assert quick == slow == killed

    # the weights that were there when the collection of a step could begin sample all of it
    versions = {
        (int(name.split("/")[0]), span.version) for name, _, spans, _ in quick for span in spans
    }
    assert versions == {(step, max(0, step - staleness)) for step in range(STEPS)}


@pytest.mark.slow
def test_a_run_that_is_stopped_while_weights_wait_comes_to_the_same_trajectories(
    tmp_path: Path,
) -> None:
    settings = ("+engine.deterministic=true",)
    assert train(restarted_session(tmp_path / "whole", 1, *settings, update_s=0.5))
    first = restarted_session(tmp_path / "stopped", 1, *settings, update_s=0.5)

    async def until_stopped() -> None:
        asyncio.get_running_loop().call_later(60.0, first.stop.request)
        with pytest.raises(
            Stopped, match=r"^stopped by its caller; the same command goes on from the newest"
        ):
            await train_steps(first, 0)
        assert asyncio.get_running_loop().time() == pytest.approx(60.0)

    run_virtually(until_stopped())
    assert train(restarted_session(tmp_path / "stopped", 1, *settings, update_s=0.5))
    stopped, unbroken = (
        [(t.id, t.turns) for t in trajectories_of(tmp_path / name)] for name in ("stopped", "whole")
    )
    assert stopped == unbroken


def test_trajectories_of_another_recipe_are_not_used(tmp_path: Path) -> None:
    first = restarted_session(tmp_path, 0, recipe="a")
    assert not train(first, 40.0)
    assert sampled_by(first)
    second = restarted_session(tmp_path, 0, recipe="b")
    assert train(second)
    assert sampled_by(second) == token_count(trajectories_of(tmp_path))


def test_a_damaged_file_of_trajectories_is_sampled_again_and_so_is_what_newer_weights_sampled(
    tmp_path: Path,
) -> None:
    assert train(restarted_session(tmp_path, 0))
    before = trajectories_of(tmp_path)
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    file = tmp_path / "trajectories" / "step_000003.parquet"
    file.write_bytes(file.read_bytes()[:-100])

    again = restarted_session(tmp_path, 0)
    assert train(again)
    assert trajectories_of(tmp_path) == before
    assert sampled_by(again) == token_count([t for t in before if t.step >= 3])


def test_a_file_of_newer_weights_than_come_again_is_removed(tmp_path: Path) -> None:
    """The trajectories of step 2 were collected ahead, by weights 0 or by weights 1, which step 0 has to train anew."""
    task = Task(id="t", prompt="", answers=(), env="", source="", split="")
    for step, versions in ((1, (0, 0)), (2, (0, 1)), (3, (0, 0))):
        turns = [replace(turn(index), policy_version=v) for index, v in enumerate(versions)]
        own = replace(trajectory(*turns), task_id="t")
        CollectedSteps(tmp_path).write(step, [own], batches=1, complete=True)
        log = CollectedSteps(tmp_path).log(step)
        log.add_trajectory("n", own)
        log.add_call("c", 7)

    again = CollectedSteps(tmp_path, first_step=0)
    assert [again.read(step).complete for step in (1, 2, 3)] == [True, False, True]
    assert [again.log(step).call_result("c") for step in (1, 2, 3)] == [7, None, 7]
    [group] = again.read(1).groups([task])
    assert group.task == task and len(group.trajectories[0].turns) == 2
    with pytest.raises(RecordError, match="no such file"):
        trajectory_metadata(again.path(2))


def test_a_log_that_cannot_be_written_stops_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "collection").write_text("in the way")
    assert train(restarted_session(tmp_path, 0))
    lines = [line for line in capfd.readouterr().err.splitlines() if "cannot be written" in line]
    assert len(lines) == STEPS
    assert lines[0].startswith(f"{tmp_path}/collection/step_000000.jsonl: cannot be written (")
