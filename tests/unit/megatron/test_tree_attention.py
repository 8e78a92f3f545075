"""Attention over trees is that of every sequence by itself, forward and backward."""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mcore_mas.megatron.batch import Segment
from mcore_mas.megatron.model import block_attention
from mcore_mas.megatron.model.attention import TreeAttention
from mcore_mas.megatron.model.block_attention import attend, attend_backward
from mcore_mas.megatron.model.layout import PackedTrees
from mcore_mas.megatron.transfer import upload
from tests.support.precision import FACTOR

HEADS, KV_HEADS, DIM = 4, 2, 8

FORESTS = {
    "a lone token": [Segment(tokens=1)],
    "replies of one length": [
        Segment(tokens=70),
        *(Segment(tokens=33, parent=0) for _ in range(4)),
    ],
    "ragged replies": [
        Segment(tokens=5),
        *(Segment(tokens=n, parent=0) for n in (1, 2, 30, 31, 64, 90)),
    ],
    "a stem longer than two blocks": [
        Segment(tokens=300),
        Segment(tokens=1, parent=0),
        Segment(tokens=290, parent=0),
    ],
    "four levels and a neighbour": [
        Segment(tokens=40),
        Segment(tokens=1, parent=0),
        Segment(tokens=7, parent=1),
        Segment(tokens=150, parent=2),
        Segment(tokens=3, parent=2),
        Segment(tokens=1, parent=1),
        Segment(tokens=20, parent=0),
        Segment(tokens=65),
    ],
}


def paths(segments: list[Segment]) -> list[list[int]]:
    """Of every segment, the tokens on its path, its own last."""
    found: list[list[int]] = []
    start = 0
    for segment in segments:
        own = list(range(start, start + segment.tokens))
        found.append((found[segment.parent] if segment.parent >= 0 else []) + own)
        start += segment.tokens
    return found


def by_itself(q: Tensor, k: Tensor, v: Tensor, segments: list[Segment]) -> Tensor:
    """[T, heads, d]: each segment's tokens from a dense causal attention over its path alone."""
    out = []
    for path, segment in zip(paths(segments), segments, strict=True):
        keys, values = (x[path].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[path], keys) * DIM**-0.5
        causal = torch.ones(len(path), len(path), dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, values)[-segment.tokens :])
    return torch.cat(out)


