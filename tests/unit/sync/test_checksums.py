"""Checksums of weights see what hand-overs get wrong, and are those that SGLang's servers say."""

from __future__ import annotations

import hashlib
from functools import partial

import pytest
import torch
import xxhash
from torch import Tensor

from rollout.models.tensors import (
    RowBlocks,
    begun_checksum,
    checksum,
    copy,
    gpu_hash,
    shape_of,
    whole,
)
from rollout.sync.digests import SGLangDigest


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


def copied(rows: RowBlocks, target: Tensor) -> tuple[str, list[int]]:
    """The checksum taken on the way, and how far it was after each part."""
    digest = begun_checksum(shape_of(rows))
    parts = list(copy(rows, target, digest))
    return digest.hexdigest(), parts


def test_a_copy_is_summed_on_the_way() -> None:
    weight = torch.randn(300, 1000)
    for tensor in (weight, weight.bfloat16(), weight[:7], weight[0], weight.t()):
        target = torch.zeros(tensor.shape)
        assert copied(tensor, target)[0] == checksum(tensor.float()) == checksum(target)
        assert torch.equal(target, tensor.float())
    paired = torch.zeros(10, 15, 2, 1000).transpose(1, 2)  # an engine's order of rows
    assert copied(weight, paired)[0] == checksum(weight) == checksum(paired.reshape(300, 1000))


def test_blocks_of_rows_are_copied_as_the_tensor_they_make_up() -> None:
    weight = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    memory = torch.cat(
        [torch.full((1, 1000), 9.0), weight[:210], torch.full((5, 1000), 9.0), weight[210:]]
    )
    blocks = [memory[1:211], memory[216:]]  # as two groups of queries lie between keys and values
    assert shape_of(blocks) == weight.shape
    assert torch.equal(whole(blocks), weight)
    assert whole([weight]) is weight
    flat, paired = torch.zeros(300, 1000), torch.zeros(10, 15, 2, 1000).transpose(1, 2)
    # 840,000 and 360,000 bytes, in parts of 524,288
    assert copied(blocks, flat) == (
        checksum(weight),
        [524_288, 840_000, 840_000, 1_200_000, 1_200_000],
    )
    assert copied(blocks, paired) == (checksum(weight), [840_000, 1_200_000])
    assert torch.equal(flat, weight)
    assert torch.equal(paired.reshape(300, 1000), weight)


def test_a_checksum_is_xxh3_of_shape_and_bytes() -> None:
    ones = torch.ones(2, 3)
    assert checksum(ones) == xxhash.xxh3_128_hexdigest(b"[2, 3]" + 6 * b"\x00\x00\x80\x3f")


def test_sglangs_own_checksums_are_of_stacked_tensors() -> None:
    digest = SGLangDigest(dtype="float32", tp=1, kv_heads=1, gpu=False, vocab=70)
    q, k, v = torch.ones(2, 3), torch.zeros(1, 3), torch.full((1, 3), 2.0)
    for part, tensor in (("q", q), ("k", k), ("v", v)):
        digest.add(f"model.layers.0.self_attn.{part}_proj.weight", tensor)
    digest.add("model.layers.0.mlp.gate_proj.weight", q)  # without up: not compared
    digest.add("model.embed_tokens.weight", torch.ones(70, 1))
    for number in (1, 0):
        for part, value in (("up", 3.0), ("gate", 2.0)):
            digest.add(
                f"e.experts.{number}.{part}_proj.weight", torch.full((31, 1), value + number)
            )
        digest.add(f"e.experts.{number}.down_proj.weight", torch.full((1, 31), 7.0 + number))

    def padded(*values: float) -> torch.Tensor:
        return torch.cat(
            [torch.cat([torch.full((31,), value), torch.zeros(1)]) for value in values]
        )

    want = {
        "e.experts.w13_weight": padded(2, 3, 3, 4),  # gate and up of the first, then of the second
        "e.experts.w2_weight": padded(7, 8),
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat([q, k, v]),
        "model.embed_tokens.weight": torch.cat([torch.ones(70), torch.zeros(58)]),  # 128 rows
    }
    assert digest.finish() == {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
        for name, tensor in want.items()
    }


