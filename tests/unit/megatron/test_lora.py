"""Adapters start, are left out, are saved and are written as they should, on one rank and on two."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_mas.config.policy import LoraConfig
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.state.lora import Adapter, AdapterFolder, initial_adapter
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture
from tests.support import lora, precision, ranks, reference

LORA = LoraConfig(rank=4, alpha=8.0, targets=("k", "o", "up"))
NAME = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"
LAYOUTS = {"one": {}, "tp2": {"tp": 2, "sp": True}, "half": {"tp": 2, "bf16": True}}


def adapt(rank: int, spec: TrainerSpec, out: Path) -> None:
    """Scores and adapters at the start, after two updates, of the reference, and after a restore and one more."""
    trainer = MegatronTrainer(spec)
    batches = pack(reference.make_samples(), 12)
    got = {
        "start": trainer.score(batches),
        "fresh": ranks.copied(trainer.model.adapter()),
        "base": ranks.copy_weights(trainer),
    }
    trainer.update(batches)
    trainer.update(batches)
    ranks.save(trainer, out / "checkpoint")
    got |= {"trained": trainer.score(batches), "reference": trainer.score(batches, reference=True)}
    got |= {"again": trainer.score(batches)}
    trainer.model.write(out / "written")
    restored = MegatronTrainer(spec)
    restored.restore(out / "checkpoint")
    for number, each in enumerate((trainer, restored)):
        each.update(batches)
        got[f"third{number}"] = ranks.copy_weights(each)
    got["trainable"] = sum(p.numel() for p in trainer._parameters.values())
    got["in_buffers"] = sum(buffer.grad_data.numel() for buffer in trainer._stages[0].buffers)
    if rank == 0:
        torch.save(got, out / "got.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what every layout came to."""
    folder = tmp_path_factory.mktemp("runs")
    reference.make_model("qwen2", folder / "model")
    jobs = []
    for name, layout in LAYOUTS.items():
        (folder / name).mkdir()
        arguments = {
            "spec": ranks.spec_of(str(folder / "model"), lora=LORA, lora_seed=3, **layout),
            "out": folder / name,
        }
        jobs.append(ranks.Job(function=adapt, arguments=arguments, tp=layout.get("tp", 1)))
    ranks.play(jobs)
    return folder


