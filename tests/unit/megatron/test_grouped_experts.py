"""Experts of a layer as one product: kernels in Triton's interpreter, and whole updates."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.gpu.shapes import make_batch
from mcore_mas.megatron.model import experts, head, mlp, norm
from mcore_mas.megatron.model.experts import add_grouped
from mcore_mas.megatron.model.layer_ops import SWIGLU_BLOCK, swiglu
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.support import ranks, reference
from tests.support.gradients import full_gradients
from tests.support.operators import assert_near, output_and_gradients

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="needs TRITON_INTERPRET=1, which tests/conftest.py sets on a machine without a GPU",
)


@interpreted
def test_grouped_products_by_hand() -> None:
    # The first expert has rows 0 and 1, the second has none, and the third has row 2.
    left = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    right = torch.tensor([[1.0], [10.0], [100.0]])
    total = torch.full((3, 2, 1), 0.5)
    add_grouped(total, left, right, torch.tensor([2, 2, 3], dtype=torch.int32))
    assert total.flatten().tolist() == [31.5, 42.5, 0.5, 0.5, 500.5, 600.5]


@interpreted
def test_grouped_products_are_those_of_each_expert() -> None:
    draw = torch.Generator().manual_seed(0)
    # A tile has 128 rows and columns, and adds 32 rows of float32 at a time.
    counts = [0, 70, 1, 0, 128, 3]
    left = torch.randn(sum(counts), 136, generator=draw)
    right = torch.randn(sum(counts), 200, generator=draw)
    total = torch.randn(len(counts), 136, 200, generator=draw)
    expected = total.double()
    for expert_total, expert_left, expert_right in zip(
        expected, left.double().split(counts), right.double().split(counts), strict=True
    ):
        expert_total += expert_left.t() @ expert_right
    add_grouped(total, left, right, torch.tensor(counts).cumsum(0, dtype=torch.int32))
    assert_near([total], [expected], 1e-6)


def test_the_rows_of_a_token_are_summed_in_float32() -> None:
    rows = torch.tensor([[1.0, 2.0], [256.0, 0.0], [1.0, 5.0], [4.0, 4.0]]).bfloat16()
    token_of_row = torch.tensor([0, 0, 0, 1])
    rows_of_token = torch.tensor([[1, 0, 2], [3, 3, 3]])

    def sum_rows(rows: Tensor) -> Tensor:
        out: Tensor = experts._MoveRows.apply(rows, False, token_of_row, rows_of_token)
        return out

    out, gradient = output_and_gradients(sum_rows, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), rows)
    assert out.tolist() == [[258.0, 7.0], [12.0, 12.0]]  # in bfloat16, 256 + 1 is 256
    assert gradient.tolist() == [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]


@interpreted
@pytest.mark.parametrize("width", [48, SWIGLU_BLOCK + 6])
def test_scaled_swiglu_computes_the_results_of_torch(width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    gate_and_up = torch.randn(5, 2 * width, generator=draw)
    scale = torch.rand(5, generator=draw)
    grad_out = torch.randn(5, width, generator=draw)

    def torch_swiglu(gate_and_up: Tensor, scale: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, dim=-1)
        return silu(gate) * up * scale[:, None]

    results = output_and_gradients(swiglu, grad_out, gate_and_up, scale)
    exact = output_and_gradients(torch_swiglu, grad_out, gate_and_up.double(), scale.double())
    assert_near(results, exact, 2e-6)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_an_update_with_kernels_is_that_without(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    reference.make_model("qwen3_moe", tmp_path)
    # Two prompts with their replies, as (tokens, parent, trained tokens). Interpreting a kernel takes
    # long, so there are few tokens.
    batch = make_batch(
        [(24, -1, 0), (12, 0, 12), (9, 0, 9), (1, 0, 1), (20, -1, 20), (6, 4, 6)], vocab=64
    )
    spec = ranks.make_spec(str(tmp_path), recompute=recompute)
    launches = []

    def counted_add_grouped(*arguments: Any) -> None:
        launches.append(arguments)
        add_grouped(*arguments)

    def train() -> tuple[Tensor, float, dict[str, Tensor]]:
        """Return the scores before an update, the norm of its gradient, and the gradients."""
        trainer = MegatronTrainer(spec)
        scores = trainer.score([batch])[0]
        gradient_norm = trainer.update([batch])["grad_norm"]
        return scores, gradient_norm, dict(full_gradients(trainer))

    expected_scores, expected_norm, expected_gradients = train()
    for module in (experts, head, mlp, norm):
        monkeypatch.setattr(module, "use_triton", lambda _: True)
    monkeypatch.setattr(experts, "add_grouped", counted_add_grouped)
    scores, gradient_norm, gradients = train()

    assert len(launches) == 2  # for the two weights of the only sparse layer
    assert float((scores - expected_scores).abs().max()) <= 1e-5
    assert gradient_norm == pytest.approx(expected_norm, rel=1e-5)
    for name, expected in expected_gradients.items():
        assert float((gradients[name] - expected).norm()) <= 1e-5 * expected_norm, name


@interpreted
@pytest.mark.parametrize("kernels", [False, True])
def test_an_unused_trainer_of_experts_is_freed(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    reference.make_model("qwen3_moe", tmp_path)
    monkeypatch.setattr(experts, "use_triton", lambda _: kernels)
    trainer = MegatronTrainer(ranks.make_spec(str(tmp_path)))
    trainer.update([make_batch([(3, -1, 3)], vocab=64)])
    parameters = trainer.model.trained_parameters.values()
    references = [weakref.ref(parameter) for parameter in parameters]
    del trainer, parameters
    gc.collect()
    assert not any(reference() is not None for reference in references)


@interpreted
@pytest.mark.parametrize("kernels", [False, True])
def test_an_expert_without_tokens_has_no_gradient(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    monkeypatch.setattr(experts, "use_triton", lambda _: kernels)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(3 * 8, 16, generator=draw)
    x = torch.randn(5, 16, generator=draw)
    # The first expert has four tokens, the second none, and the third one.
    groups: Any = torch.tensor([4, 4, 5], dtype=torch.int32) if kernels else [4, 0, 1]

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = experts._GroupedProduct.apply(x, weight, groups, False)
        return out

    out, grad_x, grad_weight = output_and_gradients(multiply, torch.ones(5, 8), x, weight)
    first, _, third = weight.view(3, 8, 16)
    assert torch.allclose(out, torch.cat([x[:4] @ first.t(), x[4:] @ third.t()]), atol=1e-5)
    grad_first, grad_second, _ = grad_weight.view(3, 8, 16)
    assert torch.allclose(grad_first, x[:4].sum(0).expand(8, 16), atol=1e-5)
    assert not grad_second.any()
    assert torch.allclose(grad_x[4], third.sum(0), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_grouped_product_on_a_gpu_is_that_of_each_expert() -> None:
    draw = torch.Generator().manual_seed(0)
    counts = [0, 700, 1, 0, 1280, 37]
    x = torch.randn(sum(counts), 256, generator=draw)
    initial_weight = torch.randn(len(counts) * 384, 256, generator=draw)
    grad_out = torch.randn(sum(counts), 384, generator=draw)

    def results(device: str, dtype: torch.dtype, groups: Any) -> list[Tensor]:
        """Return the output, the gradient of x, and the buffer of the weight's gradient."""
        weight = torch.nn.Parameter(initial_weight.to(device, dtype))
        weight.main_grad = torch.ones(weight.shape, device=device)  # type: ignore[attr-defined]
        out, grad_x = output_and_gradients(
            lambda x: experts._GroupedProduct.apply(x, weight, groups, False),
            grad_out.to(device),
            x.to(device, dtype),
        )
        return [out, grad_x, weight.main_grad]  # type: ignore[attr-defined]

    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    on_gpu = results("cuda", torch.bfloat16, ends)
    assert_near([x.float() for x in on_gpu], results("cpu", torch.float32, counts), 2e-2)
