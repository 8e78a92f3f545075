"""The advantages of a step are recorded, and `mcore-mas show` prints those that trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_mas.credit.advantage_files import advantage_path, read_advantages, write_advantages
from mcore_mas.credit.assign import add_advantages, mean_advantages
from mcore_mas.credit.samples import to_samples
from mcore_mas.reports.turn_advantages import find_turn_advantages
from mcore_mas.training.collected_steps import CollectedSteps
from rollout.records.files import read_trajectories
from rollout.records.grouping import group_trajectories
from tests.support.played import trajectory, turn
from tests.support.restarts import restarted_session, train
from tests.support.rewarded import write_rewarded_step


def test_a_training_records_the_advantages_of_each_step(tmp_path: Path) -> None:
    session = restarted_session(tmp_path, 0, "trainer.steps=2")
    assert train(session)
    estimators = {agent: session.config.advantage_of(agent) for agent in session.config.agents}
    for step in range(2):
        file = tmp_path / "trajectories" / f"step_{step:06d}.parquet"
        samples = to_samples(group_trajectories(read_trajectories(file)))
        expected = mean_advantages(add_advantages(samples, estimators))
        assert len(expected) == len(samples)
        assert read_advantages(advantage_path(file)) == expected


def test_recorded_advantages_come_before_computed_ones(tmp_path: Path) -> None:
    file = write_rewarded_step(tmp_path)
    trajectories = read_trajectories(file)
    computed = find_turn_advantages(file, trajectories)
    # Rewards 1 and 0 have the mean 0.5 and, with n - 1, the deviation 0.7071.
    assert computed == pytest.approx(
        {("0/t/0", "", 0): 0.70711, ("0/t/1", "", 0): -0.70711}, abs=1e-4
    )
    recorded = {("0/t/0", "", 0): 0.25, ("0/t/1", "", 0): -0.125}
    write_advantages(advantage_path(file), recorded)
    assert find_turn_advantages(file, trajectories) == recorded


def test_the_record_is_removed_with_its_trajectories_or_before_they_change(tmp_path: Path) -> None:
    collected = CollectedSteps(tmp_path)
    played = [replace(trajectory(turn(0)), id="0/t/0")]
    paths = []
    for step in range(2):
        collected.write(step, played, batches=1, complete=True)
        collected.write_advantages(step, {("0/t/0", "", 0): 1.5})
        paths.append(advantage_path(collected.path(step)))
    assert read_advantages(paths[0]) == {("0/t/0", "", 0): 1.5}

    collected.prune(before=1)
    assert [path.is_file() for path in paths] == [False, True]
    collected.write(1, played, batches=1, complete=False)  # the step is collected again
    assert [path.is_file() for path in paths] == [False, False]
