"""Adapters: initial values, training, checkpoints and files, on one rank and on two."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_mas.config.policy import LoraConfig
from mcore_mas.megatron.host_memory import flat_storages
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.state.lora import AdapterFolder, fuse_projections, initial_adapter
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture
from tests.support import lora, precision, ranks, reference

LORA = LoraConfig(rank=4, alpha=8.0, targets=("k", "o", "up"))
NAME = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2, "sp": True},
    "tp2_bf16": {"tp": 2, "bf16": True},
}
ARCHITECTURE = Architecture(
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


def train_adapters(rank: int, spec: TrainerSpec, out: Path) -> None:
    """Train, save, write and restore adapters; rank 0 writes scores and weights to result.pt."""
    trainer = MegatronTrainer(spec)
    batches = pack(reference.make_samples(), 12)
    result: dict[str, Any] = {
        "initial_scores": trainer.score(batches),
        "initial_adapter": ranks.copy_stream(trainer.model.adapter()),
        "initial_weights": ranks.copy_weights(trainer),
    }
    trainer.update(batches)
    trainer.update(batches)
    ranks.save(trainer, out / "checkpoint")
    result["trained_scores"] = trainer.score(batches)
    result["reference_scores"] = trainer.score(batches, reference=True)
    result["trained_scores_again"] = trainer.score(batches)
    trainer.model.write(out / "written")

    restored = MegatronTrainer(spec)
    restored.restore(out / "checkpoint")
    trainer.update(batches)
    restored.update(batches)
    result["weights_after_third_update"] = ranks.copy_weights(trainer)
    result["weights_after_restore"] = ranks.copy_weights(restored)

    trained = trainer.model.trained_parameters.values()
    result["trained_elements"] = sum(parameter.numel() for parameter in trained)
    gradients = [
        parameter.main_grad
        for parameter in trainer.model.all_parameters.values()
        if hasattr(parameter, "main_grad")
    ]
    buffer_bytes = sum(len(storage) for storage in flat_storages(gradients))
    result["gradient_elements"] = buffer_bytes // torch.float32.itemsize
    if rank == 0:
        torch.save(result, out / "result.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train adapters in every layout; return the folder with a model and a subfolder of each layout."""
    folder = tmp_path_factory.mktemp("results")
    model = folder / "model"
    reference.make_model("qwen2", model)
    jobs = []
    for name, layout in LAYOUTS.items():
        (folder / name).mkdir()
        spec = ranks.make_spec(str(model), lora=LORA, lora_seed=3, **layout)
        arguments = {"spec": spec, "out": folder / name}
        jobs.append(ranks.Job(function=train_adapters, arguments=arguments, tp=layout.get("tp", 1)))
    ranks.run_jobs(jobs)
    return folder