def inputs(tokens: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, heads, DIM, generator=generator).to(device)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def results(attend: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """[T, heads · d] and the gradients of queries, keys and values of its inner product with a random slope."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = attend(*leaves).reshape(len(given[0]), -1)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * slope.to(out)).sum().backward()
    return [
        x.detach().double().cpu()
        for x in (out, *(leaf.grad for leaf in leaves if leaf.grad is not None))
    ]


def trees(segments: list[Segment], given: list[Tensor]) -> list[Tensor]:
    """What attention over trees comes to."""
    device = given[0].device
    layout = upload(PackedTrees.of(segments, device.type), device)
    attention = TreeAttention(
        SimpleNamespace(kv_channels=DIM, deterministic_mode=False), 1, None, "self"
    )
    return results(
        lambda *qkv: attention(*(x[:, None] for x in qkv), None, packed_seq_params=layout), given
    )


def beyond(got: list[Tensor], segments: list[Segment], given: list[Tensor]) -> dict[str, str]:
    """What is further from float64 than the same in plain float32 allows: the error and the bound by name.

    What two dot products of DIM terms round to, of the size of the largest tensor, is always allowed: a lone token's
    gradients of queries and keys are the difference of two such products, which are equal in truth.
    """
    exact, own = (
        results(partial(by_itself, segments=segments), [x.cpu().to(dtype) for x in given])
        for dtype in (torch.float64, torch.float32)
    )
    least = 2 * DIM * 2**-24 * max(float(want.norm()) for want in exact)
    found = {}
    for name, tensor, plain, want in zip(("out", "q", "k", "v"), got, own, exact, strict=True):
        error, allowed = (
            float((tensor - want).norm()),
            max(FACTOR * float((plain - want).norm()), least),
        )
        print(
            f"{name}: {error:.1e}, plain float32 {float((plain - want).norm()):.1e}, allowed {allowed:.1e}"
        )
        if not error <= allowed:
            found[name] = f"{error:.1e} > {allowed:.1e}"
    return found


@pytest.mark.parametrize("name", FORESTS)
def test_trees_are_their_sequences(name: str) -> None:
    given = inputs(sum(s.tokens for s in FORESTS[name]))
    assert not beyond(trees(FORESTS[name], given), FORESTS[name], given)


@pytest.mark.parametrize("name", FORESTS)
def test_a_defect_is_beyond_the_bound(name: str) -> None:
    segments = FORESTS[name]
    given = inputs(sum(s.tokens for s in segments))
    right = trees(segments, given)
    for place, tensor in enumerate(("out", "q", "k", "v")):
        if name == "a lone token" and tensor in ("q", "k"):
            continue  # 0, scaled or not
        scaled = [x * (1 + 1e-4) if number == place else x for number, x in enumerate(right)]
        assert list(beyond(scaled, segments, given)) == [tensor]
    unseen = [*given[:2], given[2].clone()]
    unseen[2][-1] = 0  # the last token's value is dropped
    assert "out" in beyond(trees(segments, unseen), segments, given)


def check(segments: list[Segment], device: str, dtype: torch.dtype, tolerance: float) -> None:
    given = [x.to(dtype) for x in inputs(sum(s.tokens for s in segments), device)]
    exact = results(partial(by_itself, segments=segments), [x.cpu().double() for x in given])
    for got, want in zip(trees(segments, given), exact, strict=True):
        assert float((got - want).norm()) <= tolerance * max(1.0, float(want.norm()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_trees_are_their_sequences_on_a_gpu(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    check(FORESTS[name], "cuda", dtype, tolerance)


def test_bfloat16_is_summed_in_float32() -> None:
    check(FORESTS["four levels and a neighbour"], "cpu", torch.bfloat16, 1e-2)


def test_a_long_stem_and_its_replies_are_few_calls() -> None:
    segments = [Segment(tokens=512), *(Segment(tokens=64, parent=0) for _ in range(8))]
    layout = PackedTrees.of(segments)
    # four blocks of the stem in one call, the replies in another
    assert [(own.token_range, own.length) for own in layout.own] == [
        (slice(0, 512), 128),
        (slice(512, 1024), 64),
    ]
    # halves of the stem, quarters of each half, and the stem for all replies
    assert layout.seen == (
        (slice(256, 512), slice(0, 256)),
        (slice(128, 256), slice(0, 128)),
        (slice(384, 512), slice(256, 384)),
        (slice(512, 1024), slice(0, 512)),
    )


def test_short_segments_are_padded_together_with_their_like() -> None:
    segments = [Segment(tokens=n) for n in (3, 20, 2, 100)]
    layout = PackedTrees.of(segments)
    own = {own.length: own for own in layout.own}
    assert sorted(own) == [3, 20, 100]
    assert own[3].block_tokens.tolist() == [[0, 1, 2], [23, 24, 24]]
    assert own[3].present.tolist() == [[True, True, True], [True, True, False]]
    assert (own[20].token_range, own[100].token_range) == (slice(3, 23), slice(25, 125))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_a_gpu_take_what_they_are_given(dtype: torch.dtype) -> None:
    q = torch.empty(2, HEADS, 5, DIM, dtype=dtype, device="meta")
    k = torch.empty(2, KV_HEADS, 5, DIM, dtype=dtype, device="meta")
    out, lse = attend(q, k, k, causal=True, scale=1.0)
    assert (out.shape, lse.shape) == (q.shape, (2, HEADS, 5))
    gradients = attend_backward(out, q, k, k, out, lse, causal=True, scale=1.0)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("tokens", [31, 32, 64])
def test_log_sum_exps_lie_side_by_side_for_the_kernel_of_a_gpu(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    q, k = (torch.empty(1, heads, tokens, DIM, device="meta") for heads in (HEADS, KV_HEADS))
    kernel = SimpleNamespace(
        _scaled_dot_product_efficient_attention_backward=lambda *given, **_: (
            seen.append(given[6]),
            k,
            k,
            None,
        )
    )
    monkeypatch.setattr(block_attention, "_aten", kernel)
    lse = torch.empty(tokens, HEADS, device="meta").t()[None]  # as a layout's are stored
    attend_backward(q, q, k, k, q, lse, causal=False, scale=1.0)
    assert [x.stride(-1) for x in seen] == [1]


class Kernel(torch.nn.Module):
    """Transformer Engine's `DotProductAttention`, in what it takes and returns of packed sequences."""

    made: ClassVar[list[dict[str, object]]] = []

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.made.append(options)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        starts = options["cu_seqlens_q"]
        assert starts.dtype == torch.int32 and torch.equal(starts, options["cu_seqlens_kv"])
        lengths = starts.diff().tolist()
        assert (options["qkv_format"], options["attn_mask_type"]) == ("thd", "padding_causal")
        assert options["max_seqlen_q"] == options["max_seqlen_kv"] == max(lengths)
        whole = by_itself(query, key, value, [Segment(tokens=length) for length in lengths])
        return whole.flatten(1)


def test_transformer_engine_attends_where_nothing_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace(pytorch=None))
    monkeypatch.setitem(
        sys.modules, "transformer_engine.pytorch", SimpleNamespace(DotProductAttention=Kernel)
    )
    config = SimpleNamespace(kv_channels=DIM, deterministic_mode=False)
    ours = TreeAttention(config, 1, None, None)
    fused = TreeAttention(config, 1, None, None, fused=True)
    for segments, kernels in (
        ([Segment(tokens=3), Segment(tokens=70), Segment(tokens=1)], 1),
        (FORESTS["ragged replies"], 1),  # trees are ours: no second kernel is made
        ([Segment(tokens=9)], 1),  # the same heads: it is made once
    ):
        layout = PackedTrees.of(segments)
        q, k, v = (x[:, None] for x in inputs(sum(segment.tokens for segment in segments)))
        want = ours(q, k, v, None, packed_seq_params=layout)
        got = fused(q, k, v, None, packed_seq_params=layout)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        assert len(Kernel.made) == kernels
    (made,) = Kernel.made
    assert (made["num_attention_heads"], made["num_gqa_groups"], made["kv_channels"]) == (
        HEADS,
        KV_HEADS,
        DIM,
    )
    assert made["softmax_scale"] == DIM**-0.5 and made["attention_dropout"] == 0.0
