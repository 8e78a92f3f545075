"""Gradients of a policy's agents, summed as they are and balanced, on one rank."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from tests.support import precision, ranks, reference
from tests.support.gradients import full_gradients

pytestmark = pytest.mark.usefixtures("one_rank")

SAMPLES = reference.make_samples()
# All updates start from the same weights, and no gradient is clipped.
SETTINGS = {"lr": 0.0, "clip_grad": 1e9}


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    reference.make_model("qwen2", tmp_path)
    return ranks.make_spec(str(tmp_path), **SETTINGS)


def gradient(spec: TrainerSpec, *agents: str, balance: dict[str, float] | None = None) -> Tensor:
    """Return the gradient of an update on the samples of these agents as one vector."""
    trainer = MegatronTrainer(ranks.make_spec(spec.model, balance=balance, **SETTINGS))
    trainer.update(pack([sample for sample in SAMPLES if sample.agent in agents], 1000))
    return torch.cat([tensor.flatten() for _, tensor in full_gradients(trainer)])


def balanced_by_hand(a: Tensor, b: Tensor, weights: dict[str, float]) -> Tensor:
    """Return (w_a a / |a| + w_b b / |b|) (|a| + |b|) / (w_a + w_b)."""
    directions = weights["a"] * a / a.norm() + weights["b"] * b / b.norm()
    return directions * (a.norm() + b.norm()) / sum(weights.values())


def test_without_balance_the_gradient_is_the_sum_of_the_agents_gradients(spec: TrainerSpec) -> None:
    a = gradient(spec, "a")
    b = gradient(spec, "b")
    assert torch.equal(gradient(spec, "a", "b"), a + b)


def test_the_balanced_gradient_has_parts_whose_norms_are_as_the_weights(spec: TrainerSpec) -> None:
    weights = {"a": 3.0, "b": 1.0}
    a = gradient(spec, "a")
    b = gradient(spec, "b")
    assert a.norm() < b.norm()  # without balance the share of a is less than 1/2, not 3/4
    exact = balanced_by_hand(a.double(), b.double(), weights)
    float32 = balanced_by_hand(a, b, weights)
    precision.assert_close(gradient(spec, "a", "b", balance=weights), float32, exact)


def test_the_gradient_of_one_agent_is_not_rescaled(spec: TrainerSpec) -> None:
    balanced = gradient(spec, "a", balance={"a": 3.0, "b": 1.0})
    assert torch.equal(balanced, gradient(spec, "a"))
