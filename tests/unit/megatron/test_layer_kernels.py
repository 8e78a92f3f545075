"""Triton's kernels of norms, SwiGLU and queries and keys in its interpreter."""

import math
from functools import partial

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from mcore_mas.megatron.model import layer_ops
from mcore_mas.megatron.model.layer_ops import (
    SWIGLU_BLOCK,
    KernelNorm,
    KernelQueriesAndKeys,
    KernelSumAndNorm,
    swiglu,
    write_norm,
    write_swiglu,
)
from tests.support.operators import assert_near, output_and_gradients

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="needs TRITON_INTERPRET=1, which tests/conftest.py sets on a machine without a GPU",
)

# The interpreter truncates to bfloat16, with errors of up to 2^-7 of a number.
BF16_TOLERANCE = 2**-7


def norm(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = KernelNorm.apply(x, weight, 1e-6)
    return out


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the norm in float64."""
    return rms_norm(x.double(), weight.shape, weight.double(), 1e-6)


def exact_swiglu(gate_and_up: Tensor) -> Tensor:
    """Compute SwiGLU in float64."""
    gate, up = gate_and_up.double().chunk(2, dim=-1)
    return silu(gate) * up


@interpreted
def test_swiglu_by_hand() -> None:
    # σ(ln 3) = 3/4, so silu(ln 3) = 3/4 ln 3, and its derivative is 3/4 (1 + 1/4 ln 3). silu(0) is
    # 0, and its derivative is 1/2.
    ln3 = math.log(3)
    gate_and_up = torch.tensor([[ln3, 0.0, 2.0, 5.0]])
    out, gradient = output_and_gradients(swiglu, torch.tensor([[1.0, 10.0]]), gate_and_up)
    assert out[0].tolist() == pytest.approx([1.5 * ln3, 0.0])
    assert gradient[0].tolist() == pytest.approx([1.5 * (1 + 0.25 * ln3), 25.0, 0.75 * ln3, 0.0])


@interpreted
@pytest.mark.parametrize("width", [5, SWIGLU_BLOCK, SWIGLU_BLOCK + 6])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, BF16_TOLERANCE)]
)
def test_swiglu_computes_the_results_of_torch(
    width: int, dtype: torch.dtype, tolerance: float
) -> None:
    draw = torch.Generator().manual_seed(width)
    gate_and_up = (3 * torch.randn(3, 1, 2 * width, generator=draw)).to(dtype)
    grad_out = torch.randn(3, 1, width, generator=draw).to(dtype)
    results = output_and_gradients(swiglu, grad_out, gate_and_up)
    expected = output_and_gradients(exact_swiglu, grad_out, gate_and_up)
    assert all(result.dtype == dtype for result in results)
    assert_near(results, expected, tolerance)


NORM_INPUT = torch.tensor([[1.0, 7.0], [-1.0, -7.0]])
NORM_GRAD_OUT = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


def norm_by_hand(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of the norm of `NORM_INPUT`, and the gradient of its input."""
    out, grad_x = output_and_gradients(
        lambda x: KernelNorm.apply(x, weight, 1e-12), NORM_GRAD_OUT, NORM_INPUT
    )
    return out, grad_x


@interpreted
def test_a_norm_by_hand() -> None:
    # The mean of 1 and 49 is 25, so the rows are ±(1, 7) / 5 times the weight (10, 100). The
    # gradient of the weight is Σ g · (1, 7) / 5, over both rows. The first row's gradient is
    # (w g − n mean(w g n)) / 5 = ((10, 0) − (0.2, 1.4) · 1) / 5.
    weight = torch.nn.Parameter(torch.tensor([10.0, 100.0]))
    out, grad_x = norm_by_hand(weight)
    assert out.flatten().tolist() == pytest.approx([2.0, 140.0, -2.0, -140.0])
    assert grad_x[0].tolist() == pytest.approx([1.96, -0.28])
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([0.2, -1.4])


@interpreted
def test_a_norm_adds_the_gradient_of_its_weight_to_megatrons_buffer() -> None:
    weight = torch.nn.Parameter(torch.tensor([10.0, 100.0]))
    weight.main_grad = torch.ones(2)  # type: ignore[attr-defined]  # of an earlier micro-batch
    norm_by_hand(weight)
    assert weight.main_grad.tolist() == pytest.approx([1.2, -0.4])  # type: ignore[attr-defined]
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]  # Megatron adds nothing


@interpreted
def test_a_frozen_norm_has_the_same_gradient_of_its_input() -> None:
    trained = torch.nn.Parameter(torch.tensor([10.0, 100.0]))
    frozen = torch.nn.Parameter(torch.tensor([10.0, 100.0]), requires_grad=False)
    assert torch.equal(norm_by_hand(frozen)[1], norm_by_hand(trained)[1])
    assert frozen.grad is None