def test_sglangs_ranks_hold_parts_of_stacks() -> None:
    digest = SGLangDigest(dtype="bfloat16", tp=2, kv_heads=1, gpu=True, vocab=65)
    q, k, v = torch.arange(12.0).view(4, 3), torch.full((2, 3), 20.0), torch.full((2, 3), 30.0)
    for part, tensor in (("q", q), ("k", k), ("v", v)):
        digest.add(f"model.layers.0.self_attn.{part}_proj.weight", tensor)
    digest.add("model.layers.0.self_attn.o_proj.weight", q.t())
    digest.add("model.layers.0.mlp.gate_proj.weight", q)
    digest.add("model.layers.0.mlp.up_proj.weight", q + 100)
    digest.add("model.norm.weight", torch.ones(3))
    digest.add("lm_head.weight", torch.ones(65, 1))
    for layer in (0, 1):  # one is done when the next begins
        for part, tensor in (("gate", q), ("up", q + 50), ("down", q.t())):
            digest.add(f"layers.{layer}.experts.0.{part}_proj.weight", tensor + layer)
    head = torch.cat([torch.ones(65, 1), torch.zeros(63, 1)])  # 128 rows, which two share
    want: dict[str, Tensor] = {}
    for rank, half in enumerate((slice(0, 2), slice(2, 4))):
        parts = {
            "model.layers.0.self_attn.qkv_proj.weight": torch.cat(
                [q[half], k, v]
            ),  # both have the only head of keys
            "model.layers.0.self_attn.o_proj.weight": q.t()[:, half],
            "model.layers.0.mlp.gate_up_proj.weight": torch.cat([q[half], q[half] + 100]),
            "model.norm.weight": torch.ones(3),
            "lm_head.weight": head[64 * rank : 64 * rank + 64],
            "layers.0.experts.w13_weight": torch.cat([q[half], q[half] + 50])[None],
            "layers.0.experts.w2_weight": q.t()[None, :, half],
            "layers.1.experts.w13_weight": torch.cat([q[half] + 1, q[half] + 51])[None],
            "layers.1.experts.w2_weight": q.t()[None, :, half] + 1,
        }
        want |= {f"{name} of rank {rank}": part for name, part in parts.items()}
    assert digest.finish() == {
        name: f"{gpu_hash(part.bfloat16()):016x}" for name, part in want.items()
    }


@pytest.mark.parametrize("how", ["torch", "kernel"])
def test_the_hash_of_a_gpu_is_sglangs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "kernel":
        triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
        if not triton.knobs.runtime.interpret:
            pytest.skip("needs TRITON_INTERPRET=1, as tests/conftest.py has it")
        from rollout.models import hash_kernel
        from rollout.models import tensors as module

        kernel = partial(hash_kernel.sum_of_tiles, seeds=module._SEEDS)
        monkeypatch.setattr(module, "_sum_of_tiles", kernel)
    # as the kernel of SGLang 0.5.23 computes them in Triton's interpreter; tests/sglang does that again
    assert gpu_hash(torch.ones(1)) == 0x7BB542503BA9B944
    many = (torch.arange(40_000) % 251).float()
    assert gpu_hash(many) == 0xA5A582EB081D1E92
    assert gpu_hash(many.view(200, 200).t().contiguous().t()) == 0xA5A582EB081D1E92
    assert (
        gpu_hash(torch.arange(5, dtype=torch.uint8)) == 0x5378E41554869438
    )  # two words, filled up
    assert gpu_hash(torch.empty(0)) == 0
    monkeypatch.setattr("rollout.models.tensors._TILES", 2)  # blocks of 16,384 words
    assert gpu_hash(many) == 0xA5A582EB081D1E92
