"""Norm, SwiGLU, rotation and exponentials on a CPU: by hand, and against torch and Megatron in float64."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from mcore_mas.megatron.batch import Segment
from mcore_mas.megatron.model import attention
from mcore_mas.megatron.model.attention import ContextAttention, TreeAttention
from mcore_mas.megatron.model.cpu_ops import CPUNorm, CPUSwiGLU, exponential, rotate_on_cpu
from mcore_mas.megatron.model.layout import PackedTrees
from tests.support.operators import output_and_gradients
from tests.support.precision import assert_close, relative

EPS = 1e-6


def norm(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = CPUNorm.apply(x, weight, EPS)
    return out


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def swiglu(gate_and_up: Tensor) -> Tensor:
    out: Tensor = CPUSwiGLU.apply(gate_and_up)
    return out


def torch_swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def cos_and_sin(angles: Tensor) -> Tensor:
    """Return the cosines and sines that `rotate_on_cpu` takes, of angles given twice."""
    half = angles[..., : angles.shape[-1] // 2]
    return torch.cat([half.cos(), half.cos(), -half.sin(), half.sin()], -1)


def in_float64(
    compute: Callable[..., Tensor], grad_out: Tensor, *inputs: Tensor
) -> Sequence[Tensor]:
    """Return the output and the gradients, computed in float64."""
    return output_and_gradients(compute, grad_out.double(), *(x.double() for x in inputs))


def test_a_norm_by_hand() -> None:
    # The mean square of (1, 7) is 25, so the output is (0.2, 1.4) times the weight (10, 100).
    x = torch.tensor([[1.0, 7.0]])
    weight = torch.tensor([10.0, 100.0])
    out, grad_x, grad_weight = output_and_gradients(
        lambda x, weight: CPUNorm.apply(x, weight, 0.0), torch.tensor([[1.0, 0.0]]), x, weight
    )
    assert out[0].tolist() == pytest.approx([2.0, 140.0])
    assert grad_weight.tolist() == pytest.approx([0.2, 0.0])
    # (w g − n mean(w g n)) / 5 with w g = (10, 0), n = (0.2, 1.4) and mean(w g n) = 1
    assert grad_x[0].tolist() == pytest.approx([(10 - 0.2) / 5, -1.4 / 5])


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_a_norm_is_as_exact_as_torch(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x = scale * torch.randn(37, 1, 4, 48, generator=draw)
    grad_out = torch.randn(37, 1, 4, 48, generator=draw)
    weight = 1 + torch.randn(48, generator=draw)
    results = output_and_gradients(norm, grad_out, x, weight)
    torch_results = output_and_gradients(torch_norm, grad_out, x, weight)
    exact = in_float64(torch_norm, grad_out, x, weight)
    for result, torch_result, exact_result in zip(results, torch_results, exact, strict=True):
        assert_close(result, torch_result, exact_result)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_a_norm_in_bfloat16_is_as_exact_as_torch(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(37, 1, 4, 48, generator=draw)).bfloat16()
    grad_out = torch.randn(37, 1, 4, 48, generator=draw).bfloat16()
    weight = (1 + torch.randn(48, generator=draw)).bfloat16()
    results = output_and_gradients(norm, grad_out, x, weight)
    torch_results = output_and_gradients(torch_norm, grad_out, x, weight)
    exact = in_float64(torch_norm, grad_out, x, weight)
    for result, torch_result, exact_result in zip(results, torch_results, exact, strict=True):
        assert result.dtype == torch.bfloat16
        # torch rounds once more on the way.
        bound = max(1.1 * relative(torch_result, exact_result), 2**-9)
        assert relative(result, exact_result) <= bound


def test_the_gradient_of_a_norms_weight_is_summed_pairwise() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(16_384, 32, generator=draw)
    grad_out = torch.rand(16_384, 32, generator=draw)
    weight = torch.ones(32)
    _, _, grad_weight = output_and_gradients(norm, grad_out, x, weight)
    _, _, exact = in_float64(torch_norm, grad_out, x, weight)
    # All terms are positive. Added token by token, the sum would have an error of 4e-6.
    assert relative(grad_weight, exact) < 5e-7


def test_swiglu_by_hand() -> None:
    # silu(ln 3) = 3/4 ln 3, and its derivative is 3/4 + 3/16 ln 3.
    ln3 = math.log(3)
    gate_and_up = torch.tensor([[ln3, 0.0, 2.0, 5.0]])
    out, gradient = output_and_gradients(swiglu, torch.tensor([[1.0, 10.0]]), gate_and_up)
    assert out[0].tolist() == pytest.approx([2 * ln3 * 0.75, 0.0])
    expected = [2 * (0.75 + ln3 * 3 / 16), 10 * 5 * 0.5, ln3 * 0.75, 0.0]
    assert gradient[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    gate_and_up = torch.randn(37, 1, 96, generator=draw).to(dtype)
    grad_out = torch.randn(37, 1, 48, generator=draw).to(dtype)
    results = output_and_gradients(swiglu, grad_out, gate_and_up)
    expected = output_and_gradients(torch_swiglu, grad_out, gate_and_up)
    assert [result.dtype for result in results] == [dtype, dtype]
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("exact", [False, True])
def test_exponentials_have_small_errors(exact: bool) -> None:
    x = torch.cat([torch.tensor([0.0, -math.log(2), 1.0, -1e30]), -60 * torch.rand(4093)])
    result = exponential(x, exact)
    assert result[:4].tolist() == pytest.approx([1.0, 0.5, math.e, 0.0], rel=1e-6)
    expected = x.double().exp()
    assert ((result - expected).abs() <= expected * (6e-8 + 8e-8 * x.abs())).all()


@pytest.mark.parametrize(("first", "size"), [(0, 1), (5, 3), (17, 31), (1000, 3001)])
def test_an_exact_exponential_does_not_depend_on_its_neighbours(first: int, size: int) -> None:
    x = -60 * torch.rand(4097)
    part = slice(first, first + size)
    assert torch.equal(exponential(x[part], exact=True), exponential(x, exact=True)[part])


def test_a_quarter_turn_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    angles = torch.tensor([math.pi / 2, 0.0, math.pi / 2, 0.0]).view(1, 1, 1, 4)
    out, gradient = output_and_gradients(lambda x: rotate_on_cpu(x, cos_and_sin(angles)), x, x)
    # The pair (1, 3) becomes (-3, 1), and (3, -1) in the backward pass.
    assert out.flatten().tolist() == pytest.approx([-3.0, 2.0, 1.0, 4.0])
    assert gradient.flatten().tolist() == pytest.approx([3.0, 2.0, -1.0, 4.0])


def rotation_tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Return a random x, the gradient of its rotated inner heads, and angles."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(29, 1, 6, 32, generator=draw)
    grad_out = torch.randn(29, 1, 6, 32, generator=draw)[:, :, 1:-1]
    angles = (100 * torch.randn(29, 1, 1, 16, generator=draw)).repeat(1, 1, 1, 2)
    return x, grad_out, angles


def rotation_of_inner_heads(angles: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: rotate_on_cpu(x[:, :, 1:-1], cos_and_sin(angles))


def megatrons_rotation_of_inner_heads(angles: Tensor) -> Callable[[Tensor], Tensor]:
    def rotate(x: Tensor) -> Tensor:
        rotated: Tensor = _apply_rotary_pos_emb_bshd(x[:, :, 1:-1], angles.to(x.dtype))
        return rotated

    return rotate


def test_a_rotation_is_as_exact_as_megatrons() -> None:
    x, grad_out, angles = rotation_tensors()
    megatrons_rotation = megatrons_rotation_of_inner_heads(angles)
    results = output_and_gradients(rotation_of_inner_heads(angles), grad_out, x)
    megatrons_results = output_and_gradients(megatrons_rotation, grad_out, x)
    exact = in_float64(megatrons_rotation, grad_out, x)
    for result, megatrons_result, exact_result in zip(
        results, megatrons_results, exact, strict=True
    ):
        assert_close(result, megatrons_result, exact_result)


def test_a_rotation_of_bfloat16_is_float32_and_rounds_only_the_gradient() -> None:
    x, grad_out, angles = rotation_tensors()
    x = x.bfloat16()
    out, gradient = output_and_gradients(rotation_of_inner_heads(angles), grad_out, x)
    exact = in_float64(megatrons_rotation_of_inner_heads(angles), grad_out, x)
    exact_out, exact_gradient = exact
    assert out.dtype == torch.float32
    assert relative(out, exact_out) < 1e-6
    assert gradient.dtype == torch.bfloat16
    assert relative(gradient, exact_gradient) < 2**-8


def attention_config(**settings: int) -> Any:
    return SimpleNamespace(kv_channels=16, deterministic_mode=False, **settings)


def test_context_parallel_attention_returns_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(attention.parallel_state, "get_context_parallel_group", lambda: one_rank)
    monkeypatch.setattr(attention, "all_to_all", lambda group, parts: parts)
    config = attention_config(
        num_query_groups=2, tensor_model_parallel_size=1, context_parallel_size=1
    )
    layout = PackedTrees.of([Segment(tokens=9)])
    draw = torch.Generator().manual_seed(0)
    # Rotated queries and keys are float32.
    q, k, v = (torch.randn(9, 1, heads, 16, generator=draw) for heads in (4, 2, 2))
    expected = TreeAttention(config, 1, None, "self")(q, k, v.bfloat16(), packed_seq_params=layout)
    out = ContextAttention(config, 1, None, "self")(q, k, v.bfloat16(), packed_seq_params=layout)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)


def test_attention_of_bfloat16_is_float32_rounded_once() -> None:
    draw = torch.Generator().manual_seed(0)
    layout = PackedTrees.of(
        [Segment(tokens=24), Segment(tokens=16, parent=0), Segment(tokens=17, parent=0)]
    )
    inputs = [torch.randn(57, 1, heads, 16, generator=draw).bfloat16() for heads in (4, 2, 2)]
    grad_out = torch.randn(57, 1, 64, generator=draw).bfloat16()
    tree_attention = TreeAttention(attention_config(), 1, None, "self")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = tree_attention(q, k, v, packed_seq_params=layout)
        return out

    results = output_and_gradients(attend, grad_out, *inputs)
    in_float32 = output_and_gradients(attend, grad_out.float(), *(x.float() for x in inputs))
    assert results[0].dtype == torch.bfloat16
    for result, float32_result in zip(results, in_float32, strict=True):
        assert torch.equal(result, float32_result.bfloat16())
