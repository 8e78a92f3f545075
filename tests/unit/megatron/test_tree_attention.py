"""Attention over trees equals attention over each of their sequences, forward and backward."""

import sys
from collections.abc import Callable, Sequence
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

HEADS = 4
KV_HEADS = 2
DIM = 8
CONFIG: Any = SimpleNamespace(kv_channels=DIM, deterministic_mode=False)
RESULT_NAMES = ("out", "q", "k", "v")

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


def token_count(segments: Sequence[Segment]) -> int:
    return sum(segment.tokens for segment in segments)


def token_paths(segments: Sequence[Segment]) -> list[list[int]]:
    """Return the tokens on the path from the root to each segment, whose own tokens are last."""
    paths: list[list[int]] = []
    start = 0
    for segment in segments:
        parent_path = paths[segment.parent] if segment.parent >= 0 else []
        paths.append([*parent_path, *range(start, start + segment.tokens)])
        start += segment.tokens
    return paths


def attend_by_path(q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Compute dense causal attention over each segment's path; return [T, heads, d]."""
    out = []
    for path, segment in zip(token_paths(segments), segments, strict=True):
        keys, values = (x[path].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[path], keys) * DIM**-0.5
        causal = torch.ones(len(path), len(path), dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, values)[-segment.tokens :])
    return torch.cat(out)


def make_inputs(tokens: int, device: str = "cpu") -> list[Tensor]:
    """Return random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, heads, DIM, generator=generator).to(device)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def results_of(attention: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output [T, heads · d] and the gradients of queries, keys and values, in float64.

    The loss is the inner product of the output and a random tensor.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(*leaves).reshape(len(inputs[0]), -1)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * grad_out.to(out)).sum().backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [x.detach().double().cpu() for x in (out, *gradients)]


def results_of_trees(segments: Sequence[Segment], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of `TreeAttention`."""
    device = inputs[0].device
    layout = upload(PackedTrees.of(segments, device.type), device)
    attention = TreeAttention(CONFIG, 1, None, "self")

    def attend_to_trees(*qkv: Tensor) -> Tensor:
        out: Tensor = attention(*(x[:, None] for x in qkv), None, packed_seq_params=layout)
        return out

    return results_of(attend_to_trees, inputs)


def excessive_errors(
    results: Sequence[Tensor], segments: Sequence[Segment], inputs: Sequence[Tensor]
) -> dict[str, str]:
    """Return the error and the bound, by name, of results that are further from float64 than allowed.

    The bound is a multiple of the error of plain float32. The rounding of two dot products of DIM
    terms of the largest tensor is always allowed: the gradients of a lone token's query and key are
    the difference of two such products, which are equal in exact arithmetic.
    """
    by_path = partial(attend_by_path, segments=segments)
    exact = results_of(by_path, [x.cpu().double() for x in inputs])
    plain = results_of(by_path, [x.cpu().float() for x in inputs])
    min_bound = 2 * DIM * 2**-24 * max(float(tensor.norm()) for tensor in exact)
    excessive = {}
    for name, result, exact_result, plain_result in zip(
        RESULT_NAMES, results, exact, plain, strict=True
    ):
        error = float((result - exact_result).norm())
        plain_error = float((plain_result - exact_result).norm())
        bound = max(FACTOR * plain_error, min_bound)
        print(f"{name}: {error:.1e}, plain float32 {plain_error:.1e}, allowed {bound:.1e}")
        if not error <= bound:  # NaN is an error
            excessive[name] = f"{error:.1e} > {bound:.1e}"
    return excessive


