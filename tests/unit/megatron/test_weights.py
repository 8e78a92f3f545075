"""Hugging Face tensors into Megatron's parameters and back: by the table, by slices, and from nothing but a config."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_mas.megatron.model.parameter_names import EXPERT_NUMBER, LAYER_NUMBER
from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups
from mcore_mas.megatron.state.tensor_sources import LazyTensor, RandomTensors, SafeTensors
from mcore_mas.megatron.state.weight_import import (
    BY_COLUMNS,
    BY_ROWS,
    QKV,
    VOCAB,
    WEIGHT_MAP,
    Sharding,
    weight_mappings,
    write_folder,
)
from mcore_mas.megatron.step.trainer import MegatronTrainer
from rollout.base.errors import ModelError
from rollout.models.architecture import read_architecture
from tests.support import ranks, reference

CUTS = SimpleNamespace(
    heads=4, kv_heads=2, head_dim=1, vocab=3, vocab_padded=lambda tp: 4
)  # an architecture


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process."""
    init_process_groups(rank=0, threads=1)
    yield
    destroy_process_groups()


def source(tensor: torch.Tensor, seen: list) -> LazyTensor:
    """A tensor that writes down what is read of it."""

    def part(index: tuple[slice, ...]) -> torch.Tensor:
        seen.append(tuple((i.start, i.stop) for i in index))
        return tensor[index]

    return LazyTensor(shape=tuple(tensor.shape), part=part)


def shard(cut: Sharding, full: list[LazyTensor], shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """What one rank of two holds."""
    tensor = torch.full(shape, torch.nan)
    cut.fill(tensor, full, CUTS, 2, rank)
    return tensor


def test_a_rank_reads_its_rows_of_queries_keys_and_values_and_interleaves_them() -> None:
    q, k, v = (
        torch.tensor([[0.0], [1], [2], [3]]),
        torch.tensor([[10.0], [11]]),
        torch.tensor([[20.0], [21]]),
    )
    seen: list = []
    shards = [shard(QKV, [source(x, seen) for x in (q, k, v)], (4, 1), rank) for rank in (0, 1)]
    assert [held[:, 0].tolist() for held in shards] == [[0, 1, 10, 20], [2, 3, 11, 21]]
    assert seen[3:] == [((2, 4), (None, None)), ((1, 2), (None, None)), ((1, 2), (None, None))]
    joined = QKV.join(shards, CUTS, 3)
    assert [[block[:, 0].tolist() for block in blocks] for blocks in joined] == [
        [[0, 1], [2, 3]],
        [[10], [11]],
        [[20], [21]],
    ]
    (alone,) = QKV.join([torch.cat(shards)], CUTS, 3)[:1]  # one rank's two groups, where they are
    assert alone[1].untyped_storage().data_ptr() == alone[0].untyped_storage().data_ptr()
    assert torch.equal(torch.cat(alone), q)


def test_padding_of_the_vocabulary_is_left_out_wherever_it_begins() -> None:
    rows = torch.arange(4.0)[:, None]
    for tp, kept in [(1, [[0, 1, 2]]), (2, [[0, 1], [2]]), (4, [[0], [1], [2]])]:
        (blocks,) = VOCAB.join(rows.chunk(tp), CUTS, 1)  # a vocabulary of three, padded to four
        assert [block[:, 0].tolist() for block in blocks] == kept


def test_a_rank_reads_its_part_of_gates_columns_and_vocabulary() -> None:
    seen: list = []
    gate, up = torch.tensor([[0.0], [1]]), torch.tensor([[10.0], [11]])
    assert shard(BY_ROWS, [source(x, seen) for x in (gate, up)], (2, 1), 1).tolist() == [[1], [11]]
    assert shard(
        BY_COLUMNS, [source(torch.tensor([[0.0, 1, 2, 3]]), seen)], (1, 2), 1
    ).tolist() == [[2, 3]]
    assert shard(VOCAB, [source(torch.tensor([[5.0], [6], [7]]), seen)], (2, 1), 1).tolist() == [
        [7],
        [0],
    ]
    assert seen == [((1, 2), (None, None))] * 2 + [((None, None), (2, 4)), ((2, 3), (None, None))]


@pytest.mark.parametrize("family", reference.FAMILIES)
def test_a_folder_comes_back_to_the_byte(alone: None, family: str, tmp_path: Path) -> None:
    reference.make_model(family, tmp_path / "model")
    trainer = MegatronTrainer(ranks.make_spec(str(tmp_path / "model")))
    trainer.model.write(tmp_path / "again")
    loaded, written = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "again")
    )
    assert set(written) == set(loaded)
    for name, tensor in loaded.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].numpy().tobytes() == tensor.numpy().tobytes(), name


