"""Agreement of engine and trainer, measured by the gaps of their log-probabilities."""

import math

import pytest
import torch

from mcore_mas.equations.agreement import (
    GAP_BOUNDS,
    describe_disagreement,
    gap_statistics,
    is_gap_metric,
)
from mcore_mas.megatron.step.statistics import summarise


def metrics_of(*gaps: float) -> dict[str, float]:
    """Return agent solver's metrics of tokens with these gaps, trainer minus engine, in nats.

    NaN stands for a token that the engine did not sample.
    """
    logprobs = torch.full((len(gaps),), -1.0)
    rows = [
        {"loss": torch.zeros(len(gaps)), **gap_statistics(logprobs, logprobs - torch.tensor(gaps))}
    ]
    return {f"agent/solver/{name}": value for name, value in summarise(rows).items()}


def test_gap_metrics_equal_those_computed_by_hand() -> None:
    metrics = metrics_of(0.5, -0.5, 3.0, math.nan)
    # the mean counts a gap of 3 nats as 1
    mean = (0.5 + 0.5 + 1.0) / 3
    assert metrics["agent/solver/logprob_gap_mean"] == pytest.approx(mean)
    k3 = (math.exp(0.5) - 1.5) + (math.exp(-0.5) - 0.5) + (math.e - 2.0)
    assert metrics["agent/solver/logprob_gap_k3"] == pytest.approx(k3 / 3)
    assert metrics["agent/solver/logprob_gap_p99"] == pytest.approx(3.0, rel=0.05)
    assert metrics["agent/solver/logprob_gap_max"] == 3.0
    assert metrics["agent/solver/logprob_gap_count"] == 3.0  # the fourth token was not sampled
    assert metrics["agent/solver/logprob_gap_outlier_count"] == 1.0


def test_in_float32_one_token_beyond_the_bound_is_reported() -> None:
    assert not describe_disagreement(metrics_of(*[1e-5] * 2000), GAP_BOUNDS["float32"])
    message = describe_disagreement(metrics_of(2e-4, *[0.0] * 2000), GAP_BOUNDS["float32"])
    assert message.startswith("agent/solver: the trainer")
    assert message.endswith(
        "mean 1e-07, k3 1e-11, p99 1e-07, max 0.0002 (bound 0.0001) nats over 2001 tokens"
    )


def test_nan_of_the_trainer_is_a_disagreement() -> None:
    engine = torch.full((4,), -1.0)
    trainer = torch.tensor([-1.0, -1.0, -1.0, math.nan])
    rows = summarise([{"loss": torch.zeros(4), **gap_statistics(trainer, engine)}])
    assert rows["logprob_gap_max"] == math.inf
    assert rows["logprob_gap_count"] == 4.0
    assert rows["logprob_gap_mean"] == 0.25
    metrics = {f"agent/solver/{name}": value for name, value in rows.items()}
    assert describe_disagreement(metrics, GAP_BOUNDS["float32"]).startswith("agent/solver: ")
    unsampled = summarise(
        [{"loss": torch.zeros(4), **gap_statistics(trainer, torch.full((4,), math.nan))}]
    )
    assert "logprob_gap_count" not in unsampled  # demonstrations are not compared


@pytest.mark.parametrize(
    ("gaps", "beyond"),
    [
        ([0.01] * 2000, set()),
        ([0.01] * 1990 + [5.0] * 10, set()),  # outliers are counted
        ([0.01] * 1900 + [0.5] * 100, {"mean", "k3", "p99"}),
        ([0.035, -0.035] * 1000, {"mean"}),
        ([0.0] * 1975 + [0.35, -0.35] * 12, {"p99"}),
        ([1.0] + [0.01] * 19, set()),  # one outlier of few tokens
        ([0.5, -0.5] * 10, {"mean", "k3"}),
    ],
)
def test_in_bfloat16_the_distribution_counts(gaps: list[float], beyond: set[str]) -> None:
    metrics = metrics_of(*gaps)
    reported = {
        figure
        for figure, bound in GAP_BOUNDS["bfloat16"].items()
        if describe_disagreement(metrics, {figure: bound})
    }
    assert reported == beyond
    assert bool(describe_disagreement(metrics, GAP_BOUNDS["bfloat16"])) == bool(beyond)


def test_each_agent_is_judged_alone() -> None:
    agreeing = {
        name.replace("solver", "verifier"): value
        for name, value in metrics_of(*[0.001] * 2000).items()
    }
    message = describe_disagreement(agreeing | metrics_of(*[0.2] * 2000), GAP_BOUNDS["bfloat16"])
    assert message.startswith("agent/solver: ")
    assert "mean 0.2 (bound 0.03), k3 0.021 (bound 0.005), p99 0.21 (bound 0.3), max 0.2" in message


def test_gap_metrics_are_recognized_by_name() -> None:
    assert is_gap_metric("agent/solver/logprob_gap_outlier_count")
    assert not is_gap_metric("agent/solver/ratio_max")
