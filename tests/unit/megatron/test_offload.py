"""Offloading: tensors come back under every view of them."""

import torch

from mcore_mas.megatron.host_memory import BlockMemory
from mcore_mas.megatron.state.offload import Offload


def test_offloaded_tensors_come_back_under_every_view() -> None:
    whole = torch.arange(6.0)
    view = whole[2:4]
    integer = torch.tensor([7], dtype=torch.int64)
    empty = torch.empty(0)
    offload = Offload([], lambda: [whole, view, integer, empty], BlockMemory())

    assert offload.sleep() == 6 * 4 + 8
    assert [tensor.untyped_storage().nbytes() for tensor in (whole, view, integer)] == [0, 0, 0]

    offload.wake()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    assert view.tolist() == [2, 3]
    assert integer.tolist() == [7]
    whole[2] = 9.0
    assert view.tolist() == [9, 3]


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


def test_host_memory_is_allocated_once() -> None:
    tensors = [torch.arange(5.0), torch.arange(3)]
    host_memory = BlockMemory()
    offload = Offload([], lambda: tensors, host_memory)
    addresses = []
    for _ in range(2):
        assert offload.sleep() == 5 * 4 + 3 * 8
        offload.wake()
        addresses.append([slot.data_ptr() for _, slot in host_memory.slots(tensors)])
        assert tensors[0].tolist() == [0, 1, 2, 3, 4]
        assert tensors[1].tolist() == [0, 1, 2]
    assert addresses[0] == addresses[1]