def check_tolerance(
    segments: Sequence[Segment], device: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Assert that the results of trees are within a relative tolerance of float64."""
    inputs = [x.to(dtype) for x in make_inputs(token_count(segments), device)]
    by_path = partial(attend_by_path, segments=segments)
    exact = results_of(by_path, [x.cpu().double() for x in inputs])
    for result, exact_result in zip(results_of_trees(segments, inputs), exact, strict=True):
        error = float((result - exact_result).norm())
        assert error <= tolerance * max(1.0, float(exact_result.norm()))


@pytest.mark.parametrize("name", FORESTS)
def test_trees_attend_as_their_sequences(name: str) -> None:
    segments = FORESTS[name]
    inputs = make_inputs(token_count(segments))
    assert not excessive_errors(results_of_trees(segments, inputs), segments, inputs)


@pytest.mark.parametrize("name", FORESTS)
def test_a_small_error_exceeds_the_bound(name: str) -> None:
    segments = FORESTS[name]
    inputs = make_inputs(token_count(segments))
    results = dict(zip(RESULT_NAMES, results_of_trees(segments, inputs), strict=True))
    for changed, tensor in results.items():
        if name == "a lone token" and changed in ("q", "k"):
            continue  # these gradients are 0
        with_error = results | {changed: tensor * (1 + 1e-4)}
        assert list(excessive_errors(list(with_error.values()), segments, inputs)) == [changed]


@pytest.mark.parametrize("name", FORESTS)
def test_a_dropped_value_exceeds_the_bound(name: str) -> None:
    segments = FORESTS[name]
    q, k, v = make_inputs(token_count(segments))
    without_last = v.clone()
    without_last[-1] = 0
    results = results_of_trees(segments, [q, k, without_last])
    assert "out" in excessive_errors(results, segments, [q, k, v])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_trees_attend_as_their_sequences_on_a_gpu(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    check_tolerance(FORESTS[name], "cuda", dtype, tolerance)


def test_bfloat16_is_summed_in_float32() -> None:
    check_tolerance(FORESTS["four levels and a neighbour"], "cpu", torch.bfloat16, 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_on_a_gpu_has_the_shapes_of_its_inputs(dtype: torch.dtype) -> None:
    q = torch.empty(2, HEADS, 5, DIM, dtype=dtype, device="meta")
    k = torch.empty(2, KV_HEADS, 5, DIM, dtype=dtype, device="meta")
    out, lse = attend(q, k, k, causal=True, scale=1.0)
    assert out.shape == q.shape
    assert lse.shape == (2, HEADS, 5)
    gradients = attend_backward(out, q, k, k, out, lse, causal=True, scale=1.0)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("tokens", [31, 32, 64])
def test_the_kernel_of_a_gpu_gets_contiguous_log_sum_exps(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    strides = []
    q = torch.empty(1, HEADS, tokens, DIM, device="meta")
    k = torch.empty(1, KV_HEADS, tokens, DIM, device="meta")

    def record_stride(*arguments: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        log_sum_exps = arguments[6]
        strides.append(log_sum_exps.stride(-1))
        return q, k, k, None

    operators = SimpleNamespace(_scaled_dot_product_efficient_attention_backward=record_stride)
    monkeypatch.setattr(block_attention, "_aten", operators)
    lse = torch.empty(tokens, HEADS, device="meta").t()[None]  # as `BlockAttention` stores them
    attend_backward(q, q, k, k, q, lse, causal=False, scale=1.0)
    assert strides == [1]


class FakeDotProductAttention(torch.nn.Module):
    """Replacement for Transformer Engine's `DotProductAttention` of packed sequences.

    Attributes:
        created: arguments of the constructor, of each instance.
    """

    created: ClassVar[list[dict[str, object]]] = []

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.created.append(options)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        starts = options["cu_seqlens_q"]
        assert starts.dtype == torch.int32
        assert torch.equal(starts, options["cu_seqlens_kv"])
        lengths = starts.diff().tolist()
        assert options["qkv_format"] == "thd"
        assert options["attn_mask_type"] == "padding_causal"
        assert options["max_seqlen_q"] == options["max_seqlen_kv"] == max(lengths)
        segments = [Segment(tokens=length) for length in lengths]
        return attend_by_path(query, key, value, segments).flatten(1)


def test_transformer_engine_attends_where_nothing_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytorch = SimpleNamespace(DotProductAttention=FakeDotProductAttention)
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace(pytorch=None))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    tree_attention = TreeAttention(CONFIG, 1, None, None)
    te_attention = TreeAttention(CONFIG, 1, None, None, uses_te_kernel=True)
    for segments in (
        [Segment(tokens=3), Segment(tokens=70), Segment(tokens=1)],
        FORESTS["ragged replies"],  # shared, so not computed by Transformer Engine
        [Segment(tokens=9)],
    ):
        layout = PackedTrees.of(segments)
        q, k, v = (x[:, None] for x in make_inputs(token_count(segments)))
        expected = tree_attention(q, k, v, None, packed_seq_params=layout)
        out = te_attention(q, k, v, None, packed_seq_params=layout)
        assert out.shape == expected.shape
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)

        (options,) = FakeDotProductAttention.created  # created by the first call only
        assert options["num_attention_heads"] == HEADS
        assert options["num_gqa_groups"] == KV_HEADS
        assert options["kv_channels"] == DIM
        assert options["softmax_scale"] == DIM**-0.5
        assert options["attention_dropout"] == 0.0
