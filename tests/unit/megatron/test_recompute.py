"""What the backward pass computes again changes gradients by the order of sums at most."""

from pathlib import Path

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
WAYS = {
    "qwen2": {},
    "qwen3": {"bf16": True},
    "qwen3_moe": {},
    "llama": {"lora": LoraConfig(rank=2, alpha=4)},
}


@pytest.mark.parametrize("family", WAYS)
def test_gradients_are_the_same_whatever_is_computed_again(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference.make_model(family, tmp_path / family)
    batch = make_batch(LAYOUTS["small"], vocab=64)
    products: list[Tensor] = []
    gated = mlp.gated

    def recording_gated(gate_and_up: Tensor, row_scale: Tensor | None = None) -> Tensor:
        product = gated(gate_and_up, row_scale)
        products.append(product)
        return product

    monkeypatch.setattr(mlp, "gated", recording_gated)
    found, calls = {}, {}
    for way in ("none", "selective", "full"):
        trainer = MegatronTrainer(
            ranks.make_spec(str(tmp_path / family), recompute=way, **WAYS[family])
        )
        scores = trainer.score([batch])[0]
        products.clear()
        norm = trainer.update([batch])["grad_norm"]
        calls[way] = len(products)
        gradient = torch.cat(
            [gradient.double().flatten() for _, gradient in full_gradients(trainer)]
        )
        found[way] = scores, norm, gradient
    assert calls["none"] > 0 and calls["selective"] == calls["full"] == 2 * calls["none"]
    scores, norm, gradient = found["none"]
    assert norm > 0
    for way in ("selective", "full"):
        assert torch.equal(found[way][0], scores)
        apart = float((found[way][2] - gradient).norm() / gradient.norm())
        assert apart <= (1e-2 if "bf16" in WAYS[family] else 1e-6)


def test_selective_recomputation_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("Ninja is required to load C++ extensions")

    # what megatron-core 0.19 compiles with; it is monkeypatch's to put back
    for name, value in {"load_inline": refuse, "_share_storage_ext": None}.items():
        monkeypatch.setattr(random, name, value, raising=False)
    monkeypatch.setattr(
        random, "_get_share_storage", getattr(random, "_get_share_storage", None), raising=False
    )
    reference.make_model("qwen2", tmp_path / "model")
    batch, norms = make_batch(LAYOUTS["small"], vocab=64), []
    for way in ("none", "selective"):
        trainer = MegatronTrainer(ranks.make_spec(str(tmp_path / "model"), recompute=way))
        norms.append(trainer.update([batch])["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