def load(path: Path) -> dict:
    return torch.load(path / "got.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_fresh_adapter_is_the_same_in_every_layout_and_adds_nothing(runs: Path) -> None:
    one, two = load(runs / "one"), load(runs / "tp2")
    model = load_file(runs / "model" / "model.safetensors")
    assert set(one["fresh"]) == set(two["fresh"])
    assert len(one["fresh"]) == 2 * 2 * 3  # layers, halves, targets
    for name, tensor in one["fresh"].items():
        assert torch.equal(two["fresh"][name], tensor), name
        assert bool(tensor.any()) == ("lora_A" in name), name
    for got in (one, two):
        assert all(torch.equal(got["base"][name], tensor) for name, tensor in model.items())


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("name", LAYOUTS)
def test_only_adapters_train_and_without_them_it_is_the_model_it_was(runs: Path, name: str) -> None:
    got = load(runs / name)
    assert all(map(torch.equal, got["reference"], got["start"]))
    assert all(map(torch.equal, got["again"], got["trained"]))
    assert not any(map(torch.equal, got["trained"], got["start"]))
    adapted = {
        key for key, tensor in got["third0"].items() if not torch.equal(tensor, got["base"][key])
    }
    assert {key.split(".")[-2] for key in adapted} == {"k_proj", "o_proj", "up_proj"}
    # per layer (A, B) of k: 64 → 32, of o: 64 → 64, of up: 64 → 96; the rows of k and up, the inputs of o are cut
    whole = 2 * 4 * ((64 + 32) + (64 + 64) + (64 + 96))
    cut = 2 * 4 * ((64 + 16) + (32 + 64) + (64 + 48))
    assert got["trainable"] == (whole if name == "one" else cut)
    assert got["in_buffers"] < got["trainable"] + 512  # gradients of nothing else, but for padding


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_resume_to_the_bit(runs: Path, name: str) -> None:
    got = load(runs / name)
    assert all(torch.equal(got["third1"][key], tensor) for key, tensor in got["third0"].items())


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("name", ["one", "tp2"])
def test_what_is_written_is_the_sum_and_the_adapter_by_itself(runs: Path, name: str) -> None:
    merged = load_file(runs / name / "written" / "model.safetensors")
    base = load_file(runs / "model" / "model.safetensors")
    adapter = load_file(runs / name / "written" / "adapter" / "adapter_model.safetensors")
    for layer in (0, 1):
        for module in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"):
            weight = f"model.layers.{layer}.{module}.weight"
            a, b = (
                adapter[f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"]
                for half in "AB"
            )
            assert a.shape[0] == b.shape[1] == 4
            start = base.pop(weight)
            precision.assert_close(
                merged[weight], start + 2 * b @ a, start.double() + 2 * b.double() @ a.double()
            )
    assert all(torch.equal(merged[key], tensor) for key, tensor in base.items())
    AdapterFolder(runs / name / "written" / "adapter", LORA)  # it can be started from


def test_a_starts_uniform_within_one_over_the_root_of_its_inputs_and_b_at_zero() -> None:
    a = Architecture(
        layers=1,
        hidden=64,
        heads=8,
        kv_heads=2,
        head_dim=32,
        ffn=96,
        vocab=9,
        tied=True,
        qkv_bias=False,
        qk_norm=True,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_factor=None,
        positions=9,
    )
    low, high = (initial_adapter(a, 4, 3, NAME.format(x)).read() for x in "AB")
    assert (low.shape, high.shape) == ((4, 8 * 32), (64, 4))
    assert not high.any()
    bound = 1 / 16  # √256
    assert 0.9 * bound < float(low.abs().max()) <= bound
    assert float(low.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not torch.equal(initial_adapter(a, 4, 4, NAME.format("A")).read(), low)
    assert torch.equal(initial_adapter(a, 4, 3, NAME.format("A")).read(), low)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 8}, r"r is 8, but the policy's lora section says 3; make them equal"),
        ({"lora_alpha": 1}, r"lora_alpha is 1, but the policy's lora section says 6.0"),
        (
            {"target_modules": ["q_proj"]},
            r"target_modules is \['q_proj'\], but .* says \['k_proj', 'q_proj'\]",
        ),
        ({"target_modules": "all-linear"}, "target_modules is all-linear, but"),
        ({"use_dora": True}, "use_dora True is not supported; expected False"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported; expected 'LORA'"),
        ({"rank_pattern": {"q_proj": 9}}, "rank_pattern {'q_proj': 9} is not supported"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    model = reference.make_model("qwen2", tmp_path / "model", layers=1)
    lora.adapt(model, ("q", "k"))
    lora.save(model, ("q", "k"), tmp_path / "adapter")
    spec = LoraConfig(rank=lora.RANK, alpha=lora.ALPHA, targets=("q", "k"))
    assert NAME.format("A").replace("o_proj", "q_proj") in AdapterFolder(tmp_path / "adapter", spec)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        AdapterFolder(tmp_path / "adapter", spec)


def test_a_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter here \(adapter_config.json is missing\)"):
        AdapterFolder(tmp_path, LORA)


@pytest.mark.parametrize("tokens", [0, 2])
def test_parts_interleave_for_any_number_of_tokens(tokens: int) -> None:
    """A context-parallel rank may have none behind the last layer's attention."""
    linear: Any = torch.nn.Linear(3, 8)
    linear.config = SimpleNamespace(sequence_parallel=False)
    adapter = Adapter(linear, rows={"q": 4, "k": 2, "v": 2}, groups=2, inputs_cut=False, lora=LORA)
    keys = torch.tensor([5.0, 6.0]).expand(tokens, 1, 2)
    assert torch.equal(
        adapter._fuse({"k": keys}), torch.tensor([0.0, 0, 5, 0, 0, 0, 6, 0]).expand(tokens, 1, 8)
    )
