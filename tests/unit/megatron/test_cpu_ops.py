"""Norm, rotation and attention on a CPU, by hand and against Megatron's and torch's in float64."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from mcore_mas.megatron.batch import Segment
from mcore_mas.megatron.model import attention
from mcore_mas.megatron.model.attention import TreeAttention
from mcore_mas.megatron.model.cpu_ops import CPUNorm, CPUSwiGLU, exponential, rotate_on_cpu
from mcore_mas.megatron.model.layout import PackedTrees
from tests.support.precision import assert_close, relative

Compute = Callable[..., Tensor]
EPS = 1e-6


def results(compute: Compute, slope: Tensor, *given: Tensor) -> list[Tensor]:
    """The output, and the gradients of its inner product with `slope`."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = compute(*leaves)
    out.backward(slope.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return CPUNorm.apply(x, weight, EPS)


def torchs(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def test_norm_by_hand() -> None:
    # of (1, 7) the mean square is 25: without eps (0.2, 1.4), times the weight (10, 100)
    x, weight = torch.tensor([[1.0, 7.0]]), torch.tensor([10.0, 100.0])
    out, of_x, of_weight = results(
        lambda *given: CPUNorm.apply(*given, 0.0), torch.tensor([[1.0, 0.0]]), x, weight
    )
    assert out[0].tolist() == pytest.approx([2.0, 140.0])
    assert of_weight.tolist() == pytest.approx([0.2, 0.0])
    # with s = 10: (s − n₁ · n₁ s / 2) / 5 and −n₂ · n₁ s / 2 / 5
    assert of_x[0].tolist() == pytest.approx([(10 - 0.2 * 1.0) / 5, -1.4 * 1.0 / 5])


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_norm_is_torchs(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x, slope = (torch.randn(37, 1, 4, 48, generator=draw) for _ in range(2))
    x, weight = scale * x, 1 + torch.randn(48, generator=draw)
    exact = results(torchs, slope.double(), x.double(), weight.double())
    for got, own, want in zip(
        results(normed, slope, x, weight), results(torchs, slope, x, weight), exact, strict=True
    ):
        assert_close(got, own, want)
    x, weight, slope = x.bfloat16(), weight.bfloat16(), slope.bfloat16()
    exact = results(torchs, slope.double(), x.double(), weight.double())
    for got, own, want in zip(
        results(normed, slope, x, weight), results(torchs, slope, x, weight), exact, strict=True
    ):
        assert got.dtype == torch.bfloat16
        assert relative(got, want) <= max(
            1.1 * relative(own, want), 2**-9
        )  # torch's rounds once more on the way


def test_the_weights_gradient_of_many_tokens_is_summed_in_pairs() -> None:
    draw = torch.Generator().manual_seed(0)
    x, slope, weight = (
        torch.rand(16_384, 32, generator=draw),
        torch.rand(16_384, 32, generator=draw),
        torch.ones(32),
    )
    got = results(normed, slope, x, weight)[
        2
    ]  # all of one sign: added token by token it is 4e-6 off
    assert relative(got, results(torchs, slope.double(), x.double(), weight.double())[2]) < 5e-7


def gated(wide: Tensor) -> Tensor:
    return CPUSwiGLU.apply(wide)


def torchs_gated(wide: Tensor) -> Tensor:
    gate, up = wide.chunk(2, dim=-1)
    return F.silu(gate) * up


def test_swiglu_by_hand() -> None:
    # silu(ln 3) = ln 3 · 3/4, whose slope is 3/4 + ln 3 · 3/16
    wide = torch.tensor([[math.log(3), 0.0, 2.0, 5.0]])
    out, of_wide = results(gated, torch.tensor([[1.0, 10.0]]), wide)
    assert out[0].tolist() == pytest.approx([2 * math.log(3) * 0.75, 0.0])
    want = [2 * (0.75 + math.log(3) * 3 / 16), 10 * 5 * 0.5, math.log(3) * 0.75, 0.0]
    assert of_wide[0].tolist() == pytest.approx(want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_torchs_to_the_bit(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    wide, slope = (torch.randn(37, 1, width, generator=draw).to(dtype) for width in (96, 48))
    for got, want in zip(
        results(gated, slope, wide), results(torchs_gated, slope, wide), strict=True
    ):
        assert got.dtype == dtype and torch.equal(got, want)


def test_exponentials_are_near_and_where_they_are_exact_alike_anywhere() -> None:
    x = torch.cat([torch.tensor([0.0, -math.log(2), 1.0, -1e30]), -60 * torch.rand(4093)])
    true = x.double().exp()
    for exact in (False, True):
        found = exponential(x, exact)
        assert found[:4].tolist() == pytest.approx([1.0, 0.5, math.e, 0.0], rel=1e-6)
        assert ((found - true).abs() <= true * (6e-8 + 8e-8 * x.abs())).all()
    for first, size in ((0, 1), (5, 3), (17, 31), (1000, 3001)):  # among others or alone
        assert torch.equal(
            exponential(x[first : first + size], exact=True), found[first : first + size]
        )


def turns(angles: Tensor) -> Tensor:
    half = angles[..., : angles.shape[-1] // 2]
    return torch.cat([half.cos(), half.cos(), -half.sin(), half.sin()], -1)


def test_a_quarter_turn_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    angles = torch.tensor([math.pi / 2, 0.0] * 2).view(1, 1, 1, 4)
    out, of_x = results(lambda x: rotate_on_cpu(x, turns(angles)), x, x)  # (1, 3) becomes (-3, 1)
    assert out.flatten().tolist() == pytest.approx([-3.0, 2.0, 1.0, 4.0])
    assert of_x.flatten().tolist() == pytest.approx([3.0, 2.0, -1.0, 4.0])  # and back


def test_rotation_is_megatrons() -> None:
    draw = torch.Generator().manual_seed(0)
    x, slope = (torch.randn(29, 1, 6, 32, generator=draw) for _ in range(2))
    angles = (100 * torch.randn(29, 1, 1, 16, generator=draw)).repeat(1, 1, 1, 2)

    def megatrons(x: Tensor) -> Tensor:
        return _apply_rotary_pos_emb_bshd(x[:, :, 1:-1], angles.to(x.dtype))

    def ours(x: Tensor) -> Tensor:
        return rotate_on_cpu(x[:, :, 1:-1], turns(angles))

    slope = slope[:, :, 1:-1]
    wants = results(megatrons, slope.double(), x.double())
    for got, own, want in zip(
        results(ours, slope, x), results(megatrons, slope, x), wants, strict=True
    ):
        assert_close(got, own, want)
    half, want = (
        results(ours, slope, x.bfloat16()),
        results(megatrons, slope.double(), x.bfloat16().double()),
    )
    assert [part.dtype for part in half] == [torch.float32, torch.bfloat16]
    assert relative(half[0], want[0]) < 1e-6  # nothing is rounded to bfloat16
    assert relative(half[1], want[1]) < 2**-8  # but the gradient, once


def test_attention_over_context_ranks_gives_back_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention.parallel_state,
        "get_context_parallel_group",
        lambda: SimpleNamespace(size=lambda: 1),
    )
    monkeypatch.setattr(attention, "all_to_all", lambda group, parts: parts)  # of one rank
    sizes = {"num_query_groups": 2, "tensor_model_parallel_size": 1, "context_parallel_size": 1}
    config = SimpleNamespace(kv_channels=16, deterministic_mode=False, **sizes)
    layout, draw = PackedTrees.of([Segment(tokens=9)]), torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(9, 1, heads, 16, generator=draw) for heads in (4, 2, 2)
    )  # turned queries and keys: float32
    kinds = (attention.TreeAttention, attention.ContextAttention)
    one, several = (
        kind(config, 1, None, "self")(q, k, v.bfloat16(), packed_seq_params=layout)
        for kind in kinds
    )
    assert several.dtype == torch.bfloat16 and torch.equal(one, several)


def test_attention_of_bfloat16_is_float32s_rounded_once() -> None:
    draw = torch.Generator().manual_seed(0)
    layout = PackedTrees.of(
        [Segment(tokens=24), Segment(tokens=16, parent=0), Segment(tokens=17, parent=0)]
    )
    q, k, v = (torch.randn(57, 1, heads, 16, generator=draw).bfloat16() for heads in (4, 2, 2))
    slope = torch.randn(57, 1, 64, generator=draw).bfloat16()
    whole_attention = TreeAttention(
        SimpleNamespace(kv_channels=16, deterministic_mode=False), 1, None, "self"
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return whole_attention(q, k, v, packed_seq_params=layout)

    half = results(attend, slope, q, k, v)
    whole = results(attend, slope.float(), q.float(), k.float(), v.float())
    assert half[0].dtype == torch.bfloat16
    assert torch.equal(half[0], whole[0].bfloat16())
    for got, want in zip(half[1:], whole[1:], strict=True):
        assert torch.equal(got, want.bfloat16())
