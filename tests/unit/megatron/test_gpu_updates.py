"""Whole updates through Triton's kernels in its interpreter, compared with those of the CPU's operators.

Attention is the CPU's; `test_tree_attention.py` and `test_layer_kernels.py` test its kernels.
"""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.shapes import make_batch
from mcore_mas.config.policy import LoraConfig
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.model import build, decoder, head, head_ops, layer_ops, mlp, norm
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.support import ranks, reference
from tests.support.gradients import full_gradients

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(
        not triton.knobs.runtime.interpret,
        reason="needs TRITON_INTERPRET=1, which tests/conftest.py sets on a machine without a GPU",
    ),
]

# Two prompts with their replies, as (tokens, parent, trained tokens): 28 rows. Interpreting a kernel
# takes long, so there are few tokens.
FOREST = [(12, -1, 0), (9, 0, 9), (7, 0, 7), (8, -1, 8), (4, 3, 4)]
ROWS = 28
VOCAB = 101  # that of `reference.make_model`


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Return a list that gets an element for each call of a function."""
    calls: list[str] = []
    function = getattr(owner, name)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        return function(*arguments, **keywords)

    monkeypatch.setattr(owner, name, counted)
    return calls


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build and compute models as on a GPU, except for attention."""
    modules: tuple[ModuleType, ...] = (build, head, mlp, norm)
    for module in modules:
        monkeypatch.setattr(module, "use_triton", lambda _: True)
    monkeypatch.setattr(build, "_use_fused_attention", lambda _: None)
    # On a CPU, fewer tokens leave the last layer.
    monkeypatch.setattr(decoder, "rank_device", lambda: torch.device("meta"))
    # Six rows of logits at a time
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 4 * VOCAB * 6)


def make_microbatch() -> Microbatch:
    """Return a micro-batch whose loss has clipped ratios, a KL term and an entropy bonus."""
    draw = torch.Generator().manual_seed(0)
    batch = make_batch(FOREST, vocab=VOCAB)
    return replace(
        batch,
        behaviour=batch.behaviour + 0.3 * torch.randn(ROWS, generator=draw),
        advantages=torch.randn(ROWS, generator=draw),
        weights=torch.rand(ROWS, generator=draw) / ROWS,
        temperatures=0.5 + torch.rand(ROWS, generator=draw),
        reference=batch.behaviour.clone(),
        kl_coef=0.1 * torch.rand(ROWS, generator=draw),
        entropy_coef=0.1 * torch.rand(ROWS, generator=draw),
    )


def train(folder: Path, **fields: Any) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
    """Return the scores before an update of two micro-batches, its metrics, and its gradients."""
    trainer = MegatronTrainer(ranks.make_spec(str(folder), **fields))
    batch = make_microbatch()
    scores = trainer.score([batch])[0]
    metrics = trainer.update([batch, batch])
    return scores, metrics, dict(full_gradients(trainer))


def assert_equal_updates(folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Assert that an update through kernels is that of the CPU without recomputation."""
    expected_scores, expected_metrics, expected = train(folder, **fields | {"recompute": "none"})
    use_kernels(monkeypatch)
    scores, metrics, gradients = train(folder, **fields)
    assert float((scores - expected_scores).abs().max()) <= 1e-5
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)
    norm_of_all = expected_metrics["grad_norm"]
    assert norm_of_all > 0
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm()) <= 1e-5 * norm_of_all, name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_an_update_is_that_of_the_cpu(
    recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference.make_model("qwen3", tmp_path)
    logits = count_calls(monkeypatch, head_ops, "head_row_statistics")
    sums = count_calls(monkeypatch, layer_ops, "_sum_and_norm")
    norms_again = count_calls(monkeypatch, norm, "write_norm")
    products_again = count_calls(monkeypatch, mlp, "write_swiglu")
    objective = Objective(correction="tis")
    assert_equal_updates(tmp_path, monkeypatch, recompute=recompute, objective=objective)
    # Five chunks of logits in a pass of scores and in two of an update: none is computed again.
    assert len(logits) == 3 * 5
    # A model of two layers has four sums. The last of a layer is separate in full recomputation, which
    # makes the others again in the two backward passes.
    assert len(sums) == (3 * 2 + 2 * 2 if recompute == "full" else 3 * 4)
    freed = 2 if recompute == "selective" else 0  # micro-batches whose outputs are freed
    assert len(norms_again) == 4 * freed
    assert len(products_again) == 2 * freed


def test_an_update_of_adapters_is_that_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference.make_model("llama", tmp_path)
    one_pass = count_calls(monkeypatch, head_ops.OnePassHead, "apply")
    lora = LoraConfig(rank=2, alpha=4)
    assert_equal_updates(tmp_path, monkeypatch, lora=lora, recompute="full")
    assert len(one_pass) == 2  # two micro-batches with kernels


def test_gspo_computes_logits_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a token depends on the other tokens of its reply, which are in other chunks."""
    reference.make_model("qwen2", tmp_path)
    one_pass = count_calls(monkeypatch, head_ops.OnePassHead, "apply")
    objective = Objective(loss="gspo")
    assert_equal_updates(tmp_path, monkeypatch, objective=objective, recompute="selective")
    assert not one_pass
