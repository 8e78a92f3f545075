"""Host memory in blocks of one size, and page-locked buffers."""

import pytest
import torch

from mcore_mas.megatron import host_memory
from mcore_mas.megatron.host_memory import BlockMemory, pinned_buffers


def test_pinned_buffers_are_the_largest_first_and_blocks_powers_of_two() -> None:
    # Of 80 bytes: a block of 64 for 40 and 20, and blocks of 16 and 8 for the remaining 20.
    buffers = pinned_buffers([12, 40, 8, 20])
    assert [len(buffer) for buffer in buffers] == [40, 20, 12, 8]
    blocks = [buffer.untyped_storage() for buffer in buffers]
    assert [block.nbytes() for block in blocks] == [64, 64, 16, 8]
    assert blocks[0].data_ptr() == blocks[1].data_ptr()
    assert buffers[1].storage_offset() == 40


def test_tensors_run_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", 16)
    memory = BlockMemory()
    tensors = [torch.arange(5.0), torch.arange(6, dtype=torch.int16)]  # 20 and 12 bytes

    parts = list(memory.slots(tensors))
    assert [(len(part), len(slot)) for part, slot in parts] == [(16, 16), (4, 4), (12, 12)]
    assert len(_block_addresses(memory, tensors)) == 2  # the last two parts share a block

    for part, slot in parts:
        slot.copy_(part)
        part.zero_()
    memory.swap(tensors)
    assert tensors[0].tolist() == [0, 1, 2, 3, 4]
    assert tensors[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert not any(slot.any() for _, slot in memory.slots(tensors))

    more_tensors = [*tensors, torch.zeros(1)]  # does not fit into the two blocks
    assert len(_block_addresses(memory, more_tensors)) == 3


def _block_addresses(memory: BlockMemory, tensors: list[torch.Tensor]) -> set[int]:
    return {slot.untyped_storage().data_ptr() for _, slot in memory.slots(tensors)}
