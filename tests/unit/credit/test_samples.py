"""From trajectories to samples, by hand."""

import math
from dataclasses import replace

import pytest

from mcore_mas.credit.samples import CreditError, to_samples
from rollout.records.trajectory import Group, Message, Status, Task, Trajectory, Turn

TASK = Task(id="t", prompt="1+1", answers=("2",), env="math", source="sums", split="train")


def turn(index: int, agent: str, reward: float | None, tokens: int = 2, valid: bool = True) -> Turn:
    return Turn(
        index=index,
        agent=agent,
        policy="p",
        policy_version=0,
        node="",
        state_key="",
        messages=(Message(role="user", content="x"),),
        prompt_ids=(1, 2, 3),
        completion_ids=tuple(range(tokens)),
        logprobs=(-0.5,) * tokens,
        temperature=1.0,
        text="",
        finish_reason="stop",
        valid=valid,
        seed=0,
        reward=reward,
    )


def trajectory(
    sample: int, outcome: float | None, *turns: Turn, status: Status = Status.COMPLETED
) -> Trajectory:
    return Trajectory(
        id=f"0/t/{sample}",
        task_id="t",
        source="sums",
        sample=sample,
        step=0,
        turns=turns,
        outcome=outcome,
        status=status,
    )


def group() -> Group:
    return Group(
        task=TASK,
        trajectories=(
            trajectory(
                0, 1.0, turn(0, "solver", 1.0, tokens=4), turn(1, "verifier", 0.9, valid=False)
            ),
            trajectory(1, 0.0, turn(0, "solver", 0.0)),
            trajectory(2, None, turn(0, "solver", None), status=Status.FAILED),
        ),
    )


def test_failed_trajectories_do_not_train() -> None:
    samples = to_samples([group()])
    assert [(s.trajectory, s.agent, s.reward, s.trained_tokens) for s in samples] == [
        ("0/t/0", "solver", 1.0, 4),
        ("0/t/0", "verifier", 0.9, 2),
        ("0/t/1", "solver", 0.0, 2),
    ]


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_turn_without_a_finite_reward_is_named(reward: float | None) -> None:
    broken = Group(task=TASK, trajectories=(trajectory(3, 1.0, turn(0, "solver", reward)),))
    with pytest.raises(CreditError, match=r"trajectory 0/t/3, turn 0 \(solver\): reward is"):
        to_samples([broken])


def test_a_group_of_mixed_tasks_is_named() -> None:
    strange = Group(
        task=replace(TASK, id="u"), trajectories=(trajectory(0, 1.0, turn(0, "solver", 1.0)),)
    )
    with pytest.raises(
        CreditError, match=r"trajectory 0/t/0: its task is t, but its group's task is u"
    ):
        to_samples([strange])
