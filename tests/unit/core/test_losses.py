"""Per-token losses by hand."""

import math

import pytest
import torch

from mcore_mas.core.losses import Tokens, cross_entropy, ppo_clip


def tokens(ratios: list[float], advantages: list[float]) -> Tokens:
    return Tokens(
        logprobs=torch.tensor([math.log(r) - 1.0 for r in ratios], dtype=torch.float64),
        behaviour=torch.full((len(ratios),), -1.0, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )


def test_ppo_clip_by_hand() -> None:
    loss, statistics = ppo_clip(
        tokens([1.0, 1.5, 0.5, 1.5, 0.5, 4.0], [2.0, 2.0, 2.0, -1.0, -1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=3.0,
    )
    # -rA; clipped above at 1.3; not clipped below for A > 0; A < 0: max(-rA, -clip(r)A), at most 3|A|
    assert loss.tolist() == pytest.approx([-2.0, -2.6, -1.0, 1.5, 0.8, 3.0])
    assert statistics["clip_fraction"].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert statistics["kl"].tolist() == pytest.approx([1 / r - 1 + math.log(r) for r in (1, 1.5, 0.5, 1.5, 0.5, 4)])


def test_ppo_gradient_on_policy_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, -3.0], dtype=torch.float64)
    loss, _ = ppo_clip(Tokens(logprobs=logprobs, behaviour=logprobs.detach(), advantages=advantages))
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 3.0])


def test_clipped_tokens_have_no_gradient() -> None:
    logprobs = torch.tensor([math.log(2.0)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    loss, _ = ppo_clip(Tokens(logprobs=logprobs, behaviour=zero, advantages=torch.ones(1, dtype=torch.float64)))
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0]


def test_cross_entropy_is_the_negative_log_likelihood() -> None:
    loss, statistics = cross_entropy(tokens([1.0, math.e], [0.0, 0.0]))
    assert loss.tolist() == pytest.approx([1.0, 0.0])
    assert statistics == {}
