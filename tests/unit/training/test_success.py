"""What counts as accuracy: `solved` where an environment measures it, the outcome elsewhere."""

from collections.abc import Mapping

import pytest

from mcore_mas.training.metrics import rollout_metrics, success
from rollout.records.trajectory import Group, Status, Task, Trajectory, Turn

TASK = Task(id="t", prompt="p", answers=(), env="plan_path", source="grid", split="test")
TURN = Turn(
    index=0, agent="a", policy="p", policy_version=0, node="", state_key="", messages=(), prompt_ids=(1,),
    completion_ids=(2,), logprobs=(0.0,), temperature=1.0, text="", finish_reason="stop", valid=True, seed=0,
)  # fmt: skip


def trajectory(outcome: float, metrics: Mapping[str, float]) -> Trajectory:
    return Trajectory(
        id="x",
        task_id="t",
        source="grid",
        sample=0,
        step=0,
        turns=(TURN,),
        outcome=outcome,
        metrics=metrics,
    )


def test_a_game_counts_as_solved_or_not_whatever_its_rewards() -> None:
    group = Group(
        task=TASK,
        trajectories=(trajectory(5.52, {"solved": 1.0}), trajectory(0.8, {"solved": 0.0})),
    )
    assert [t.score for t in group.trajectories] == [1.0, 0.0]
    assert success([group]) == (0.5, 1.0)
    assert rollout_metrics([group])["reward/mean"] == pytest.approx(3.16)


def test_elsewhere_the_outcome_counts() -> None:
    group = Group(task=TASK, trajectories=(trajectory(1.0, {"answered": 1.0}), trajectory(0.5, {})))
    assert [t.score for t in group.trajectories] == [1.0, 0.5]
    assert success([group]) == (0.75, 1.0)


def test_what_failed_is_not_counted() -> None:
    failed = Trajectory(
        id="x", task_id="t", source="grid", sample=0, step=0, turns=(), status=Status.FAILED
    )
    assert failed.score is None
    group = Group(task=TASK, trajectories=(trajectory(1.0, {"solved": 1.0}), failed))
    assert success([group]) == (1.0, 1.0)
