"""Norms, SwiGLU and the rotation as Triton kernels: in its interpreter, and compiled for an H200 without a GPU."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from mcore_mas.megatron.model import layer_ops
from mcore_mas.megatron.model.layer_ops import LAYER_BLOCK, KernelNorm, rotated, swiglu

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="needs TRITON_INTERPRET=1, as tests/conftest.py has it without a GPU",
)


def results(compute: object, x: Tensor, slope: Tensor) -> list[Tensor]:
    """The output, and the gradient of x of its inner product with `slope`."""
    leaf = x.detach().clone().requires_grad_()
    out = compute(leaf)  # type: ignore[operator]
    out.backward(slope.to(out.dtype))
    assert leaf.grad is not None
    return [out.detach(), leaf.grad]


@interpreted
def test_swiglu_by_hand() -> None:
    # σ(ln 3) = 3/4, so silu(ln 3) = 3/4 ln 3 and its slope 3/4 (1 + 1/4 ln 3); silu(0) = 0 with slope 1/2
    ln3 = math.log(3)
    out, of_wide = results(
        swiglu, torch.tensor([[ln3, 0.0, 2.0, 5.0]]), torch.tensor([[1.0, 10.0]])
    )
    assert out[0].tolist() == pytest.approx([1.5 * ln3, 0.0])
    assert of_wide[0].tolist() == pytest.approx([1.5 * (1 + 0.25 * ln3), 25.0, 0.75 * ln3, 0.0])


@interpreted
@pytest.mark.parametrize("width", [5, LAYER_BLOCK, LAYER_BLOCK + 6])
def test_swiglu_is_torchs(width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    x, slope = (
        3 * torch.randn(3, 1, 2 * width, generator=draw),
        torch.randn(3, 1, width, generator=draw),
    )

    def exact(x: Tensor) -> Tensor:
        gate, up = x.double().chunk(2, dim=-1)
        return silu(gate) * up

    for mine, theirs in zip(results(swiglu, x, slope), results(exact, x, slope), strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-6 * float(theirs.abs().max())
    half = results(swiglu, x.bfloat16(), slope.bfloat16())
    for mine, theirs in zip(half, results(exact, x.bfloat16(), slope.bfloat16()), strict=True):
        assert (
            mine.dtype == torch.bfloat16
        )  # the interpreter truncates: 2^-7 of each number at most, read or written
        assert float((mine - theirs).abs().max()) <= 2**-7 * float(theirs.abs().max())


@interpreted
def test_a_norm_by_hand() -> None:
    # mean(1, 49) = 25: (1, 7) / 5 by weights (10, 100). The weight gets Σ slope · (1, 7) / 5, of both rows alike; of x
    # only what is across it: (w dy − n mean(w dy n)) / 5 = ((10, 0) − (0.2, 1.4) · 1) / 5
    weight = torch.nn.Parameter(torch.tensor([10.0, 100.0]))
    x, slope = torch.tensor([[1.0, 7.0], [-1.0, -7.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    out, of_x = results(lambda x: KernelNorm.apply(x, weight, 1e-12), x, slope)
    assert out.flatten().tolist() == pytest.approx([2.0, 140.0, -2.0, -140.0])
    assert of_x[0].tolist() == pytest.approx([1.96, -0.28])
    assert weight.grad.tolist() == pytest.approx([0.2, -1.4])  # type: ignore[union-attr]
    weight.main_grad, weight.grad = torch.ones(2), None  # type: ignore[attr-defined]  # of a micro-batch before
    results(lambda x: KernelNorm.apply(x, weight, 1e-12), x, slope)
    assert weight.main_grad.tolist() == pytest.approx([1.2, -0.4])  # type: ignore[attr-defined]
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]  # Megatron adds nothing more
    weight.requires_grad_(False).grad = None
    assert (
        torch.equal(results(lambda x: KernelNorm.apply(x, weight, 1e-12), x, slope)[1], of_x)
        and weight.grad is None
    )


@interpreted
@pytest.mark.parametrize(("tokens", "heads", "width"), [(7, 1, 5), (3, 2, 2100), (67, 3, 128)])
def test_a_norm_is_torchs(
    tokens: int, heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        layer_ops, "_NORM_WARPS", 12
    )  # three programs, which have 13 blocks of 16 rows of 128
    draw = torch.Generator().manual_seed(width)
    wide, slope = (
        torch.randn(tokens, 1, heads, 3 * width, generator=draw),
        torch.randn(tokens, 1, heads, width),
    )
    drawn = 1 + torch.rand(width, generator=draw)
    for dtype, off in (
        (torch.float32, 2e-6),
        (torch.bfloat16, 2**-7),
    ):  # the interpreter truncates to bfloat16
        found = []
        for one in (dtype, torch.float64):
            weight = torch.nn.Parameter(drawn.to(dtype).to(one))

            def norm(wide: Tensor, weight: Tensor = weight) -> Tensor:
                x = wide[..., width : 2 * width]  # as keys lie between queries and values
                double = x.dtype == torch.float64
                return (
                    rms_norm(x, (width,), weight, 1e-6)
                    if double
                    else KernelNorm.apply(x, weight, 1e-6)
                )

            found.append([*results(norm, wide.to(dtype).to(one), slope.to(dtype)), weight.grad])
        for mine, theirs in zip(*found, strict=True):
            assert mine is not None and mine.dtype == dtype
            assert float((mine - theirs).abs().max()) <= off * float(theirs.abs().max())


@interpreted
def test_a_quarter_turn_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    angles = torch.tensor([0.0, math.pi / 2, 0.0, math.pi / 2]).view(1, 1, 1, 4)
    # the pairs are (1, 3), which stays, and (2, 4), which becomes (-4, 2); backwards (2, 4) becomes (4, -2)
    out, of_x = results(lambda x: rotated(x, angles), x, x)
    assert out.flatten().tolist() == pytest.approx([1.0, -4.0, 3.0, 2.0])
    assert of_x.flatten().tolist() == pytest.approx([1.0, 4.0, 3.0, -2.0])


@interpreted
@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (5, 24), (8, 64)])
def test_a_rotation_is_megatrons(heads: int, dim: int) -> None:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    draw = torch.Generator().manual_seed(dim)
    tokens = 7
    qkv, slope = (
        torch.randn(tokens, 1, heads + 2, dim, generator=draw),
        torch.randn(tokens, 1, heads, dim),
    )
    part = qkv[:, :, 1:-1]  # strides as where keys lie between queries and values
    angles = torch.arange(tokens)[:, None] * 10_000 ** -torch.linspace(0, 1, dim // 2)
    angles = torch.cat([angles, angles], dim=1).view(tokens, 1, 1, dim)
    found = [
        part.detach() for part in results(lambda x: rotated(x[:, :, 1:-1], angles), qkv, slope)
    ]
    want = results(lambda x: _apply_rotary_pos_emb_bshd(x.double(), angles.double()), part, slope)
    assert float((found[0] - want[0]).abs().max()) <= 2e-6
    assert float((found[1][:, :, 1:-1] - want[1]).abs().max()) <= 2e-6
    assert not found[1][:, :, 0].any() and not found[1][:, :, -1].any()


@pytest.mark.slow
def test_they_compile_for_an_h200_without_spills() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = (
        "import json; from tests.support.sm90 import layer_kernels, norm_kernels\n"
        "print(json.dumps([layer_kernels(), *map(norm_kernels, (128, 2560, 5120))]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, *norms = json.loads(done.stdout.splitlines()[-1])
    assert [kernel["spilled"] for kernel in sum(norms, found)] == [0] * (4 + 3 * 4)
    assert (
        max(kernel["registers"] for kernel in found) <= 64
    )  # eight programs of 128 threads at a time
    for forward, gradient, *_ in norms:
        # 1536 threads of a multiprocessor, and of the gradient 512: all that there are of it on an H200
        assert forward["registers"] <= 40 and gradient["registers"] <= 128


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_they_compute_the_same_on_a_gpu() -> None:
    draw = torch.Generator().manual_seed(0)
    x, slope = (
        torch.randn(300, 1, 2 * 9728, generator=draw),
        torch.randn(300, 1, 9728, generator=draw),
    )
    want = results(lambda x: silu(x[..., :9728]) * x[..., 9728:], x.double(), slope)
    for mine, theirs in zip(results(swiglu, x.cuda(), slope.cuda()), want, strict=True):
        assert float((mine.cpu() - theirs).abs().max()) <= 2e-6 * float(theirs.abs().max())
    weight = torch.rand(9728, generator=draw)
    want = results(
        lambda x: rms_norm(x, weight.shape, weight.double(), 1e-6), slope.double(), slope
    )
    got = results(lambda x: KernelNorm.apply(x, weight.cuda(), 1e-6), slope.cuda(), slope.cuda())
    for mine, theirs in zip(got, want, strict=True):
        assert float((mine.cpu() - theirs).abs().max()) <= 2e-6 * float(theirs.abs().max())
