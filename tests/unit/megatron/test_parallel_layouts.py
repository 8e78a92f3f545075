"""Checkpoints of one parallel layout that are resumed in others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import precision, ranks, reference

STEPS = 3
Layout = dict[str, Any]  # fields of the TrainerSpec

SAVED: Layout = {"tp": 2, "dp": 2, "sp": True, "distributed_optimizer": True}
RESUMED: dict[str, Layout] = {
    "one rank": {},
    "PP2": {"pp": 2},
    "TP2 × PP2 + SP": {"tp": 2, "pp": 2, "sp": True},
    "DP2 + distributed optimizer": {"dp": 2, "distributed_optimizer": True},
    "the same": SAVED,
}
SAVED_BF16: Layout = {"tp": 2, "dp": 2, "distributed_optimizer": True, "bf16": True}

SAVED_EXPERTS: Layout = {"dp": 2, "ep": 2, "distributed_optimizer": True}
RESUMED_EXPERTS: dict[str, Layout] = {
    "one rank": {},
    "TP2 + SP": {"tp": 2, "sp": True},
    "the same": SAVED_EXPERTS,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train, and resume after the first step; return the folder with a subfolder for each training."""
    folder = tmp_path_factory.mktemp("results")
    reference.make_model("qwen2", folder / "model")
    reference.make_model("qwen3_moe", folder / "mixture")
    samples = reference.make_samples()
    jobs = []

    def add_job(
        function: Callable[..., None], layout: Layout, out: str, model: str, **arguments: Any
    ) -> None:
        spec = ranks.make_spec(str(folder / model), **layout)
        sizes = {name: layout[name] for name in ("tp", "pp", "dp", "ep") if name in layout}
        arguments |= {"spec": spec, "out": folder / out, "samples": samples}
        jobs.append(ranks.Job(function=function, arguments=arguments, **sizes))

    def add_training(layout: Layout, out: str, model: str = "model") -> None:
        add_job(ranks.train, layout, out, model, steps=STEPS, max_tokens=64)

    def add_resumption(layout: Layout, out: str, saved: str, model: str = "model") -> None:
        checkpoint = folder / saved / "checkpoint"
        add_job(ranks.resume, layout, out, model, checkpoint=checkpoint, steps=STEPS - 1)

    add_training(SAVED, "saved")
    for name, layout in RESUMED.items():
        add_resumption(layout, name, saved="saved")
    add_training(SAVED_BF16, "bf16")
    add_resumption(SAVED_BF16, "bf16 resumed", saved="bf16")
    add_resumption(SAVED_BF16 | {"host_moments": True}, "bf16 on host", saved="bf16")
    add_training(SAVED_EXPERTS, "experts", model="mixture")
    add_training(SAVED_EXPERTS | {"bf16": True}, "bf16 experts", model="mixture")
    for name, layout in RESUMED_EXPERTS.items():
        add_resumption(layout, f"experts {name}", saved="experts", model="mixture")
    ranks.run_jobs(jobs)
    return folder


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return the largest gap between the weights of two layouts that plain float32 allows, by family."""
    folder = tmp_path_factory.mktemp("plain")
    result = {}
    for family in ("qwen2", "qwen3_moe"):
        model = reference.make_model(family, folder / family)
        expected = precision.expect(model, reference.make_samples(), STEPS, ranks.LR)
        result[family] = precision.bound(expected.float32.parameters)
    return result


def load(path: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return weights


def final_weights(training: Path) -> dict[str, torch.Tensor]:
    """Return the weights after the last step of a training that was not resumed."""
    return load(training / f"weights_{STEPS - 1}.pt")


# The tests compare weights two steps after the checkpoint: a single step would not show moments or
# numbers of steps that were not restored.


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("layout", RESUMED)
def test_a_checkpoint_is_resumed_in_another_layout(
    results: Path, bounds: dict[str, float], layout: str
) -> None:
    resumed = load(results / layout / "weights.pt")
    bound = 0 if layout == "the same" else bounds["qwen2"]
    assert precision.gap(resumed, final_weights(results / "saved")) <= bound


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("layout", RESUMED_EXPERTS)
def test_a_checkpoint_with_expert_parallelism_is_resumed_in_another_layout(
    results: Path, bounds: dict[str, float], layout: str
) -> None:
    resumed = load(results / f"experts {layout}" / "weights.pt")
    bound = 0 if layout == "the same" else bounds["qwen3_moe"]
    assert precision.gap(resumed, final_weights(results / "experts")) <= bound


@pytest.mark.multirank
@pytest.mark.slow
def test_bfloat16_is_resumed_bit_for_bit_from_float32_master_weights(results: Path) -> None:
    weights = final_weights(results / "bf16")
    resumed = load(results / "bf16 resumed" / "weights.pt")
    resumed_on_host = load(results / "bf16 on host" / "weights.pt")
    for name, tensor in weights.items():
        assert torch.equal(resumed[name], tensor), name
        assert torch.equal(resumed_on_host[name], tensor), name


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize(("bf16", "float32"), [("bf16", "saved"), ("bf16 experts", "experts")])
def test_training_in_bfloat16_stays_near_float32(results: Path, bf16: str, float32: str) -> None:
    weights = final_weights(results / bf16)
    float32_weights = final_weights(results / float32)
    assert set(weights) == set(float32_weights)
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.allclose(tensor.float(), float32_weights[name], rtol=2**-7, atol=5e-3), name