@interpreted
@pytest.mark.parametrize(("tokens", "heads", "width"), [(7, 1, 5), (3, 2, 2100), (67, 3, 128)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, BF16_TOLERANCE)]
)
def test_a_norm_computes_the_results_of_torch(
    tokens: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With this number, the gradient of the last case has three programs for 13 blocks of rows.
    monkeypatch.setattr(layer_ops, "_MAX_GRADIENT_WARPS", 12)
    draw = torch.Generator().manual_seed(width)
    queries_keys_values = torch.randn(tokens, 1, heads, 3 * width, generator=draw).to(dtype)
    grad_out = torch.randn(tokens, 1, heads, width, generator=draw).to(dtype)
    weight = (1 + torch.rand(width, generator=draw)).to(dtype)

    def keys(x: Tensor) -> Tensor:
        """Return a view whose rows are not contiguous, as keys lie between queries and values."""
        return x[..., width : 2 * width]

    results = output_and_gradients(
        lambda x, weight: norm(keys(x), weight), grad_out, queries_keys_values, weight
    )
    expected = output_and_gradients(
        lambda x, weight: exact_norm(keys(x), weight), grad_out, queries_keys_values, weight
    )
    assert all(result.dtype == dtype for result in results)
    assert_near(results, expected, tolerance)


@interpreted
@pytest.mark.parametrize("width", [5, 2100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, BF16_TOLERANCE)]
)
def test_a_sum_and_its_norm_are_those_of_torch(
    width: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is read by the norm and by others, whose gradients the kernel adds."""
    monkeypatch.setattr(layer_ops, "_MAX_GRADIENT_WARPS", 12)
    draw = torch.Generator().manual_seed(width)
    x, residual = torch.randn(2, 67, 1, width, generator=draw).to(dtype)
    grad_total, grad_normed = torch.randn(2, 67, 1, width, generator=draw).to(dtype)
    weight = (1 + torch.rand(width, generator=draw)).to(dtype)
    grad_out = torch.cat([grad_total, grad_normed])

    def sum_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(KernelSumAndNorm.apply(x, residual, weight, 1e-6))

    def exact_sum_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        total = x.double() + residual.double()
        return torch.cat([total, exact_norm(total, weight)])

    results = output_and_gradients(sum_and_norm, grad_out, x, residual, weight)
    expected = output_and_gradients(exact_sum_and_norm, grad_out, x, residual, weight)
    assert all(result.dtype == dtype for result in results)
    assert_near(results, expected, 2 * tolerance)

    # The bits are those of the norm of the sum.
    total, normed = results[0].split(67)
    assert torch.equal(normed, norm(total, weight))


@interpreted
def test_a_sum_without_a_reader_has_the_gradient_of_its_norm() -> None:
    # As in `test_a_norm_by_hand`: (1, 7) = (1, 2) + (0, 5)
    weight = torch.tensor([10.0, 100.0])
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    total, normed = KernelSumAndNorm.apply(x, torch.tensor([[0.0, 5.0]]), weight, 1e-12)
    assert total.tolist() == [[1.0, 7.0]]
    normed[:, 0].sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == pytest.approx([1.96, -0.28])


@interpreted
def test_freed_outputs_are_filled_with_the_same_bits() -> None:
    x = torch.randn(3, 1, 10)
    scale = torch.rand(3, 1)
    weight = torch.rand(10)
    normed = norm(x, weight)
    mixed = swiglu(x, scale)
    written_norm = torch.full_like(normed, 9.0)
    written_mixed = torch.full_like(mixed, 9.0)
    write_norm(written_norm.flatten(0, -2), x.flatten(0, -2), weight, 1e-6)
    write_swiglu(written_mixed, x, scale)
    assert torch.equal(written_norm, normed)
    assert torch.equal(written_mixed, mixed)


@interpreted
def test_a_quarter_turn_by_hand() -> None:
    packed = torch.tensor([1.0, 2.0, 3.0, 4.0] * 2 + [5.0, 6.0, 7.0, 8.0]).view(1, 1, 12)
    packed.requires_grad_()
    angles = torch.tensor([0.0, math.pi / 2, 0.0, math.pi / 2]).view(1, 1, 1, 4)
    query, key, value = KernelQueriesAndKeys.apply(packed, None, None, angles, (1, 1, 4), 1e-6)
    # The pair (1, 3) stays. The pair (2, 4) becomes (-4, 2), and (4, -2) in the backward pass.
    assert query.flatten().tolist() == pytest.approx([1.0, -4.0, 3.0, 2.0])
    assert key.flatten().tolist() == pytest.approx([1.0, -4.0, 3.0, 2.0])
    assert value.flatten().tolist() == [5.0, 6.0, 7.0, 8.0]
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    ((query + 10 * key + 100 * value).flatten() * x).sum().backward()
    assert packed.grad is not None
    turned_back = [1.0, 4.0, 3.0, -2.0]
    expected = [
        factor * y for factor, numbers in ((1, turned_back), (10, turned_back)) for y in numbers
    ]
    assert packed.grad.flatten().tolist() == pytest.approx([*expected, 100.0, 200.0, 300.0, 400.0])


def queries_keys_values(
    packed: Tensor, *weights: Tensor, angles: Tensor, heads: tuple[int, int, int]
) -> Tensor:
    """Return queries, keys and values [T, heads, d] with torch, in the type of `packed`."""
    group, kv_heads, dim = heads
    parts = packed.view(len(packed), kv_heads, group + 2, dim).split([group, 1, 1], dim=2)
    queries, keys, values = (part.flatten(1, 2) for part in parts)
    if weights:
        queries, keys = (
            rms_norm(x, weight.shape, weight, 1e-6)
            for x, weight in zip((queries, keys), weights, strict=True)
        )
    turned = [
        _apply_rotary_pos_emb_bshd(x[:, None], angles.to(x.dtype))[:, 0] for x in (queries, keys)
    ]
    return torch.cat([*turned, values], dim=1)


def fused_queries_keys_values(
    packed: Tensor, *weights: Tensor, angles: Tensor, heads: tuple[int, int, int]
) -> Tensor:
    """Return the same with the kernel."""
    norms = weights or (None, None)
    results = KernelQueriesAndKeys.apply(packed, *norms, angles, heads, 1e-6)
    return torch.cat([x[:, 0] for x in results], dim=1)


@interpreted
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("heads", [(1, 1, 2), (7, 2, 24), (4, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_those_of_torch(
    with_norms: bool,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bound the errors, relative to float64, by four times those of torch in float32."""
    monkeypatch.setattr(layer_ops, "_MAX_GRADIENT_WARPS", 48)  # three programs for seven tokens
    group, kv_heads, dim = heads
    tokens = 7
    draw = torch.Generator().manual_seed(dim)
    packed = torch.randn(tokens, 1, kv_heads * (group + 2) * dim, generator=draw).to(dtype)
    grad_out = torch.randn(tokens, kv_heads * (group + 2), dim, generator=draw).to(dtype)
    weights = [(1 + torch.rand(dim, generator=draw)).to(dtype) for _ in range(2 * with_norms)]
    frequencies = 10_000 ** -torch.linspace(0, 1, dim // 2)
    half_angles = torch.arange(tokens)[:, None] * frequencies
    angles = torch.cat([half_angles, half_angles], dim=1).view(tokens, 1, 1, dim)

    fused = partial(fused_queries_keys_values, angles=angles, heads=heads)
    with_torch = partial(queries_keys_values, angles=angles, heads=heads)
    inputs = [packed, *weights]
    results = output_and_gradients(fused, grad_out, *inputs)
    in_float32 = output_and_gradients(with_torch, grad_out.float(), *(x.float() for x in inputs))
    exact = output_and_gradients(with_torch, grad_out.double(), *(x.double() for x in inputs))
    assert all(result.dtype == dtype for result in results)
    # The interpreter truncates to bfloat16.
    rounding = 2**-24 if dtype == torch.float32 else BF16_TOLERANCE
    for result, float32_result, expected in zip(results, in_float32, exact, strict=True):
        error_of_float32 = float((float32_result - expected).abs().max())
        allowed = 4 * error_of_float32 + rounding * float(expected.abs().max())
        assert float((result - expected).abs().max()) <= allowed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_swiglu_on_a_gpu() -> None:
    draw = torch.Generator().manual_seed(0)
    gate_and_up = torch.randn(300, 1, 2 * 9728, generator=draw)
    grad_out = torch.randn(300, 1, 9728, generator=draw)
    results = output_and_gradients(swiglu, grad_out.cuda(), gate_and_up.cuda())
    assert_near(results, output_and_gradients(exact_swiglu, grad_out, gate_and_up), 2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_norm_on_a_gpu() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, 9728, generator=draw)
    grad_out = torch.randn(300, 1, 9728, generator=draw)
    weight = torch.rand(9728, generator=draw)
    results = output_and_gradients(norm, grad_out.cuda(), x.cuda(), weight.cuda())
    assert_near(results, output_and_gradients(exact_norm, grad_out, x, weight), 2e-6)
