"""Credit of recorded turns, as the estimator of their run gives it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.reports.trajectory_page import PeerGroup
from mcore_mas.reports.turn_credit import compute_turn_credit
from rollout.records.files import read_trajectories, write_trajectories
from tests.support.played import trajectory, turn
from tests.support.rewarded import write_rewarded_step


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write_rewarded_step(tmp_path)


def test_advantages_are_those_of_the_runs_estimator(recorded: Path) -> None:
    advantages, _ = compute_turn_credit(recorded, read_trajectories(recorded))
    # Rewards 1 and 0 have the mean 0.5 and, with n - 1, the deviation 0.7071.
    assert advantages == pytest.approx(
        {("0/t/0", "", 0): 0.70711, ("0/t/1", "", 0): -0.70711}, abs=1e-4
    )


def test_without_rewards_there_is_no_credit(recorded: Path) -> None:
    assert compute_turn_credit(recorded, [trajectory(turn(0))]) == ({}, {})


PENALTY = {"loss": {"kl": {"coef": 0.1, "where": "reward"}}}
TEACHER = {"policy": "verifier"}


@pytest.mark.parametrize("settings", [{"overrides": PENALTY}, {"teacher": TEACHER}])
def test_without_the_inputs_of_a_policys_training_there_is_no_credit(
    recorded: Path, settings: dict[str, object]
) -> None:
    config_file = recorded.parents[2] / "config.yaml"
    values = yaml.safe_load(config_file.read_text())
    values["policies"]["solver"] |= settings
    config_file.write_text(yaml.safe_dump(values))
    RunConfig.load(config_file)  # it is valid
    assert compute_turn_credit(recorded, read_trajectories(recorded)) == ({}, {})


def votes(group: PeerGroup) -> list[tuple[tuple[str, str, int], float]]:
    return [(member.sample.id, member.vote_score) for member in group.members]


def test_a_turn_has_a_group_for_each_comparison(recorded: Path) -> None:
    values = resolve(["experiment=demo_math"])
    values["advantage"] = {"name": "grpo", "options": {"std": "agent"}}
    (recorded.parents[2] / "config.yaml").write_text(yaml.safe_dump(values))
    rewards = {"0/t/0": (1.0, 5.0), "0/t/1": (0.0, 4.0), "0/u/0": (1.0, 9.0)}
    played = [
        trajectory(
            turn(0, "solver", reward=solver_reward),
            turn(1, "verifier", reward=verifier_reward),
            id=name,
            task_id=name.split("/")[1],
            sample=int(name.split("/")[2]),
        )
        for name, (solver_reward, verifier_reward) in rewards.items()
    ]
    write_trajectories(recorded, played)
    _, groups = compute_turn_credit(recorded, read_trajectories(recorded))

    mean, std = groups["0/t/0", "", 1]
    # A trajectory's vote on the task is its mean reward; the verifier's turns vote by themselves.
    assert (mean.label, mean.size, mean.mean) == ("mean", 2, 2.5)
    assert votes(mean) == [
        (("0/t/0", "", 0), 3),
        (("0/t/0", "", 1), 3),
        (("0/t/1", "", 0), 2),
        (("0/t/1", "", 1), 2),
    ]
    assert (std.label, std.mean) == ("std", 4.5)
    assert votes(std) == [(("0/t/0", "", 1), 5), (("0/t/1", "", 1), 4)]
    assert len(groups["0/u/0", "", 0][0].members) == 2
