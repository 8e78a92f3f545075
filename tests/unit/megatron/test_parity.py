"""Every family and layout trains as a plain Hugging Face model does: loss, gradient norms, parameters."""

import json
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import spawn

from mcore_mas.megatron.models import ModelError, read_architecture
from mcore_mas.megatron.parallel import free_port
from tests.support import ranks, reference

STEPS = 3


def run_ranks(function, tp: int, *arguments: object) -> None:
    spawn(function, args=(tp, free_port(), *arguments), nprocs=tp)


def compare(out: Path, expected: list[dict]) -> None:
    history = json.loads((out / "history.json").read_text())
    for step, (got, want) in enumerate(zip(history, expected, strict=True)):
        assert got["agent/a/loss"] + got["agent/b/loss"] == pytest.approx(want["loss"], rel=2e-6)
        assert got["grad_norm"] == pytest.approx(want["norm"], rel=4e-6)
        for agent, norm in want["agent_norm"].items():
            assert got[f"agent/{agent}/grad_norm"] == pytest.approx(norm, rel=4e-6)
        weights = torch.load(out / f"weights_{step}.pt", weights_only=True)
        assert set(weights) == set(want["parameters"])
        for name, parameter in want["parameters"].items():
            gap = (weights[name] - parameter).abs().max() / parameter.abs().max()
            assert gap < 2e-6, f"step {step}, {name}: {gap:.1e}"


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp", "max_tokens"),
    [("qwen2", 1, 1000), ("qwen2", 2, 12), ("qwen3", 1, 12), ("qwen3", 2, 1000), ("llama", 1, 1000), ("llama", 2, 12)],
)
def test_trains_like_hugging_face(family: str, tp: int, max_tokens: int, tmp_path: Path) -> None:
    model = reference.make_model(family, tmp_path / "model")
    samples = reference.make_samples()
    run_ranks(ranks.train, tp, str(tmp_path / "model"), str(tmp_path), samples, STEPS, max_tokens)
    compare(tmp_path, reference.train(model, samples, STEPS, 1e-3))


@pytest.mark.multirank
@pytest.mark.slow
def test_checkpoint_of_tp2_continues_at_tp1_and_tp2(tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    reference.make_model("qwen2", tmp_path / "model")
    samples = reference.make_samples()
    run_ranks(ranks.train, 2, model, str(tmp_path), samples, STEPS, 64)
    unbroken = torch.load(tmp_path / f"weights_{STEPS - 1}.pt", weights_only=True)
    for tp in (1, 2):
        out = tmp_path / f"tp{tp}"
        out.mkdir()
        run_ranks(ranks.resume, tp, model, str(out), str(tmp_path / "checkpoint"), samples, STEPS - 1)
        resumed = torch.load(out / "weights.pt", weights_only=True)
        for name, tensor in unbroken.items():
            if tp == 2:
                assert torch.equal(resumed[name], tensor), name  # the same layout resumes to the bit
            else:
                assert torch.allclose(resumed[name], tensor, rtol=0, atol=2e-6), name


def test_layouts_that_cannot_be_cut_are_refused_with_those_that_can(tmp_path: Path) -> None:
    reference.make_model("qwen2", tmp_path)
    architecture = read_architecture(tmp_path)
    architecture.check_layout(2)
    with pytest.raises(ModelError, match=r"tp: 4 does not divide the model's 2 key/value heads; valid here: \[1, 2\]"):
        architecture.check_layout(4)


def test_rope_is_read_from_configs_of_transformers_4_and_5(tmp_path: Path) -> None:
    reference.make_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    new = read_architecture(tmp_path)
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path) == new
    assert (new.rope_theta, new.rope_factor) == (5e5, 32.0)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model here"):
        read_architecture(tmp_path / "nowhere")
