"""Learning rates and weight decay of single updates, by hand."""

from dataclasses import replace

import pytest
import torch

from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.schedule import LearningRateSchedule
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.support import ranks, reference

SPEC = TrainerSpec(model="m", lr=8.0, min_lr=2.0, warmup_steps=2, decay_steps=6)


class Optimizer:
    """What the scheduler drives: two groups, of which one is left out of weight decay."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.0, "wd_mult": 1.0}, {"lr": 0.0, "wd_mult": 0.0}]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [4, 8, 8, 8, 8, 8, 8, 8]),
        # 8, less a quarter of 6 each time; 2 from update 6 on
        ("linear", [4, 8, 8, 6.5, 5, 3.5, 2, 2]),
        # 2 + 6 · (1 + cos(π · k / 4)) / 2; cos(π/4) = 0.70710678
        ("cosine", [4, 8, 8, 7.12132034, 5, 2.87867966, 2, 2]),
    ],
)
def test_rates_are_a_function_of_the_number_of_updates(schedule: str, rates: list[float]) -> None:
    optimizer = Optimizer()
    made = LearningRateSchedule(optimizer, replace(SPEC, schedule=schedule, weight_decay=0.1))
    for updates in (7, *range(8)):  # in any order: nothing is remembered
        assert made.set(updates) == pytest.approx(rates[updates])
        assert [group["lr"] for group in optimizer.param_groups] == [
            pytest.approx(rates[updates])
        ] * 2
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_without_a_warm_up_the_first_update_has_the_full_rate_and_none_has_zero() -> None:
    made = LearningRateSchedule(
        Optimizer(), replace(SPEC, schedule="linear", warmup_steps=0, min_lr=0.0, decay_steps=4)
    )
    assert [made.set(updates) for updates in range(5)] == [8.0, 6.0, 4.0, 2.0, 0.0]


def test_a_constant_rate_may_end_in_its_warm_up() -> None:
    for decay_steps in (None, 1):
        made = LearningRateSchedule(
            Optimizer(), replace(SPEC, warmup_steps=4, decay_steps=decay_steps)
        )
        assert [made.set(updates) for updates in range(3)] == [2.0, 4.0, 6.0]


def test_a_schedule_that_ends_in_its_warm_up_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"schedule 'linear' over 2 updates with a warm-up of 2; it needs more"
    ):
        replace(SPEC, schedule="linear", decay_steps=2)
    with pytest.raises(ValueError, match="schedule 'cosine' over None updates"):
        replace(SPEC, schedule="cosine", decay_steps=None)


def decay(rank: int, spec: TrainerSpec, out: str) -> None:
    """One step of which weight decay is everything: lr · decay = 0.5, and Adam's own part is nothing."""
    trainer = MegatronTrainer(spec)
    before = ranks.copy_weights(trainer)
    trainer._schedule.set(0)
    for parameter in trainer._parameters.values():
        parameter.main_grad.zero_()
    trainer._optimizer.step()
    torch.save({"before": before, "after": ranks.copy_weights(trainer)}, out)


@pytest.mark.slow
def test_weight_decay_leaves_norms_and_biases_alone(tmp_path) -> None:
    reference.make_model("qwen2", tmp_path / "model")
    spec = ranks.make_spec(str(tmp_path / "model"), lr=0.5, weight_decay=1.0)
    ranks.run_jobs(
        [ranks.Job(function=decay, arguments={"spec": spec, "out": str(tmp_path / "out.pt")})]
    )
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    decayed = {
        name
        for name, tensor in got["after"].items()
        if not torch.equal(tensor, got["before"][name])
    }
    assert decayed == {name for name, tensor in got["before"].items() if tensor.dim() == 2}
    for name in decayed:
        assert torch.equal(got["after"][name], got["before"][name] * 0.5), name
