"""Memory that is given away comes back under every view of it."""

from types import SimpleNamespace

import pytest
import torch

from mcore_mas.megatron import host_memory
from mcore_mas.megatron.host_memory import BlockMemory, pinned_buffers
from mcore_mas.megatron.state import optimizer
from mcore_mas.megatron.state.optimizer import Offload, OptimizerState


def test_what_is_kept_comes_back_under_every_view() -> None:
    whole = torch.arange(6.0)
    part, alone, nothing = whole[2:4], torch.tensor([7], dtype=torch.int64), torch.empty(0)
    offload = Offload([], lambda: [whole, part, alone, nothing], BlockMemory())
    assert offload.sleep() == 6 * 4 + 8
    assert [x.untyped_storage().nbytes() for x in (whole, part, alone)] == [0, 0, 0]
    offload.wake()
    assert (whole.tolist(), part.tolist(), alone.tolist()) == ([0, 1, 2, 3, 4, 5], [2, 3], [7])
    whole[2] = 9.0
    assert part.tolist() == [9, 3]


def test_gradients_come_back_as_zeros() -> None:
    gradients = torch.ones(100)
    view = gradients[:10]
    offload = Offload([gradients], list, BlockMemory())
    assert offload.sleep() == 400
    assert gradients.untyped_storage().nbytes() == 0
    offload.wake()
    assert view.tolist() == [0.0] * 10
    gradients[0] = 5.0
    assert view[0] == 5.0


class CountingAdam:
    """As Transformer Engine's: a group counts its steps, and a weight's moments come with its first."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.param_groups: list[dict] = [
            {"params": weights[:2], "lr": 1.0},
            {"params": weights[2:], "lr": 2.0},
        ]
        self.state: dict = {}
        self.kept: dict = {}

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                held = self.state.setdefault(
                    weight, {name: torch.zeros_like(weight) for name in optimizer.MOMENTS}
                )
                held["exp_avg"] += 1
                weight -= group["lr"] * group["step"] * held["exp_avg"]


def test_weights_are_stepped_one_by_one_and_their_moments_kept_elsewhere() -> None:
    weights = [torch.zeros(2), torch.zeros(3), torch.zeros(4)]
    whole, single = CountingAdam([w.clone() for w in weights]), CountingAdam(weights)
    kept = {w: {name: torch.full_like(w, 7.0) for name in optimizer.MOMENTS} for w in weights[:2]}
    single.kept = kept
    groups = single.param_groups
    for _ in range(2):
        whole.step()
        optimizer._step_by_weight(single, single.step)
    assert single.param_groups is groups and [group["step"] for group in groups] == [2, 2]
    assert [w.tolist() for w in weights] == [
        [-5.0] * 2,
        [-5.0] * 3,
        [-10.0] * 4,
    ]  # 1 * 1 + 2 * 2, twice of it
    assert all(map(torch.equal, weights, whole.state))
    for weight, places in kept.items():
        assert all(single.state[weight][name] is place for name, place in places.items())
        assert (places["exp_avg"].unique().tolist(), places["exp_avg_sq"].unique().tolist()) == (
            [2],
            [0],
        )


def test_places_in_host_memory_are_the_largest_first_and_blocks_powers_of_two() -> None:
    places = pinned_buffers(
        [12, 40, 8, 20]
    )  # of 80 bytes: 64, of which 40 and 20; and 16 and 8 of the 20 that are left
    assert [len(place) for place in places] == [40, 20, 12, 8]
    blocks = [place.untyped_storage() for place in places]
    assert [block.nbytes() for block in blocks] == [64, 64, 16, 8]
    assert blocks[0].data_ptr() == blocks[1].data_ptr() and places[1].storage_offset() == 40


def test_the_memory_of_what_is_kept_is_taken_once() -> None:
    kept, host = [torch.arange(5.0), torch.arange(3)], BlockMemory()
    offload = Offload([], lambda: kept, host)
    places = []
    for _ in range(2):
        assert offload.sleep() == 5 * 4 + 3 * 8
        offload.wake()
        places.append([place.data_ptr() for _, place in host.slots(kept)])
        assert (kept[0].tolist(), kept[1].tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2])
    assert places[0] == places[1] and len(host._blocks) == 1


def test_host_memory_is_in_blocks_of_one_size_that_tensors_run_across(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", 16)
    host, tensors = (
        BlockMemory(),
        [torch.arange(5.0), torch.arange(6, dtype=torch.int16)],
    )  # of 20 and 12 bytes
    parts = list(host.slots(tensors))
    assert [(len(part), len(place)) for part, place in parts] == [(16, 16), (4, 4), (12, 12)]
    assert (
        len({place.untyped_storage().data_ptr() for _, place in parts}) == 2
    )  # the last two lie in one block
    for part, place in parts:
        place.copy_(part)
        part.zero_()
    host.swap(tensors)
    assert (tensors[0].tolist(), tensors[1].tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])
    assert not any(place.any() for _, place in host.slots(tensors))
    list(host.slots([*tensors, torch.zeros(1)]))  # one byte more takes one block more
    assert len(host._blocks) == 3


def test_moments_are_restored_where_they_are_kept() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    kept = {name: torch.zeros(2) for name in optimizer.MOMENTS}
    adam = SimpleNamespace(param_groups=[{"params": [weight]}], state={}, kept={weight: kept})
    held = OptimizerState(
        SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)]), {"weight": weight}
    )
    held.load(lambda name, kind, first, last: torch.full((last - first,), 3.0), 7)
    assert all(
        adam.state[weight][name] is place and place.tolist() == [3.0, 3.0]
        for name, place in kept.items()
    )


def test_steps_are_restored_where_each_adam_counts_them() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    group = {"params": [weight], "lr": 0.1}  # Transformer Engine counts here, torch by tensor
    adam = SimpleNamespace(param_groups=[group], state={})
    held = OptimizerState(
        SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)]), {"weight": weight}
    )
    held.load(lambda name, kind, first, last: torch.full((last - first,), 3.0), 7)
    assert group["step"] == 7 and float(adam.state[weight]["step"]) == 7
    assert weight.tolist() == adam.state[weight]["exp_avg"].tolist() == [3.0, 3.0]