def load(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(folder / "result.pt", weights_only=True)
    return result


@pytest.mark.slow
@pytest.mark.multirank
def test_a_new_adapter_is_equal_in_every_layout_and_adds_nothing(results: Path) -> None:
    one_rank = load(results / "one")
    two_ranks = load(results / "tp2")
    assert set(one_rank["initial_adapter"]) == set(two_ranks["initial_adapter"])
    assert len(one_rank["initial_adapter"]) == 2 * 2 * 3  # layers, factors, targets
    for name, tensor in one_rank["initial_adapter"].items():
        assert torch.equal(two_ranks["initial_adapter"][name], tensor), name
        assert bool(tensor.any()) == ("lora_A" in name), name

    model = load_file(results / "model" / "model.safetensors")
    for result in (one_rank, two_ranks):
        for name, tensor in model.items():
            assert torch.equal(result["initial_weights"][name], tensor), name


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_adapters_are_trained_and_the_reference_is_the_base(
    results: Path, layout: str
) -> None:
    result = load(results / layout)
    assert all(map(torch.equal, result["reference_scores"], result["initial_scores"]))
    assert all(map(torch.equal, result["trained_scores_again"], result["trained_scores"]))
    assert not any(map(torch.equal, result["trained_scores"], result["initial_scores"]))

    changed_modules = {
        name.split(".")[-2]
        for name, tensor in result["weights_after_third_update"].items()
        if not torch.equal(tensor, result["initial_weights"][name])
    }
    assert changed_modules == {"k_proj", "o_proj", "up_proj"}


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_holds_its_part_of_the_adapters_and_no_other_gradients(
    results: Path, layout: str
) -> None:
    result = load(results / layout)
    # Inputs and outputs of k, o and up, in 2 layers of rank 4. With two ranks, the outputs of k and
    # up and the inputs of o are halved.
    on_one_rank = 2 * 4 * ((64 + 32) + (64 + 64) + (64 + 96))
    on_two_ranks = 2 * 4 * ((64 + 16) + (32 + 64) + (64 + 48))
    expected = on_one_rank if layout == "one" else on_two_ranks
    assert result["trained_elements"] == expected
    padding = 512
    assert expected <= result["gradient_elements"] < expected + padding


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_restored_adapters_train_on_to_the_same_bits(results: Path, layout: str) -> None:
    result = load(results / layout)
    for name, tensor in result["weights_after_third_update"].items():
        assert torch.equal(result["weights_after_restore"][name], tensor), name


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_written_weights_are_merged_and_the_adapter_is_written_too(
    results: Path, layout: str
) -> None:
    written = results / layout / "written"
    merged = load_file(written / "model.safetensors")
    base = load_file(results / "model" / "model.safetensors")
    adapter = load_file(written / "adapter" / "adapter_model.safetensors")
    for layer in (0, 1):
        for module in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"):
            path = f"model.layers.{layer}.{module}"
            a = adapter[f"base_model.model.{path}.lora_A.weight"]
            b = adapter[f"base_model.model.{path}.lora_B.weight"]
            assert a.shape[0] == b.shape[1] == 4
            weight = base.pop(f"{path}.weight")
            scale = 2  # alpha / rank
            precision.assert_close(
                merged[f"{path}.weight"],
                weight + scale * b @ a,
                weight.double() + scale * b.double() @ a.double(),
            )
    for name, tensor in base.items():
        assert torch.equal(merged[name], tensor), name
    AdapterFolder(written / "adapter", LORA)  # training can start from it


def test_a_is_uniform_within_one_over_the_root_of_its_inputs_and_b_is_zero() -> None:
    a = initial_adapter(ARCHITECTURE, 4, 3, NAME.format("A")).read()
    b = initial_adapter(ARCHITECTURE, 4, 3, NAME.format("B")).read()
    assert a.shape == (4, 8 * 32)
    assert b.shape == (64, 4)
    assert not b.any()
    bound = 1 / math.sqrt(256)
    assert 0.9 * bound < float(a.abs().max()) <= bound
    assert float(a.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_a_depends_on_the_seed_only() -> None:
    a = initial_adapter(ARCHITECTURE, 4, 3, NAME.format("A")).read()
    assert torch.equal(initial_adapter(ARCHITECTURE, 4, 3, NAME.format("A")).read(), a)
    assert not torch.equal(initial_adapter(ARCHITECTURE, 4, 4, NAME.format("A")).read(), a)


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
def test_an_adapter_of_another_kind_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    model = reference.make_model("qwen2", tmp_path / "model", layers=1)
    lora.adapt(model, ("q", "k"))
    folder = tmp_path / "adapter"
    lora.save(model, ("q", "k"), folder)
    config = LoraConfig(rank=lora.RANK, alpha=lora.ALPHA, targets=("q", "k"))
    assert NAME.format("A").replace("o_proj", "q_proj") in AdapterFolder(folder, config)

    settings_file = folder / "adapter_config.json"
    settings = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps(settings | change))
    with pytest.raises(ModelError, match=message):
        AdapterFolder(folder, config)


def test_a_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter here \(adapter_config.json is missing\)"):
        AdapterFolder(tmp_path, LORA)


@pytest.mark.parametrize("tokens", [0, 2])
def test_projections_interleave_for_any_number_of_tokens(tokens: int) -> None:
    """A context-parallel rank may have no tokens after the last layer's attention."""
    keys = torch.tensor([5.0, 6.0]).expand(tokens, 1, 2)
    fused = fuse_projections({"k": keys}, rows={"q": 4, "k": 2, "v": 2}, groups=2)
    expected = torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 6.0, 0.0])
    assert torch.equal(fused, expected.expand(tokens, 1, 8))
