"""Estimates of a KL divergence against sums over a small distribution; the adaptive coefficient by hand."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from mcore_mas.equations.kl import KL_ESTIMATES, AdaptiveKL, k1, k2, k3, kl_penalty

LOGITS = st.lists(st.floats(-3, 3), min_size=3, max_size=3)


def log_softmax(logits: list[float]) -> Tensor:
    return torch.tensor(logits, dtype=torch.float64).log_softmax(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


def is_below_limit(logits: list[float], reference: list[float]) -> bool:
    """Return True if the k3 of every token is below its limit, 10."""
    return float((log_softmax(logits) - log_softmax(reference)).abs().max()) < 2.5


def expected(kind: str, logits: list[float], reference: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the exact expectations of an estimate and of its gradient, over tokens from softmax(logits)."""
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprobs = leaf.log_softmax(-1)
    mean = (logprobs.exp().detach() * KL_ESTIMATES[kind](logprobs, reference)).sum()
    (gradient,) = torch.autograd.grad(mean, leaf)
    return mean.detach(), gradient


def true_gradient(logits: list[float], reference: Tensor, *, forward: bool = False) -> Tensor:
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    p = leaf.log_softmax(-1)
    q = reference
    (gradient,) = torch.autograd.grad(divergence(q, p) if forward else divergence(p, q), leaf)
    return gradient


def test_estimates_by_hand() -> None:
    # The difference d of the log-probabilities is log 2 for the first token, to which the policy gives
    # twice the reference's probability; −log 4 for the second; and 0 for the third.
    logprobs = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64).log()
    reference = torch.tensor([0.4, 0.4, 0.1], dtype=torch.float64).log()
    assert k1(logprobs, reference).tolist() == pytest.approx([math.log(2), -math.log(4), 0])
    # ln²2 / 2 and ln²4 / 2
    assert k2(logprobs, reference).tolist() == pytest.approx([0.2402265, 0.9609060, 0])
    assert k3(logprobs, reference).tolist() == pytest.approx(
        [1 / 2 - 1 + math.log(2), 4 - 1 - math.log(4), 0]
    )


def test_k3_is_at_most_10_and_pulls_no_further() -> None:
    """At d = -19 the value was 1.8e8, and its gradient -1.8e8."""
    logprobs = torch.tensor([-19.0, -2.7, -2.0], requires_grad=True)
    value = k3(logprobs, torch.zeros(3))
    assert value.tolist() == pytest.approx([10.0, 10.0, math.exp(2) - 1 - 2])
    value.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 1 - math.exp(2)])  # type: ignore[union-attr]


@given(logits=LOGITS, reference=LOGITS)
@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_all_but_k2_have_the_divergence_as_their_mean(
    kind: str, logits: list[float], reference: list[float]
) -> None:
    assume(is_below_limit(logits, reference) or "k3" not in kind)  # beyond, k3 is cut off
    value, _ = expected(kind, logits, log_softmax(reference))
    assert float(value) == pytest.approx(
        float(divergence(log_softmax(logits), log_softmax(reference))), abs=1e-9
    )


def test_k2_is_biased() -> None:
    reference = log_softmax([0.0, 0.0, 2.0])
    value, _ = expected("k2", [2.0, 0.0, 0.0], reference)
    # p = (e², 1, 1) / Z, q = (1, 1, e²) / Z with Z = e² + 2: d = (2, 0, −2)
    z = math.e**2 + 2
    assert float(value) == pytest.approx(2 * (math.e**2 + 1) / z)
    assert float(divergence(log_softmax([2.0, 0.0, 0.0]), reference)) == pytest.approx(
        2 * (math.e**2 - 1) / z
    )


@given(logits=LOGITS, reference=LOGITS)
@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_the_gradient_of_k2_is_the_divergences_in_expectation(
    kind: str, logits: list[float], reference: list[float]
) -> None:
    _, gradient = expected(kind, logits, log_softmax(reference))
    assert torch.allclose(gradient, true_gradient(logits, log_softmax(reference)), atol=1e-9)


@given(logits=LOGITS, reference=LOGITS)
def test_k1_pulls_nowhere_and_k3_along_the_other_direction(
    logits: list[float], reference: list[float]
) -> None:
    assert torch.allclose(
        expected("k1", logits, log_softmax(reference))[1], torch.zeros(3).double(), atol=1e-9
    )
    assume(is_below_limit(logits, reference))
    k3_gradient = expected("k3", logits, log_softmax(reference))[1]
    assert torch.allclose(
        k3_gradient, true_gradient(logits, log_softmax(reference), forward=True), atol=1e-9
    )


@given(st.floats(-60, 0), st.floats(-60, 0))
def test_k3_is_finite_and_never_negative(logprob: float, reference: float) -> None:
    value = float(k3(torch.tensor([logprob]), torch.tensor([reference])))
    assert math.isfinite(value)
    assert value >= 0


def test_the_penalty_of_a_reward_is_the_estimate_without_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([-1.5, -1.0]))
    assert penalty.tolist() == [0.5, -1.0]
    assert not penalty.requires_grad
    assert kl_penalty(logprobs, torch.tensor([-1.5, -1.0]), "k2").tolist() == [0.125, 0.5]


def test_the_coefficient_follows_its_target() -> None:
    start = AdaptiveKL(coefficient=0.1, target=6.0, horizon=1000.0)
    assert start.update(6.6, 100).coefficient == pytest.approx(0.1 * (1 + 0.1 * 0.1))  # 10 % above
    assert start.update(60.0, 100).coefficient == pytest.approx(0.1 * (1 + 0.2 * 0.1))  # clipped
    assert start.update(0.0, 100).coefficient == pytest.approx(0.1 * (1 - 0.2 * 0.1))  # clipped
    assert start.update(6.0, 100) == start
    assert start.update(60.0, 100).update(60.0, 100).coefficient == pytest.approx(0.1 * 1.02**2)


def test_the_controller_survives_its_checkpoint() -> None:
    controller = AdaptiveKL(coefficient=0.1, target=6.0).update(7.0, 32)
    state = asdict(controller)
    assert state == {
        "coefficient": pytest.approx(0.1 * (1 + 32 / 6 / 10_000)),
        "target": 6.0,
        "horizon": 10_000.0,
    }
    assert AdaptiveKL(**state) == controller


def test_the_controller_refuses_what_it_cannot_follow() -> None:
    with pytest.raises(ValueError, match="target is 0"):
        AdaptiveKL(coefficient=0.1, target=0.0)
    with pytest.raises(ValueError, match="measured KL is nan"):
        AdaptiveKL(coefficient=0.1, target=6.0).update(math.nan, 32)
    with pytest.raises(ValueError, match="coefficient is"):
        AdaptiveKL(coefficient=0.1, target=6.0, horizon=10.0).update(0.0, 60)
