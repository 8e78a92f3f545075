"""Recomputation of activations: gradients differ by the order of sums only, and no compiler is needed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random
from torch import Tensor

from benchmarks.gpu.shapes import LAYOUTS, make_batch
from mcore_mas.config.policy import LoraConfig
from mcore_mas.megatron.model import mlp
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.support import ranks, reference
from tests.support.gradients import full_gradients

pytestmark = pytest.mark.usefixtures("one_rank")

# Fields of the TrainerSpec, by family.
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"bf16": True},
    "qwen3_moe": {},
    "llama": {"lora": LoraConfig(rank=2, alpha=4)},
}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("family", SETTINGS)
def test_gradients_are_those_without_recomputation(
    family: str, recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference.make_model(family, tmp_path / family)
    batch = make_batch(LAYOUTS["small"], vocab=64)
    swiglu_calls = []
    apply_swiglu = mlp.apply_swiglu

    def counted_swiglu(gate_and_up: Tensor, row_scale: Tensor | None = None) -> Tensor:
        swiglu_calls.append(gate_and_up.shape)
        return apply_swiglu(gate_and_up, row_scale)

    monkeypatch.setattr(mlp, "apply_swiglu", counted_swiglu)

    def train(recompute: str) -> tuple[Tensor, Tensor, int]:
        """Return scores, the gradient, and the calls of SwiGLU in an update."""
        spec = ranks.make_spec(str(tmp_path / family), recompute=recompute, **SETTINGS[family])
        trainer = MegatronTrainer(spec)
        scores = trainer.score([batch])[0]
        swiglu_calls.clear()
        trainer.update([batch])
        gradients = [gradient.double().flatten() for _, gradient in full_gradients(trainer)]
        return scores, torch.cat(gradients), len(swiglu_calls)

    plain_scores, plain_gradient, plain_calls = train("none")
    scores, gradient, calls = train(recompute)
    assert plain_calls > 0
    assert calls == 2 * plain_calls  # once more in the backward pass
    assert torch.equal(scores, plain_scores)
    assert float(plain_gradient.norm()) > 0
    error = float((gradient - plain_gradient).norm() / plain_gradient.norm())
    assert error <= (1e-2 if "bf16" in SETTINGS[family] else 1e-6)


def test_selective_recomputation_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_compile(**_: object) -> None:
        raise RuntimeError("Ninja is required to load C++ extensions")

    # megatron-core 0.19 compiles with these. The function is set to its present value, so that
    # monkeypatch restores it after a trainer has replaced it.
    compiled_function = getattr(random, "_get_share_storage", None)
    monkeypatch.setattr(random, "load_inline", fail_to_compile, raising=False)
    monkeypatch.setattr(random, "_share_storage_ext", None, raising=False)
    monkeypatch.setattr(random, "_get_share_storage", compiled_function, raising=False)
    reference.make_model("qwen2", tmp_path / "model")
    batch = make_batch(LAYOUTS["small"], vocab=64)

    def gradient_norm(recompute: str) -> float:
        trainer = MegatronTrainer(ranks.make_spec(str(tmp_path / "model"), recompute=recompute))
        return trainer.update([batch])["grad_norm"]

    assert gradient_norm("selective") == pytest.approx(gradient_norm("none"), rel=1e-6)
