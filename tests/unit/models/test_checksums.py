"""Checksums of weights detect every error that a weight sync could make."""

from __future__ import annotations

import torch
import xxhash

from rollout.models.tensors import checksum, copy_with_checksum, join_blocks, shape_of


def test_a_checksum_detects_errors_of_a_weight_sync() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    right = checksum(weight)
    assert checksum(weight.clone()) == right
    flipped_bit = weight.clone()
    flipped_bit.view(torch.int32)[3, 17] ^= 1
    wrong = {
        "a flipped bit": flipped_bit,
        "two swapped rows": weight[[1, 0, 2, 3, 4, 5]],
        "swapped shards of rows": weight.roll(3, 0),
        "swapped shards of columns": weight.roll(32, 1),
        "another shape": weight.view(12, 32),
        "zeros": torch.zeros_like(weight),
    }
    assert len({right, *map(checksum, wrong.values())}) == 7


def test_a_checksum_does_not_depend_on_strides() -> None:
    """The rows of an engine's fused buffers are not contiguous."""
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    right = checksum(weight)
    wide = torch.zeros(6, 128)
    wide[:, 64:] = weight
    assert checksum(wide[:, 64:]) == right
    assert checksum(weight.t().contiguous().t()) == right
    odd = torch.randn(3, 5).bfloat16()  # rows of 10 bytes
    assert checksum(odd) == checksum(torch.cat([odd, odd], 1)[:, :5])
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))


def test_a_checksum_detects_changes_in_every_block() -> None:
    # 2.8 MB are three blocks and 80 bytes.
    weight = torch.randn(700, 1003, generator=torch.Generator().manual_seed(0))
    flat = weight.view(-1)
    checksums = {checksum(weight)}
    # The sign of the first and the last number of each block
    for index in (0, 262_143, 262_144, 524_287, 524_288, 702_079, 702_080, 702_099):
        changed = weight.clone()
        changed.view(torch.uint8).view(-1)[4 * index + 3] ^= 0x80
        checksums.add(checksum(changed))
    # Neighbouring ranges that are swapped, and numbers that are all shifted
    for size in (128, 500, 1003, 1024, 262_144):
        swapped = flat.clone()
        swapped[:size] = flat[size : 2 * size]
        swapped[size : 2 * size] = flat[:size]
        checksums.add(checksum(swapped.view_as(weight)))
        checksums.add(checksum(flat.roll(size).view_as(weight)))
    checksums.add(checksum(flat.roll(1).view_as(weight)))
    swapped_shards = torch.cat([weight[:, 501:], weight[:, :501]], 1)
    checksums.add(checksum(swapped_shards))
    assert len(checksums) == 1 + 8 + 2 * 5 + 2


def test_a_copy_has_the_checksum_of_its_source() -> None:
    weight = torch.randn(300, 1000)
    for tensor in (weight, weight.bfloat16(), weight[:7], weight[0], weight.t()):
        target = torch.zeros(tensor.shape)
        result = copy_with_checksum(tensor, target)
        assert result == checksum(tensor.float())
        assert result == checksum(target)
        assert torch.equal(target, tensor.float())
    # The embedded engine stores rows in another order.
    interleaved = torch.zeros(10, 15, 2, 1000).transpose(1, 2)
    result = copy_with_checksum(weight, interleaved)
    assert result == checksum(weight)
    assert result == checksum(interleaved.reshape(300, 1000))


def test_blocks_of_rows_are_copied_like_the_full_tensor() -> None:
    weight = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    gap = torch.full((5, 1000), 9.0)
    memory = torch.cat([gap, weight[:210], gap, weight[210:]])
    blocks = [memory[5:215], memory[220:]]
    assert shape_of(blocks) == weight.shape
    assert torch.equal(join_blocks(blocks), weight)
    assert join_blocks([weight]) is weight
    for target in (torch.zeros(300, 1000), torch.zeros(10, 15, 2, 1000).transpose(1, 2)):
        assert copy_with_checksum(blocks, target) == checksum(weight)
        assert torch.equal(target.reshape(300, 1000), weight)


def test_a_checksum_is_xxh3_of_shape_and_bytes() -> None:
    ones = torch.ones(2, 3)
    assert checksum(ones) == xxhash.xxh3_128_hexdigest(b"[2, 3]" + 6 * b"\x00\x00\x80\x3f")
