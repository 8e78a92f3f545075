"""What every filter, loss and estimate of the KL promises."""

from dataclasses import replace

import pytest
import torch

from mcore_mas.equations.divergence import KL_ESTIMATES
from mcore_mas.equations.filters import FILTERS
from mcore_mas.equations.losses import LOSSES, TokenBatch
from tests.support.turns import make_turns

ROWS = [
    {"task": task, "trajectory": f"{task}/{number}", "agent": agent, "turn": turn, "score": score}
    for task, scores in enumerate(
        [(0.0, 1.0, 5.0), (2.0, 2.0, 2.0), (0.5, 0.25, 0.0), (9.0, 8.0, 7.5)]
    )
    for number, score in enumerate(scores)
    for turn, agent in enumerate(("solver", "verifier"))
]


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_the_same_turns_in_whatever_order_they_come(name: str) -> None:
    order = [(7 * i) % len(ROWS) for i in range(len(ROWS))]
    straight = FILTERS[name](make_turns(ROWS))
    shuffled = FILTERS[name](make_turns([ROWS[i] for i in order]))
    assert straight.shape == (len(ROWS),)
    assert straight.dtype is torch.bool
    assert (
        0 < int(straight.sum()) < len(ROWS) or name == "outliers"
    )  # whose share of 0.1 is two turns
    if name != "outliers":  # of turns equally far it drops the first
        assert shuffled.tolist() == straight[order].tolist()
    assert int(shuffled.sum()) == int(straight.sum())
    assert FILTERS[name].__doc__


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_a_number_a_token_whose_statistics_have_no_gradient(name: str) -> None:
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
    assert all(value.shape == (4,) and not value.requires_grad for value in statistics.values())
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.isfinite(gradient).all()
    if name == "cross_entropy":  # there are no advantages in it
        assert gradient.tolist() == [-1.0] * 4
        return
    assert gradient.tolist() == pytest.approx((-tokens.advantages).tolist())
    idle, _ = LOSSES[name](replace(tokens, advantages=zeros), tokens.behaviour)
    assert torch.autograd.grad(idle.sum(), logprobs)[0].tolist() == [0.0] * 4


@pytest.mark.parametrize("name", KL_ESTIMATES)
def test_an_estimate_of_the_kl_is_zero_where_the_policies_agree(name: str) -> None:
    logprobs = torch.tensor([-1.0, -2.5], dtype=torch.float64)
    assert KL_ESTIMATES[name](logprobs, logprobs).tolist() == [0.0, 0.0]
    far = KL_ESTIMATES[name](logprobs, logprobs - 1.0)
    assert far.shape == (2,)
    assert (far > 0).all()  # more likely here than under the reference
