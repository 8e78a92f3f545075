"""Contracts of the filters, the losses and the estimates of the KL divergence."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_mas.equations.filters import FILTERS
from mcore_mas.equations.kl import KL_ESTIMATES
from mcore_mas.equations.losses import LOSSES, TokenBatch
from tests.support.turns import make_turns

SCORES_BY_TASK = [(0.0, 1.0, 5.0), (2.0, 2.0, 2.0), (0.5, 0.25, 0.0), (9.0, 8.0, 7.5)]


def scored_rows() -> list[dict[str, Any]]:
    """Return the turns of two agents in three trajectories of each task."""
    rows: list[dict[str, Any]] = []
    for task, scores in enumerate(SCORES_BY_TASK):
        for number, score in enumerate(scores):
            trajectory = {"task": task, "trajectory": f"{task}/{number}", "score": score}
            rows.append({**trajectory, "agent": "solver", "turn": 0})
            rows.append({**trajectory, "agent": "verifier", "turn": 1})
    return rows


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_selects_the_same_turns_in_any_order(name: str) -> None:
    rows = scored_rows()
    order = [(7 * i) % len(rows) for i in range(len(rows))]
    selected = FILTERS[name](make_turns(rows))
    selected_of_shuffled = FILTERS[name](make_turns([rows[i] for i in order]))
    assert selected.shape == (len(rows),)
    assert selected.dtype is torch.bool
    assert int(selected_of_shuffled.sum()) == int(selected.sum())
    # Of turns with equal distances, `outliers` drops the first.
    if name != "outliers":
        assert 0 < int(selected.sum()) < len(rows)
        assert selected_of_shuffled.tolist() == selected[order].tolist()
    assert FILTERS[name].__doc__


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_a_value_for_each_token_and_statistics_without_gradient(name: str) -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    tokens = TokenBatch(
        logprobs=logprobs,
        behaviour=logprobs.detach(),
        advantages=torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64),
        sequences=torch.tensor([0, 0, 1, 1]),
        entropy=zeros,
        kl_coef=zeros,
        entropy_coef=zeros,
    )
    loss, statistics = LOSSES[name](tokens, tokens.behaviour)
    assert loss.shape == (4,)
    for value in statistics.values():
        assert value.shape == (4,)
        assert not value.requires_grad
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.isfinite(gradient).all()
    if name == "cross_entropy":  # does not use advantages
        assert gradient.tolist() == [-1.0] * 4
        return
    assert gradient.tolist() == pytest.approx((-tokens.advantages).tolist())
    loss_without_advantages, _ = LOSSES[name](replace(tokens, advantages=zeros), tokens.behaviour)
    (gradient,) = torch.autograd.grad(loss_without_advantages.sum(), logprobs)
    assert gradient.tolist() == [0.0] * 4


@pytest.mark.parametrize("name", KL_ESTIMATES)
def test_an_estimate_of_the_kl_is_zero_for_equal_policies(name: str) -> None:
    logprobs = torch.tensor([-1.0, -2.5], dtype=torch.float64)
    assert KL_ESTIMATES[name](logprobs, logprobs).tolist() == [0.0, 0.0]
    # The tokens are more likely than under the reference, so that every estimate is positive.
    estimate = KL_ESTIMATES[name](logprobs, logprobs - 1.0)
    assert estimate.shape == (2,)
    assert (estimate > 0).all()
