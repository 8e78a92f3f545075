"""Metrics of a step, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mcore_mas.credit.samples import Sample
from mcore_mas.training.metrics import (
    credit_metrics,
    critic_metrics,
    describe_lost_trajectories,
    mean_success,
    merge_updates,
    rollout_metrics,
    speed_metrics,
    staleness_metrics,
    valid_turn_share,
)
from rollout.records.trajectory import Status
from tests.support.played import failed, group, trajectory, turn

SAMPLE = Sample(
    policy="p",
    agent="a",
    task="t",
    trajectory="x",
    turn=0,
    prompt_ids=(1,),
    completion_ids=(2, 3),
)


def test_rollout_metrics_are_of_completed_trajectories_and_by_agent() -> None:
    long = {"completion_ids": (1, 2, 3, 4), "logprobs": (-0.5,) * 4}
    short = {"completion_ids": (1, 2), "logprobs": (-0.5,) * 2}
    groups = [
        group(
            trajectory(
                turn(0, "solver", reward=1.0, **long),
                turn(1, "verifier", valid=False, **short),
            ),
            trajectory(turn(0, "solver", reward=0.0, **short), outcome=0.0),
            failed(turn(0, "solver")),
        )
    ]
    metrics = rollout_metrics(groups)
    assert metrics["rollout/failed"] == 1.0
    assert metrics["rollout/trajectories"] == 3.0
    assert metrics["reward/mean"] == 0.5  # of the turns with a reward: 1 and 0
    assert metrics["outcome/mean"] == 0.5
    assert metrics["rollout/turns"] == 1.5
    assert metrics["rollout/tokens"] == 8.0
    assert metrics["agent/solver/response_length"] == 3.0
    assert metrics["agent/solver/sampled_entropy"] == 0.5  # every log-probability is -0.5
    assert metrics["agent/solver/reward_mean"] == 0.5
    assert metrics["agent/solver/reward_std"] == 0.5
    assert metrics["agent/verifier/valid_ratio"] == 0.0
    assert "agent/verifier/reward_mean" not in metrics
    assert valid_turn_share(groups) == pytest.approx(2 / 3)


def test_mean_reward_is_of_the_rewards_that_train_and_not_of_the_outcomes() -> None:
    turns = (turn(0, "solver", reward=0.25), turn(1, "verifier", reward=0.75))
    metrics = rollout_metrics([group(trajectory(*turns, outcome=0.0))])
    assert metrics["reward/mean"] == 0.5
    assert metrics["outcome/mean"] == 0.0


def test_without_rewards_there_is_no_mean_reward() -> None:
    metrics = rollout_metrics([group(trajectory(turn(0), outcome=1.0))])
    assert "reward/mean" not in metrics
    assert metrics["outcome/mean"] == 1.0


def test_masked_turns_are_counted_and_have_no_reward() -> None:
    turns = (turn(0, masked=True), turn(1, reward=0.5))
    metrics = rollout_metrics([group(trajectory(*turns))])
    assert (metrics["agent/solver/masked"], metrics["agent/solver/reward_mean"]) == (1.0, 0.5)


def test_late_calls_and_failures_are_counted_if_there_are_any() -> None:
    late = trajectory(outcome=None, status=Status.ABORTED, metrics={"late/batch": 1.0})
    slow = trajectory(turn(0), metrics={"late/agent/solver": 2.0, "refused": 1.0})
    metrics = rollout_metrics([group(late, slow)])
    assert metrics["rollout/late_batch"] == 1.0
    assert metrics["agent/solver/late"] == 2.0
    assert metrics["rollout/aborted"] == 1.0
    assert metrics["rollout/refused"] == 1.0
    assert "rollout/undecided" not in metrics


def test_scores_of_chats_are_summed() -> None:
    turns = (
        turn(0, "solver", {"tool_calls": 2.0, "root": 1.0}, chat="c"),
        turn(1, "solver", {"tool_calls": 1.0}, chat="c"),
        turn(2),
    )
    metrics = rollout_metrics([group(trajectory(*turns))])
    assert metrics["chat/turns"] == 2.0
    assert metrics["chat/calls"] == 3.0
    assert metrics["chat/roots"] == 1.0
    assert metrics["chat/folded"] == 0.0


@pytest.mark.parametrize(
    ("outcomes", "measurements", "success"),
    [
        ((5.52, 0.8), ({"solved": 1.0}, {"solved": 0.0}), 0.5),  # a game is solved or not
        ((1.0, 0.5), ({"answered": 1.0}, {}), 0.75),  # elsewhere the outcome counts
    ],
)
def test_success_is_what_the_environment_measures_or_else_the_outcome(
    outcomes: tuple[float, float],
    measurements: tuple[dict[str, float], dict[str, float]],
    success: float,
) -> None:
    played = [
        trajectory(turn(0), outcome=outcome, metrics=metrics)
        for outcome, metrics in zip(outcomes, measurements, strict=True)
    ]
    groups = [group(*played, failed())]
    assert (mean_success(groups), valid_turn_share(groups)) == (success, 1.0)
    assert rollout_metrics(groups)["outcome/mean"] == pytest.approx(sum(outcomes) / 2)


def test_without_completed_trajectories_success_is_unknown() -> None:
    groups = [group(failed())]
    assert math.isnan(mean_success(groups))
    assert math.isnan(valid_turn_share(groups))


def test_lost_trajectories_are_described_without_those_of_a_full_group() -> None:
    whole = trajectory(turn(0))
    full = trajectory(turn(0), outcome=None, status=Status.ABORTED, error="its group was full")
    late = trajectory(
        outcome=None, status=Status.ABORTED, error="too late", metrics={"late/batch": 1.0}
    )
    assert describe_lost_trajectories([group(whole, full)]) == ""
    groups = [group(whole, full), group(failed(), late, failed())]
    assert describe_lost_trajectories(groups) == (
        "3 of 5 trajectories are lost (2 failed, 1 aborted); the first, sample 0 of task t: EngineError"
    )


def test_staleness_is_measured_over_all_turns_and_by_policy() -> None:
    samples = [
        replace(SAMPLE, age=0),
        replace(SAMPLE, age=2),
        replace(SAMPLE, age=2),
        replace(SAMPLE, age=1, policy="q"),
    ]
    assert staleness_metrics(samples) == {
        "staleness/mean": 1.25,
        "staleness/max": 2.0,
        "staleness/turns_0": 1.0,
        "staleness/turns_1": 1.0,
        "staleness/turns_2": 2.0,
        "policy/p/staleness/mean": 4 / 3,
        "policy/p/staleness/max": 2.0,
        "policy/p/staleness/turns_0": 1.0,
        "policy/p/staleness/turns_2": 2.0,
        "policy/q/staleness/mean": 1.0,
        "policy/q/staleness/max": 1.0,
        "policy/q/staleness/turns_1": 1.0,
    }
    assert staleness_metrics([]) == {}


def test_advantages_are_measured_by_agent_over_turns_that_are_trained() -> None:
    samples = [
        replace(SAMPLE, agent="solver", advantages=(3.0, 3.0)),
        replace(SAMPLE, agent="solver", advantages=(-1.0, -1.0)),
        replace(SAMPLE, agent="verifier", advantages=(2.0, 2.0)),
        replace(SAMPLE, agent="idle", advantages=(9.0, 9.0), trained=(False, False)),
    ]
    assert credit_metrics(samples) == {
        "agent/solver/advantage_second_moment": 5.0,
        "agent/solver/advantage_abs_max": 3.0,
        "agent/solver/advantage_share": 1.0,
        "agent/verifier/advantage_second_moment": 4.0,
        "agent/verifier/advantage_abs_max": 2.0,
        "agent/verifier/advantage_share": 1.0,
    }
    metrics = credit_metrics([replace(samples[0], advantages=None), samples[1]])
    assert metrics["agent/solver/advantage_abs_max"] == 1.0
    assert metrics["agent/solver/advantage_share"] == 0.5


def test_speed_is_of_all_seconds_of_all_devices() -> None:
    first = {"flops": 3e15, "device_s": 10.0, "peak_flops": 10 * 989e12}
    solver = merge_updates([first, {"flops": 1e15, "device_s": 10.0, "peak_flops": 10 * 989e12}])
    verifier = {"flops": 2e15, "device_s": 5.0, "critic/flops": 1e15, "critic/device_s": 15.0}
    assert speed_metrics({"solver": solver, "verifier": verifier}) == {
        "time/tflops": 7e3 / 40,
        "policy/solver/time/tflops": 200.0,
        "policy/solver/time/mfu": pytest.approx(200 / 989),
        "policy/verifier/time/tflops": 3e3 / 20,
    }
    # of a device whose peak nobody knows there is no share, nor of all of them
    assert speed_metrics({"solver": solver})["time/mfu"] == pytest.approx(200 / 989)
    assert speed_metrics({"solver": {"skipped_updates": 1.0}}) == {}


def test_updates_of_a_step_are_merged_by_the_names_of_their_metrics() -> None:
    first = {"a/logprob_gap_count": 2.0, "loss": 1.0, "ratio_max": 3.0, "ratio_min": 0.5}
    second = {"a/logprob_gap_count": 3.0, "loss": 2.0, "ratio_max": 2.0, "ratio_min": 0.25}
    assert merge_updates([first, second]) == {
        "a/logprob_gap_count": 5.0,
        "loss": 1.5,
        "ratio_max": 3.0,
        "ratio_min": 0.25,
    }


def test_a_critic_explains_variance_only_where_returns_differ() -> None:
    update = {
        "grad_norm": 0.25,
        # values 1 and 2, returns 1 and 3, so errors 0 and 1
        "agent/solver/value_error": 0.5,
        "agent/solver/value_error_squared": 0.5,
        "agent/solver/return": 2.0,
        "agent/solver/return_squared": 5.0,
        # values 1 and 2, returns 3 and 3
        "agent/verifier/value_error": 1.5,
        "agent/verifier/value_error_squared": 2.5,
        "agent/verifier/return": 3.0,
        "agent/verifier/return_squared": 9.0,
    }
    metrics = critic_metrics(update)
    assert metrics["critic/grad_norm"] == 0.25
    assert metrics["agent/solver/critic/return"] == 2.0
    assert metrics["agent/solver/critic/explained_variance"] == pytest.approx(1 - 0.25 / 1)
    assert "agent/verifier/critic/explained_variance" not in metrics
    assert len(metrics) == len(update) + 1
    assert critic_metrics({}) == {}
