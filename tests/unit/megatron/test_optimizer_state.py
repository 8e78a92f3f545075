"""Optimizer state: moments in host memory, and state that is restored."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import pytest
import torch
from torch import Tensor

from mcore_mas.megatron.apex_replacements import multi_tensor_copy
from mcore_mas.megatron.state import host_moments
from mcore_mas.megatron.state.host_moments import MOMENTS, HostMoments
from mcore_mas.megatron.state.optimizer import OptimizerState
from mcore_mas.megatron.step import trainer as trainer_module
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from tests.support import ranks, reference


class CountingAdam:
    """An optimizer like Transformer Engine's Adam.

    A group counts its steps, and a weight has moments from its first step on.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": weights[:2], "lr": 1.0},
            {"params": weights[2:], "lr": 2.0},
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                if weight not in self.state:
                    self.state[weight] = {name: torch.zeros_like(weight) for name in MOMENTS}
                moments = self.state[weight]
                moments["exp_avg"] += 1
                weight -= group["lr"] * group["step"] * moments["exp_avg"]


def test_weights_are_stepped_one_by_one_with_their_moments_on_the_host() -> None:
    weights = [torch.zeros(2), torch.zeros(3), torch.zeros(4)]
    whole = CountingAdam([weight.clone() for weight in weights])
    by_weight = CountingAdam(weights)
    on_host = {
        weight: {name: torch.full_like(weight, 7.0) for name in MOMENTS} for weight in weights[:2]
    }
    groups = by_weight.param_groups
    for _ in range(2):
        whole.step()
        host_moments.step_by_weight(by_weight, by_weight.step, on_host)

    assert by_weight.param_groups is groups
    assert [group["step"] for group in groups] == [2, 2]
    # 1 · 1 + 2 · 2, and twice as much at twice the learning rate
    assert [weight.tolist() for weight in weights] == [[-5.0] * 2, [-5.0] * 3, [-10.0] * 4]
    assert all(map(torch.equal, weights, whole.state))
    for weight, moments in on_host.items():
        assert all(by_weight.state[weight][name] is moments[name] for name in MOMENTS)
        assert moments["exp_avg"].unique().tolist() == [2]
        assert moments["exp_avg_sq"].unique().tolist() == [0]


def load_threes(
    weight: Tensor, group: dict[str, Any], moments: HostMoments | None = None
) -> dict[Tensor, dict[str, Tensor]]:
    """Load a state of 7 steps whose numbers are all 3; return Adam's state."""
    adam = SimpleNamespace(param_groups=[group], state={})
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)])
    state = OptimizerState(optimizer, {"weight": weight}, moments)
    state.load(lambda name, kind, first, end: torch.full((end - first,), 3.0), steps=7)
    return adam.state


def test_moments_on_the_host_are_restored_in_place() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    on_host = {name: torch.zeros(2) for name in MOMENTS}
    adam_state = load_threes(weight, {"params": [weight]}, {weight: on_host})
    for name, moment in on_host.items():
        assert adam_state[weight][name] is moment
        assert moment.tolist() == [3.0, 3.0]


def test_steps_are_restored() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    adam_state = load_threes(weight, {"params": [weight], "lr": 0.1})
    assert float(adam_state[weight]["step"]) == 7
    assert weight.tolist() == [3.0, 3.0]
    assert adam_state[weight]["exp_avg"].tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("one_rank")
def test_an_installed_transformer_engine_does_not_change_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def transformer_engine_adam(**_: object) -> None:
        calls.append("Adam")
        raise AssertionError("Transformer Engine's Adam is made")

    calls: list[str] = []
    # as megatron-core is after importing transformer_engine.pytorch.optimizers
    monkeypatch.setattr(megatron_optimizer, "Adam", transformer_engine_adam)
    monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    reference.make_model("qwen2", tmp_path)
    MegatronTrainer(ranks.make_spec(str(tmp_path)))
    assert calls == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("clip_grad", [0.0, 0.01, 1e9])
def test_a_step_with_the_known_norm_has_the_bits_of_megatrons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool, clip_grad: float
) -> None:
    reference.make_model("qwen2", tmp_path)
    batches = pack(reference.make_samples(), 1000)

    def train() -> tuple[list[dict[str, float]], dict[str, Tensor]]:
        trainer = MegatronTrainer(
            ranks.make_spec(str(tmp_path), bf16=bf16, clip_grad=clip_grad, weight_decay=0.1)
        )
        metrics = [trainer.update(batches) for _ in range(3)]
        return metrics, ranks.copy_weights(trainer)

    metrics, weights = train()
    monkeypatch.setattr(trainer_module, "step_optimizer", lambda optimizer, _: optimizer.step())
    expected_metrics, expected_weights = train()
    assert metrics == expected_metrics
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


def test_lists_of_weights_are_copied_with_the_bits_of_single_copies() -> None:
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (64, 64))]
    targets = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]
    multi_tensor_copy(sources, targets)
    assert all(map(torch.equal, targets, [source.bfloat16() for source in sources]))
    multi_tensor_copy([], [])
