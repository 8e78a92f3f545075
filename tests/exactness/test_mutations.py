"""Mutations of the product's objectives: a term that is 1 % off exceeds the bound. One rank suffices."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.equations import losses
from mcore_mas.equations.corrections import CORRECTIONS
from mcore_mas.equations.kl import KL_ESTIMATES
from tests.exactness.formulas import CASES, VALUE_CASES
from tests.exactness.objectives import ObjectiveMeasurement, measure_objectives, objective_jobs
from tests.exactness.rows import Row

pytestmark = pytest.mark.usefixtures("one_rank")

FACTOR = 1.01  # one percent more
POLICY = Row(name="one rank")
CRITIC = Row(name="critic", critic=True)

# Objectives that together have all terms.
MUTATED_CASES = ("PPO, both clips, dual clip, TIS, k3, entropy", "value loss, clip")


def widen_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen both clips of the ratio."""
    original: Callable[..., Any] = losses._clipped

    def mutated(ratio: Any, advantage: Any, low: float, high: float, dual: float) -> Any:
        return original(ratio, advantage, low=low * FACTOR, high=high * FACTOR, dual=dual)

    monkeypatch.setattr(losses, "_clipped", mutated)


def widen_dual_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the bound of the loss of a negative advantage."""
    original: Callable[..., Any] = losses._clipped

    def mutated(ratio: Any, advantage: Any, low: float, high: float, dual: float) -> Any:
        return original(ratio, advantage, low, high, dual=dual * FACTOR)

    monkeypatch.setattr(losses, "_clipped", mutated)


def enlarge_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enlarge the KL term."""
    original = KL_ESTIMATES["k3"]
    monkeypatch.setitem(
        KL_ESTIMATES, "k3", lambda logprobs, reference: FACTOR * original(logprobs, reference)
    )


def enlarge_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enlarge the entropy bonus."""
    original = losses.Objective.__call__

    def mutated(objective: losses.Objective, tokens: losses.TokenBatch) -> Any:
        enlarged = replace(tokens, entropy_coef=FACTOR * tokens.entropy_coef)
        return original(objective, enlarged)

    monkeypatch.setattr(losses.Objective, "__call__", mutated)


def raise_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the largest weight of truncated importance sampling."""
    original = CORRECTIONS["tis"]

    @wraps(original)  # its options tell whether the loss is one by token
    def mutated(*values: Any, high: float) -> Any:
        return original(*values, high=high * FACTOR)

    monkeypatch.setitem(CORRECTIONS, "tis", mutated)


def widen_value_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen the clip of the critic."""
    original = losses.ValueObjective.__call__

    def mutated(objective: losses.ValueObjective, *values: Any) -> Any:
        return original(replace(objective, clip=objective.clip * FACTOR), *values)

    monkeypatch.setattr(losses.ValueObjective, "__call__", mutated)


def measure(row: Row, folder: Path) -> ObjectiveMeasurement:
    """Measure the case that fits the row's model, in this process."""
    cases = [case for case in (*CASES, *VALUE_CASES) if case.name in MUTATED_CASES]
    (job,) = objective_jobs([row], cases, folder)
    job.function(0, **job.arguments)
    (measurement,) = measure_objectives([row], cases, folder)
    return measurement


@pytest.mark.parametrize("row", [POLICY, CRITIC], ids=lambda row: row.name)
def test_the_objective_is_exact(row: Row, tmp_path: Path) -> None:
    assert not measure(row, tmp_path).excessive


@pytest.mark.parametrize(
    ("row", "mutate"),
    [
        (POLICY, widen_clips),
        (POLICY, widen_dual_clip),
        (POLICY, enlarge_kl),
        (POLICY, enlarge_entropy),
        (POLICY, raise_truncation),
        (CRITIC, widen_value_clip),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_term_that_is_one_percent_off_exceeds_the_bound(
    row: Row,
    mutate: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    measurement = measure(row, tmp_path)
    # The gradients of clipped tokens are 0 for any clip, so only the loss must be off.
    assert "loss" in measurement.excessive
    assert measurement.share_of_bound > 100  # far more than rounding
