"""The shared outcome: same reward for every turn, less where the reply was malformed."""

import pytest

from rollout.records import Group, Status, Task, Trajectory, Turn
from rollout.rewards import ALLOCATORS
from rollout.rewards.shared_outcome import shared_outcome

TASK = Task(id="t", prompt="?", answers=("1",), env="math", source="s", split="train")


def turn(index, *, valid=True):
    return Turn(
        index=index,
        agent="solver",
        policy="p",
        policy_version=0,
        node="",
        state_key="k",
        messages=(),
        prompt_ids=(1,),
        completion_ids=(2,),
        logprobs=(0.0,),
        temperature=1.0,
        text="",
        finish_reason="stop",
        valid=valid,
        seed=0,
    )


def group(outcome, *turns, status=Status.COMPLETED):
    one = Trajectory(id="0/t/0", task_id="t", source="s", sample=0, step=0, turns=turns, outcome=outcome, status=status)
    return Group(task=TASK, trajectories=(one,))


def rewards(allocated):
    return [[turn.reward for turn in trajectory.turns] for trajectory in allocated.trajectories]


def test_every_turn_gets_the_outcome():
    assert rewards(shared_outcome(group(1.0, turn(0), turn(1), turn(2)))) == [[1.0, 1.0, 1.0]]


def test_penalty_only_where_the_reply_was_malformed():
    played = group(1.0, turn(0), turn(1, valid=False))
    assert rewards(shared_outcome(played, invalid_penalty=0.25)) == [[1.0, 0.75]]
    assert rewards(shared_outcome(played)) == [[1.0, 1.0]]


def test_penalty_also_below_zero():
    assert rewards(shared_outcome(group(0.0, turn(0, valid=False)), invalid_penalty=0.1)) == [[-0.1]]


def test_failed_trajectory_gets_no_reward():
    assert rewards(shared_outcome(group(None, turn(0), status=Status.FAILED))) == [[None]]


def test_completed_trajectory_without_outcome_is_named():
    with pytest.raises(ValueError, match="0/t/0"):
        shared_outcome(group(None, turn(0)))


def test_the_input_stays_as_it_was():
    before = group(1.0, turn(0))
    ALLOCATORS["shared_outcome"](before)
    assert rewards(before) == [[None]]
