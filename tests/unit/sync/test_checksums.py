"""Checksums of weights differ wherever a weight sync could go wrong."""

from __future__ import annotations

import torch
import xxhash

from rollout.models.tensors import checksum, copy_with_checksum, join_blocks, shape_of


def test_a_checksum_sees_what_hand_overs_get_wrong() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    right = checksum(weight)
    assert checksum(weight.clone()) == right
    one = weight.clone()
    one.view(torch.int32)[3, 17] ^= 1
    wrong = {
        "a bit": one,
        "two rows": weight[[1, 0, 2, 3, 4, 5]],
        "shards of rows": weight.roll(3, 0),
        "shards of columns": weight.roll(32, 1),
        "another shape": weight.view(12, 32),
        "nothing": torch.zeros_like(weight),
    }
    assert len({right, *map(checksum, wrong.values())}) == 7
    # rows may lie anywhere in memory, as they do in an engine's fused buffers
    wide = torch.zeros(6, 128)
    wide[:, 64:] = weight
    assert checksum(wide[:, 64:]) == right
    assert checksum(weight.t().contiguous().t()) == right
    odd = torch.randn(3, 5).bfloat16()  # rows of 10 bytes
    assert checksum(odd) == checksum(torch.cat([odd, odd], 1)[:, :5])
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))


def test_a_checksum_sees_what_happens_in_any_block() -> None:
    weight = torch.randn(
        700, 1003, generator=torch.Generator().manual_seed(0)
    )  # 2.8 MB: three blocks and 80 bytes
    right = checksum(weight)
    flat = weight.view(-1)
    said = {right}
    for at in (
        0,
        262_143,
        262_144,
        524_287,
        524_288,
        702_079,
        702_080,
        702_099,
    ):  # both ends of each
        spoilt = weight.clone()
        spoilt.view(torch.uint8).view(-1)[4 * at + 3] ^= 0x80  # the sign
        said.add(checksum(spoilt))
    for size in (
        128,
        500,
        1003,
        1024,
        262_144,
    ):  # blocks that trade places, small and large, near and far
        swapped = flat.clone()
        swapped[:size], swapped[size : 2 * size] = flat[size : 2 * size], flat[:size]
        said |= {checksum(swapped.view_as(weight)), checksum(flat.roll(size).view_as(weight))}
    said.add(checksum(flat.roll(1).view_as(weight)))
    columns = torch.cat([weight[:, 501:], weight[:, :501]], 1)  # shards in a wrong order
    said.add(checksum(columns))
    assert len(said) == 1 + 8 + 2 * 5 + 2


def test_a_copy_has_the_checksum_of_its_source() -> None:
    weight = torch.randn(300, 1000)
    for tensor in (weight, weight.bfloat16(), weight[:7], weight[0], weight.t()):
        target = torch.zeros(tensor.shape)
        copied = copy_with_checksum(tensor, target)
        assert copied == checksum(tensor.float()) == checksum(target)
        assert torch.equal(target, tensor.float())
    paired = torch.zeros(10, 15, 2, 1000).transpose(1, 2)  # the embedded engine's order of rows
    copied = copy_with_checksum(weight, paired)
    assert copied == checksum(weight) == checksum(paired.reshape(300, 1000))


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
