"""Learning rates of single updates by hand, and parameters with weight decay."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.schedule import LearningRateSchedule
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.support import ranks, reference

SPEC = TrainerSpec(model="m", lr=8.0, min_lr=2.0, warmup_steps=2, decay_steps=6)


class TwoGroupOptimizer:
    """Optimizer with one group of parameters that have weight decay, and one that have none."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"lr": 0.0, "wd_mult": 1.0},
            {"lr": 0.0, "wd_mult": 0.0},
        ]


def schedule_of(spec: TrainerSpec) -> LearningRateSchedule:
    optimizer: Any = TwoGroupOptimizer()
    return LearningRateSchedule(optimizer, spec)


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("constant", [4, 8, 8, 8, 8, 8, 8, 8]),
        # From 8 to 2 in four equal steps; 2 from update 6 on.
        ("linear", [4, 8, 8, 6.5, 5, 3.5, 2, 2]),
        # 2 + 6 · (1 + cos(π · k / 4)) / 2; cos(π/4) = 0.70710678
        ("cosine", [4, 8, 8, 7.12132034, 5, 2.87867966, 2, 2]),
    ],
)
def test_the_rate_is_a_function_of_the_number_of_updates(kind: Any, rates: list[float]) -> None:
    optimizer: Any = TwoGroupOptimizer()
    schedule = LearningRateSchedule(optimizer, replace(SPEC, schedule=kind, weight_decay=0.1))
    for updates in (7, *range(8)):  # any order: the schedule has no memory
        rate = pytest.approx(rates[updates])
        assert schedule.set(updates) == rate
        assert [group["lr"] for group in optimizer.param_groups] == [rate, rate]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_without_a_warm_up_the_first_update_has_the_full_rate() -> None:
    schedule = schedule_of(
        replace(SPEC, schedule="linear", warmup_steps=0, min_lr=0.0, decay_steps=4)
    )
    assert [schedule.set(updates) for updates in range(5)] == [8.0, 6.0, 4.0, 2.0, 0.0]


def test_a_scale_changes_the_rate_of_one_update_alone() -> None:
    optimizer: Any = TwoGroupOptimizer()
    schedule = LearningRateSchedule(optimizer, SPEC)
    assert schedule.set(3, scale=0.25) == 2.0
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 2.0]
    assert schedule.set(3) == 8.0
    assert [group["lr"] for group in optimizer.param_groups] == [8.0, 8.0]


@pytest.mark.parametrize("decay_steps", [None, 1])
def test_a_constant_rate_may_end_during_its_warm_up(decay_steps: int | None) -> None:
    schedule = schedule_of(replace(SPEC, warmup_steps=4, decay_steps=decay_steps))
    assert [schedule.set(updates) for updates in range(3)] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("kind", "decay_steps", "message"),
    [
        (
            "linear",
            2,
            "schedule 'linear' over 2 updates with a warm-up of 2; it needs more updates than its "
            "warm-up",
        ),
        ("cosine", None, "schedule 'cosine' over None updates"),
    ],
)
def test_a_schedule_that_ends_during_its_warm_up_is_refused(
    kind: Any, decay_steps: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, schedule=kind, decay_steps=decay_steps)


def step_without_gradient(rank: int, spec: TrainerSpec, out: str) -> None:
    """Step with gradients of 0, so that weight decay makes all of the change."""
    trainer = MegatronTrainer(spec)
    before = ranks.copy_weights(trainer)
    trainer._lr_schedule.set(0)
    for parameter in trainer.model.trained_parameters.values():
        parameter.main_grad.zero_()  # type: ignore[attr-defined]
    trainer._optimizer.step()
    torch.save({"before": before, "after": ranks.copy_weights(trainer)}, out)


@pytest.mark.slow
def test_norms_and_biases_have_no_weight_decay(tmp_path: Path) -> None:
    reference.make_model("qwen2", tmp_path / "model")
    lr = 0.5
    spec = ranks.make_spec(str(tmp_path / "model"), lr=lr, weight_decay=1.0)
    out = str(tmp_path / "weights.pt")
    ranks.run_jobs(
        [ranks.Job(function=step_without_gradient, arguments={"spec": spec, "out": out})]
    )
    weights = torch.load(out, weights_only=True)
    for name, before in weights["before"].items():
        is_matrix = before.dim() == 2
        expected = before * (1 - lr) if is_matrix else before
        assert torch.equal(weights["after"][name], expected), name