def test_a_written_folder_has_no_weights_of_the_published_one(tmp_path: Path) -> None:
    kept = ["config.json", "tokenizer.json", "original/params.json"]
    left = [
        "original/consolidated.00.pth",
        ".git/lfs/objects/0a",
        "model-q4_k_m.gguf",
        "onnx/model.onnx_data",
    ]
    for name in (*kept, *left):
        (tmp_path / "like" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "like" / name).write_text("{}")
    write_folder(tmp_path / "like", tmp_path / "trained", {"x": torch.ones(1)})
    written = [file for file in (tmp_path / "trained").rglob("*") if file.is_file()]
    assert {str(file.relative_to(tmp_path / "trained")) for file in written} == {
        *kept,
        "model.safetensors",
    }


def test_stacks_of_experts_are_read_like_single_ones(alone: None, tmp_path: Path) -> None:
    model = reference.make_model("qwen3_moe", tmp_path / "single")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stacked = load_file(tmp_path / "stacked/model.safetensors")
    assert stacked["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 2 * 48, 64)
    weights = ranks.copy_weights(MegatronTrainer(ranks.make_spec(str(tmp_path / "stacked"))))
    single = load_file(tmp_path / "single/model.safetensors")
    assert set(weights) == set(single)
    assert all(torch.equal(weights[name], tensor) for name, tensor in single.items())


def test_a_part_of_an_expert_is_read_from_its_place_in_the_stack(tmp_path: Path) -> None:
    model = reference.make_model("qwen3_moe", tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    up = SafeTensors(tmp_path)("model.layers.0.mlp.experts.2.up_proj.weight")
    whole = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    assert up.shape == (48, 64)
    assert torch.equal(up.read(slice(24, 48), slice(0, 5)), whole[2, 72:96, :5])


def test_tensors_of_another_model_are_refused(alone: None, tmp_path: Path) -> None:
    reference.make_model("qwen3", tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"intermediate_size": 96', '"intermediate_size": 64')
    )
    wrong_shape = (
        f"{tmp_path}: tensor 'model.layers.0.mlp.gate_proj.weight' has shape (96, 64); "
        "config.json makes it (64, 64)"
    )
    with pytest.raises(ModelError, match=re.escape(wrong_shape)):
        MegatronTrainer(ranks.make_spec(str(tmp_path)))
    missing = f"{tmp_path}: no tensor 'model.layers.0.mlp.experts.7.up_proj.weight'"
    with pytest.raises(ModelError, match=re.escape(missing)):
        SafeTensors(tmp_path)("model.layers.0.mlp.experts.7.up_proj.weight")


def test_a_trainer_loads_an_older_checkpoint(alone: None, tmp_path: Path) -> None:
    """Checkpoints of Llama's first generations have rotary frequencies in every layer."""
    reference.make_model("llama", tmp_path)
    expected = ranks.copy_weights(MegatronTrainer(ranks.make_spec(str(tmp_path))))
    path = tmp_path / "model.safetensors"
    buffers = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)
    }
    save_file(load_file(path) | buffers, path, metadata={"format": "pt"})
    weights = ranks.copy_weights(MegatronTrainer(ranks.make_spec(str(tmp_path))))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_config_alone_is_trained_from_seeded_weights_only_when_asked(
    alone: None, tmp_path: Path
) -> None:
    reference.make_model("qwen2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    spec = ranks.make_spec(str(tmp_path))
    with pytest.raises(ModelError, match=r"no \*.safetensors file"):
        MegatronTrainer(spec)
    first, again, other = (
        ranks.copy_weights(MegatronTrainer(replace(spec, init="random", seed=seed)))
        for seed in (1, 1, 2)
    )
    matrix = "model.layers.1.mlp.down_proj.weight"
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert not torch.equal(other[matrix], first[matrix])
    assert float(first[matrix].std()) == pytest.approx(0.02, rel=0.05)  # of 96 · 64 numbers
    assert first["model.norm.weight"].unique().tolist() == [1.0]
    assert first["model.layers.0.self_attn.q_proj.bias"].unique().tolist() == [0.0]


def test_a_random_tensor_is_the_same_however_it_is_cut() -> None:
    tensors = RandomTensors({"a": (4, 6)}, std=1.0, seed=0)
    whole = tensors("a").read()
    assert torch.equal(
        torch.cat([tensors("a").read(slice(0, 2)), tensors("a").read(slice(2, 4))]), whole
    )
    assert torch.equal(tensors("a").read(slice(None), slice(3, 6)), whole[:, 3:])


def test_shards_of_any_size_tell_the_full_shapes(tmp_path: Path) -> None:
    reference.make_model("qwen3", tmp_path)
    architecture = read_architecture(tmp_path)
    full, cut = {}, {}
    layer = "decoder.layers.3."
    names = {  # of one rank of one, of one of two: heads · 32 + 2 · kv heads · 32, gate and up, half of a padded 102
        layer + "self_attention.linear_qkv.weight": [(256, 64), (128, 64)],
        layer + "mlp.linear_fc1.weight": [(192, 64), (96, 64)],
        layer + "mlp.linear_fc2.weight": [(64, 96), (64, 48)],
        "embedding.word_embeddings.weight": [(101, 64), (51, 64)],
    }
    for entry in weight_mappings(names):
        whole, half = names[entry.parameter]
        full |= entry.shapes(whole, architecture, 1)
        cut |= entry.shapes(half, architecture, 2)
    assert full == cut
    assert full["model.layers.3.self_attn.q_proj.weight"] == (128, 64)
    assert full["model.layers.3.mlp.up_proj.weight"] == (96, 64)
    assert full["model.embed_tokens.weight"] == (101, 64)


def test_layers_of_transformer_engine_hold_the_same_tensors() -> None:
    layer = "decoder.layers.3."
    for fused, plain in [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.experts.linear_fc1.weight5", "mlp.experts.linear_fc1.weight5-5"),
        ("mlp.experts.linear_fc2.weight5", "mlp.experts.linear_fc2.weight5-5"),
    ]:
        one, other = weight_mappings([layer + fused, layer + plain])
        assert (one.tensors, one.sharding, one.expert) == (
            other.tensors,
            other.sharding,
            other.expert,
        )
    (entry,) = weight_mappings([layer + "mlp.experts.linear_fc1.weight5"])
    assert entry.tensors == tuple(
        f"model.layers.3.mlp.experts.5.{x}_proj.weight" for x in ("gate", "up")
    )
    assert entry.expert


def test_every_row_of_the_table_says_which_numbers_its_tensors_take() -> None:
    for parameter, (_, tensors) in WEIGHT_MAP.items():
        numbers = parameter.count("{}")
        assert [tensor.count("{}") for tensor in tensors] == [numbers] * len(tensors)
        named = parameter.replace("{}", "7")
        assert EXPERT_NUMBER.sub("{}", LAYER_NUMBER.sub("{}", named)) == parameter
