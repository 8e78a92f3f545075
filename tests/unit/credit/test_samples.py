"""From trajectories to samples and metrics, by hand."""

import math
from dataclasses import replace

import pytest

from mcore_mas.credit.samples import CreditError, to_samples
from mcore_mas.training.metrics import credit_metrics, rollout_metrics, success
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
    assert [(s.trajectory, s.agent, s.reward, s.tokens) for s in samples] == [
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


def test_metrics_count_by_agent_and_leave_failures_out() -> None:
    metrics = rollout_metrics([group()])
    assert metrics["rollout/failed"] == 1.0
    assert metrics["reward/mean"] == 0.5
    assert metrics["rollout/turns"] == 1.5
    assert metrics["rollout/tokens"] == 8.0
    assert metrics["agent/solver/response_length"] == 3.0
    assert metrics["agent/solver/sampled_entropy"] == 0.5  # every log-probability is -0.5
    assert metrics["agent/solver/reward_std"] == 0.5
    assert metrics["agent/verifier/valid_ratio"] == 0.0
    assert success([group()]) == (0.5, pytest.approx(2 / 3))


def test_masked_turns_are_counted_and_have_no_reward() -> None:
    turns = (replace(turn(0, "solver", None), masked=True), turn(1, "solver", 0.5))
    metrics = rollout_metrics([Group(task=TASK, trajectories=(trajectory(0, 1.0, *turns),))])
    assert (metrics["agent/solver/masked"], metrics["agent/solver/reward_mean"]) == (1.0, 0.5)


def test_advantages_are_measured_by_agent() -> None:
    samples = [
        replace(s, advantages=(a,) * s.tokens)
        for s, a in zip(to_samples([group()]), (3.0, 2.0, -1.0), strict=True)
    ]
    assert credit_metrics(samples) == {
        "agent/solver/advantage_second_moment": 5.0,
        "agent/solver/advantage_abs_max": 3.0,
        "agent/solver/advantage_share": 1.0,
        "agent/verifier/advantage_second_moment": 4.0,
        "agent/verifier/advantage_abs_max": 2.0,
        "agent/verifier/advantage_share": 1.0,
    }
    flat = credit_metrics([replace(samples[0], advantages=None), samples[2]])
    assert (flat["agent/solver/advantage_abs_max"], flat["agent/solver/advantage_share"]) == (
        1.0,
        0.5,
    )
