"""Memory that is given away comes back under every view of it."""

from types import SimpleNamespace

import pytest
import torch

from mcore_mas.megatron.state import optimizer
from mcore_mas.megatron.state.optimizer import Offload, OptimizerState


def test_what_is_kept_comes_back_under_every_view() -> None:
    whole = torch.arange(6.0)
    part, alone, nothing = whole[2:4], torch.tensor([7], dtype=torch.int64), torch.empty(0)
    offload = Offload([], lambda: [whole, part, alone, nothing])
    assert offload.sleep() == 6 * 4 + 8
    assert [x.untyped_storage().nbytes() for x in (whole, part, alone)] == [0, 0, 0]
    offload.wake()
    assert (whole.tolist(), part.tolist(), alone.tolist()) == ([0, 1, 2, 3, 4, 5], [2, 3], [7])
    whole[2] = 9.0
    assert part.tolist() == [9, 3]


def test_gradients_come_back_as_zeros() -> None:
    gradients = torch.ones(100)
    view = gradients[:10]
    offload = Offload([gradients], list)
    assert offload.sleep() == 400
    assert gradients.untyped_storage().nbytes() == 0
    offload.wake()
    assert view.tolist() == [0.0] * 10
    gradients[0] = 5.0
    assert view[0] == 5.0


class CountingAdam:
    """As Transformer Engine's: a group counts its steps, and a weight's moments come with its first."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.param_groups: list[dict] = [{"params": weights[:2], "lr": 1.0}, {"params": weights[2:], "lr": 2.0}]
        self.state: dict = {}

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                held = self.state.setdefault(weight, {name: torch.zeros_like(weight) for name in optimizer.MOMENTS})
                held["exp_avg"] += 1
                weight -= group["lr"] * group["step"] * held["exp_avg"]


def test_one_weights_moments_at_a_time_are_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[set[str]] = []
    monkeypatch.setattr(optimizer, "_move_moments", lambda state, _: moved.append(set(state)))
    weights = [torch.zeros(2), torch.zeros(3), torch.zeros(4)]
    whole, single = CountingAdam([w.clone() for w in weights]), CountingAdam(weights)
    groups = single.param_groups
    for _ in range(2):
        whole.step()
        optimizer._step_by_weight(single, single.step)
    assert single.param_groups is groups and [group["step"] for group in groups] == [2, 2]
    assert [w.tolist() for w in weights] == [[-5.0] * 2, [-5.0] * 3, [-10.0] * 4]  # 1 * 1 + 2 * 2, twice of it
    assert all(map(torch.equal, weights, whole.state))
    held = set(optimizer.MOMENTS)
    assert moved == [set(), held] * 3 + [held, held] * 3  # there and back for each weight; at first there are none


def test_the_memory_of_what_is_kept_is_taken_once() -> None:
    kept = [torch.arange(5.0), torch.arange(3)]
    offload = Offload([], lambda: kept)
    places = []
    for _ in range(2):
        assert offload.sleep() == 5 * 4 + 3 * 8
        places.append(offload._host.data_ptr())
        offload.wake()
        assert (kept[0].tolist(), kept[1].tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2])
    assert places[0] == places[1]


def test_steps_are_restored_where_each_adam_counts_them() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    group = {"params": [weight], "lr": 0.1}  # Transformer Engine counts here, torch by tensor
    adam = SimpleNamespace(param_groups=[group], state={})
    held = OptimizerState(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)]), {"weight": weight})
    held.load(lambda name, kind, first, last: torch.full((last - first,), 3.0), 7)
    assert group["step"] == 7 and float(adam.state[weight]["step"]) == 7
    assert weight.tolist() == adam.state[weight]["exp_avg"].tolist() == [3.0, 3.0]
