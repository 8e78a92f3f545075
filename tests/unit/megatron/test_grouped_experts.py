"""A layer's experts as one product: what its kernels compute, in Triton's interpreter, and what all of it comes to."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.gpu.shapes import make_batch
from mcore_mas.megatron.model import experts, head, mlp, norm
from mcore_mas.megatron.model.experts import add_grouped
from mcore_mas.megatron.model.layer_ops import LAYER_BLOCK, swiglu
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.support import ranks, reference
from tests.support.gradients import full_gradients

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="needs TRITON_INTERPRET=1, as tests/conftest.py has it without a GPU",
)


@interpreted
def test_sums_of_products_by_hand() -> None:
    # the first expert has rows 0 and 1, the second none, the third row 2
    left, right = (
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        torch.tensor([[1.0], [10.0], [100.0]]),
    )
    total = torch.full((3, 2, 1), 0.5)
    add_grouped(total, left, right, torch.tensor([2, 2, 3], dtype=torch.int32))
    assert total.flatten().tolist() == [31.5, 42.5, 0.5, 0.5, 500.5, 600.5]


@interpreted
def test_sums_of_products_are_torchs() -> None:
    draw = torch.Generator().manual_seed(0)
    counts = [0, 70, 1, 0, 128, 3]  # tiles are of 128 rows and columns, and 64 tokens
    left, right = (torch.randn(sum(counts), n, generator=draw) for n in (136, 200))
    total = torch.randn(len(counts), 136, 200, generator=draw)
    want = total.double()
    for own, a, b in zip(
        want, left.double().split(counts), right.double().split(counts), strict=True
    ):
        own += a.t() @ b
    add_grouped(total, left, right, torch.tensor(counts).cumsum(0, dtype=torch.int32))
    assert float((total - want).abs().max()) <= 1e-6 * float(want.abs().max())


def test_a_tokens_rows_are_summed_in_float32_and_its_gradient_is_theirs() -> None:
    rows = (
        torch.tensor([[1.0, 2.0], [256.0, 0.0], [1.0, 5.0], [4.0, 4.0]]).bfloat16().requires_grad_()
    )
    tokens, places = torch.tensor([0, 0, 0, 1]), torch.tensor([[1, 0, 2], [3, 3, 3]])
    out = experts._MoveRows.apply(rows, False, tokens, places)
    assert out.tolist() == [[258.0, 7.0], [12.0, 12.0]]  # in bfloat16 256 + 1 is 256
    out.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16())
    assert rows.grad is not None and rows.grad.tolist() == [[1.0, 2.0]] * 3 + [[3.0, 4.0]]


@interpreted
@pytest.mark.parametrize("width", [48, LAYER_BLOCK + 6])
def test_weighed_swiglu_is_torchs(width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    given = [torch.randn(5, 2 * width, generator=draw), torch.rand(5, generator=draw)]
    slope = torch.randn(5, width, generator=draw)

    def results(compute: object, leaves: list[Tensor]) -> list[Tensor]:
        out = compute(*leaves)  # type: ignore[operator]
        return [out.detach(), *torch.autograd.grad(out, leaves, slope.to(out.dtype))]

    def exact(wide: Tensor, scale: Tensor) -> Tensor:
        gate, up = wide.chunk(2, dim=-1)
        return silu(gate) * up * scale[:, None]

    mine = results(swiglu, [x.clone().requires_grad_() for x in given])
    theirs = results(exact, [x.double().requires_grad_() for x in given])
    for one, other in zip(mine, theirs, strict=True):
        assert float((one - other).abs().max()) <= 2e-6 * float(other.abs().max())


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_an_update_by_kernels_is_that_by_expert(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    reference.make_model("qwen3_moe", tmp_path)
    # tokens, of which kernels are interpreted one by one: two prompts with their replies
    batch = make_batch(
        [(24, -1, 0), (12, 0, 12), (9, 0, 9), (1, 0, 1), (20, -1, 20), (6, 4, 6)], vocab=64
    )
    found, launched = [], list[str]()
    for kernels in (False, True):
        if kernels:
            for module in (experts, head, mlp, norm):
                monkeypatch.setattr(module, "use_triton", lambda _: True)
            monkeypatch.setattr(
                experts, "add_grouped", lambda *given: (launched.append(""), add_grouped(*given))
            )
        trainer = MegatronTrainer(ranks.make_spec(str(tmp_path), recompute=recompute))
        scores = trainer.score([batch])[0]
        gradient_norm = trainer.update([batch])["grad_norm"]
        found.append((scores, gradient_norm, dict(full_gradients(trainer))))
        assert len(launched) == 2 * kernels  # of one sparse layer
    (scores, gradient_norm, gradients), (same_scores, same_norm, same_gradients) = found
    assert float((scores - same_scores).abs().max()) <= 1e-5
    assert same_norm == pytest.approx(gradient_norm, rel=1e-5)
    for name, gradient in gradients.items():
        assert float((same_gradients[name] - gradient).norm()) <= 1e-5 * gradient_norm, name


@interpreted
@pytest.mark.parametrize("kernels", [False, True])
def test_a_mixture_that_nobody_holds_is_gone(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    reference.make_model("qwen3_moe", tmp_path)
    monkeypatch.setattr(experts, "use_triton", lambda _: kernels)
    trainer = MegatronTrainer(ranks.make_spec(str(tmp_path)))
    trainer.update([make_batch([(3, -1, 3)], vocab=64)])
    held = [weakref.ref(parameter) for parameter in trainer.model.trained_parameters.values()]
    del trainer
    gc.collect()
    assert not any(parameter() is not None for parameter in held)


@interpreted
def test_an_expert_that_no_token_goes_to_learns_nothing(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "use_triton", lambda _: True)
    weight = torch.nn.Parameter(torch.randn(3 * 8, 16))
    x = torch.randn(5, 16, requires_grad=True)
    for groups in (torch.tensor([4, 4, 5], dtype=torch.int32), [4, 0, 1]):
        weight.grad = x.grad = None
        out = experts._GroupedProduct.apply(x, weight, groups, False)
        out.sum().backward()
        stack = weight.detach().view(3, 8, 16)
        want = torch.cat([x[:4] @ stack[0].t(), x[4:] @ stack[2].t()])
        assert torch.allclose(out, want, atol=1e-5)
        assert weight.grad is not None and x.grad is not None
        assert torch.allclose(weight.grad.view(3, 8, 16)[0], x[:4].sum(0).expand(8, 16), atol=1e-5)
        assert not weight.grad.view(3, 8, 16)[1].any()
        assert torch.allclose(x.grad[4], stack[2].sum(0), atol=1e-5)


@pytest.mark.slow
def test_they_compile_for_an_h200_without_spills() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "import json; from tests.support.sm90 import expert_kernels; print(json.dumps(expert_kernels()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *found, in_float32 = json.loads(done.stdout.splitlines()[-1])
    assert in_float32["shared"] <= 99  # KiB that a program has on a GPU without more, as an L40S
    assert [kernel["spilled"] for kernel in found] == [0] * 3
    product, *others = found
    assert (
        product["wgmma"] >= 4 and product["registers"] <= 128 and product["shared"] <= 113
    )  # two at a time
    assert max(kernel["registers"] for kernel in others) <= 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_product_of_experts_is_that_by_expert_on_a_gpu() -> None:
    draw = torch.Generator().manual_seed(0)
    counts = [0, 700, 1, 0, 1280, 37]
    x, weight = (
        torch.randn(sum(counts), 256, generator=draw),
        torch.randn(len(counts) * 384, 256, generator=draw),
    )
    slope = torch.randn(sum(counts), 384, generator=draw)
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        leaf = x.to(device, dtype, copy=True).requires_grad_()
        weights = torch.nn.Parameter(weight.to(device, dtype))
        weights.main_grad = torch.ones(weight.shape, device=device)  # type: ignore[attr-defined]
        sizes = torch.tensor(counts, device=device)
        groups = counts if device == "cpu" else sizes.cumsum(0, dtype=torch.int32)
        out = experts._GroupedProduct.apply(leaf, weights, groups, False)
        out.backward(slope.to(out))
        found.append([out.detach(), leaf.grad, weights.main_grad])
    for mine, theirs in zip(*found[::-1], strict=True):
        assert float((mine.cpu().float() - theirs).abs().max()) <= 2e-2 * float(theirs.abs().max())
