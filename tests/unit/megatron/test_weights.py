"""Hugging Face tensors to Megatron's parameters and back, and initial weights from a config alone."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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

# Architecture with two key/value groups of two heads, and a vocabulary of 3 that is padded to 4.
ARCHITECTURE: Any = SimpleNamespace(
    heads=4, kv_heads=2, head_dim=1, vocab=3, vocab_padded=lambda tp: 4
)

WHOLE_RANGE = (None, None)


@pytest.fixture(scope="module")
def process_groups() -> Iterator[None]:
    """Initialize the process groups of one rank."""
    init_process_groups(rank=0, threads=1)
    yield
    destroy_process_groups()


def column(*values: float) -> Tensor:
    """Return a tensor [values, 1]."""
    return torch.tensor(values)[:, None]


def values_of(column: Tensor) -> list[float]:
    return column[:, 0].tolist()


class RecordedReads:
    """Sources that record the ranges that are read.

    Attributes:
        ranges: of each read, start and stop in each dimension.
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[tuple[int | None, int | None], ...]] = []

    def source(self, tensor: Tensor) -> LazyTensor:
        def part(index: tuple[slice, ...]) -> Tensor:
            self.ranges.append(tuple((i.start, i.stop) for i in index))
            return tensor[index]

        return LazyTensor(shape=tuple(tensor.shape), part=part)


def fill_shard(
    sharding: Sharding, sources: Sequence[LazyTensor], shape: tuple[int, ...], rank: int
) -> Tensor:
    """Return the shard of one of two ranks."""
    shard = torch.full(shape, torch.nan)
    sharding.fill(shard, list(sources), ARCHITECTURE, 2, rank)
    return shard


def test_a_rank_reads_its_queries_keys_and_values_and_interleaves_them() -> None:
    tensors = (column(0, 1, 2, 3), column(10, 11), column(20, 21))
    reads = RecordedReads()
    sources = [reads.source(tensor) for tensor in tensors]
    first = fill_shard(QKV, sources, (4, 1), rank=0)
    assert values_of(first) == [0, 1, 10, 20]
    reads.ranges.clear()
    second = fill_shard(QKV, sources, (4, 1), rank=1)
    assert values_of(second) == [2, 3, 11, 21]
    assert reads.ranges == [
        ((2, 4), WHOLE_RANGE),
        ((1, 2), WHOLE_RANGE),
        ((1, 2), WHOLE_RANGE),
    ]

    joined = QKV.join([first, second], ARCHITECTURE, 3)
    assert [[values_of(block) for block in blocks] for blocks in joined] == [
        [[0, 1], [2, 3]],
        [[10], [11]],
        [[20], [21]],
    ]


def test_queries_of_a_single_rank_are_not_copied() -> None:
    shard = column(0, 1, 10, 20, 2, 3, 11, 21)
    queries, _, _ = QKV.join([shard], ARCHITECTURE, 3)
    for block in queries:
        assert block.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
    assert values_of(torch.cat(queries)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tp", "expected"), [(1, [[0, 1, 2]]), (2, [[0, 1], [2]]), (4, [[0], [1], [2]])]
)
def test_padding_of_the_vocabulary_is_left_out(tp: int, expected: list[list[int]]) -> None:
    padded = column(0, 1, 2, 3)
    (blocks,) = VOCAB.join(padded.chunk(tp), ARCHITECTURE, 1)
    assert [values_of(block) for block in blocks] == expected


def test_a_rank_reads_its_rows_of_gate_and_up() -> None:
    reads = RecordedReads()
    sources = [reads.source(column(0, 1)), reads.source(column(10, 11))]
    assert values_of(fill_shard(BY_ROWS, sources, (2, 1), rank=1)) == [1, 11]
    assert reads.ranges == [((1, 2), WHOLE_RANGE)] * 2


def test_a_rank_reads_its_columns() -> None:
    reads = RecordedReads()
    source = reads.source(torch.tensor([[0.0, 1.0, 2.0, 3.0]]))
    assert fill_shard(BY_COLUMNS, [source], (1, 2), rank=1).tolist() == [[2, 3]]
    assert reads.ranges == [(WHOLE_RANGE, (2, 4))]


def test_a_rank_reads_its_rows_of_the_vocabulary_and_pads_them() -> None:
    reads = RecordedReads()
    source = reads.source(column(5, 6, 7))
    assert values_of(fill_shard(VOCAB, [source], (2, 1), rank=1)) == [7, 0]
    assert reads.ranges == [((2, 3), WHOLE_RANGE)]


@pytest.mark.parametrize("family", reference.FAMILIES)
def test_written_weights_have_the_bytes_of_the_loaded_ones(
    process_groups: None, family: str, tmp_path: Path
) -> None:
    reference.make_model(family, tmp_path / "model")
    trainer = MegatronTrainer(ranks.make_spec(str(tmp_path / "model")))
    trainer.model.write(tmp_path / "written")
    loaded = load_file(tmp_path / "model" / "model.safetensors")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert set(written) == set(loaded)
    for name, tensor in loaded.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].numpy().tobytes() == tensor.numpy().tobytes(), name


def test_a_written_folder_has_no_other_weights_of_the_model(tmp_path: Path) -> None:
    copied = ["config.json", "tokenizer.json", "original/params.json"]
    not_copied = [
        "original/consolidated.00.pth",
        ".git/lfs/objects/0a",
        "model-q4_k_m.gguf",
        "onnx/model.onnx_data",
    ]
    for name in (*copied, *not_copied):
        file = tmp_path / "like" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    folder = tmp_path / "trained"
    write_folder(tmp_path / "like", folder, {"x": torch.ones(1)})
    written = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert written == {*copied, "model.safetensors"}


def test_stacked_experts_are_loaded_like_single_ones(process_groups: None, tmp_path: Path) -> None:
    model = reference.make_model("qwen3_moe", tmp_path / "single")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stacked = load_file(tmp_path / "stacked" / "model.safetensors")
    assert stacked["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 2 * 48, 64)

    weights = ranks.copy_weights(MegatronTrainer(ranks.make_spec(str(tmp_path / "stacked"))))
    single = load_file(tmp_path / "single" / "model.safetensors")
    assert set(weights) == set(single)
    for name, tensor in single.items():
        assert torch.equal(weights[name], tensor), name


def test_a_part_of_an_expert_is_read_from_its_stack(tmp_path: Path) -> None:
    model = reference.make_model("qwen3_moe", tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    up = SafeTensors(tmp_path)("model.layers.0.mlp.experts.2.up_proj.weight")
    stack = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    assert up.shape == (48, 64)
    assert torch.equal(up.read(slice(24, 48), slice(0, 5)), stack[2, 72:96, :5])


def test_tensors_of_another_shape_are_refused(process_groups: None, tmp_path: Path) -> None:
    reference.make_model("qwen3", tmp_path)
    config_file = tmp_path / "config.json"
    config = config_file.read_text()
    changed = config.replace('"intermediate_size": 96', '"intermediate_size": 64')
    config_file.write_text(changed)
    message = (
        f"{tmp_path}: tensor 'model.layers.0.mlp.gate_proj.weight' has shape (96, 64); "
        "config.json makes it (64, 64)"
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        MegatronTrainer(ranks.make_spec(str(tmp_path)))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    reference.make_model("qwen3", tmp_path)
    name = "model.layers.0.mlp.experts.7.up_proj.weight"
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path}: no tensor '{name}'")):
        SafeTensors(tmp_path)(name)


def test_rotary_frequencies_of_an_older_checkpoint_are_not_loaded(
    process_groups: None, tmp_path: Path
) -> None:
    """Checkpoints of Llama's first generations have rotary frequencies in every layer."""
    reference.make_model("llama", tmp_path)
    spec = ranks.make_spec(str(tmp_path))
    expected = ranks.copy_weights(MegatronTrainer(spec))
    file = tmp_path / "model.safetensors"
    frequencies = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)
    }
    save_file(load_file(file) | frequencies, file, metadata={"format": "pt"})
    weights = ranks.copy_weights(MegatronTrainer(spec))
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """Return a folder of a model without weights."""
    reference.make_model("qwen2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    return tmp_path


def test_a_folder_without_weights_is_refused(process_groups: None, config_only: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*.safetensors file"):
        MegatronTrainer(ranks.make_spec(str(config_only)))


def test_random_weights_depend_on_the_seed(process_groups: None, config_only: Path) -> None:
    spec = ranks.make_spec(str(config_only), init="random")

    def weights(seed: int) -> dict[str, Tensor]:
        return ranks.copy_weights(MegatronTrainer(replace(spec, seed=seed)))

    first = weights(1)
    again = weights(1)
    other = weights(2)
    matrix = "model.layers.1.mlp.down_proj.weight"
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor), name
    assert not torch.equal(other[matrix], first[matrix])
    assert float(first[matrix].std()) == pytest.approx(0.02, rel=0.05)
    assert first["model.norm.weight"].unique().tolist() == [1.0]
    assert first["model.layers.0.self_attn.q_proj.bias"].unique().tolist() == [0.0]


def test_parts_of_a_random_tensor_are_those_of_the_whole() -> None:
    tensors = RandomTensors({"a": (4, 6)}, std=1.0, seed=0)
    whole = tensors("a").read()
    upper = tensors("a").read(slice(0, 2))
    lower = tensors("a").read(slice(2, 4))
    assert torch.equal(torch.cat([upper, lower]), whole)
    assert torch.equal(tensors("a").read(slice(None), slice(3, 6)), whole[:, 3:])


def test_full_shapes_follow_from_the_shapes_of_shards(tmp_path: Path) -> None:
    reference.make_model("qwen3", tmp_path)
    architecture = read_architecture(tmp_path)
    layer = "decoder.layers.3."
    # Shapes on one rank, and on one of two. Queries have 128 rows, and keys and values 64 each; the
    # vocabulary of 101 is padded to 102.
    shard_shapes = {
        layer + "self_attention.linear_qkv.weight": [(256, 64), (128, 64)],
        layer + "mlp.linear_fc1.weight": [(192, 64), (96, 64)],
        layer + "mlp.linear_fc2.weight": [(64, 96), (64, 48)],
        "embedding.word_embeddings.weight": [(101, 64), (51, 64)],
    }
    of_one_rank: dict[str, tuple[int, ...]] = {}
    of_two_ranks: dict[str, tuple[int, ...]] = {}
    for mapping in weight_mappings(shard_shapes):
        whole, half = shard_shapes[mapping.parameter]
        of_one_rank |= mapping.shapes(whole, architecture, 1)
        of_two_ranks |= mapping.shapes(half, architecture, 2)
    assert of_one_rank == of_two_ranks
    assert of_one_rank["model.layers.3.self_attn.q_proj.weight"] == (128, 64)
    assert of_one_rank["model.layers.3.mlp.up_proj.weight"] == (96, 64)
    assert of_one_rank["model.embed_tokens.weight"] == (101, 64)


@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.experts.linear_fc1.weight5", "mlp.experts.linear_fc1.weight5-5"),
        ("mlp.experts.linear_fc2.weight5", "mlp.experts.linear_fc2.weight5-5"),
    ],
)
def test_parameters_of_transformer_engine_hold_the_same_tensors(fused: str, plain: str) -> None:
    layer = "decoder.layers.3."
    fused_mapping, plain_mapping = weight_mappings([layer + fused, layer + plain])
    assert fused_mapping.tensors == plain_mapping.tensors
    assert fused_mapping.sharding == plain_mapping.sharding
    assert fused_mapping.is_expert == plain_mapping.is_expert


def test_a_parameter_of_an_expert_holds_its_tensors() -> None:
    (mapping,) = weight_mappings(["decoder.layers.3.mlp.experts.linear_fc1.weight5"])
    assert mapping.tensors == (
        "model.layers.3.mlp.experts.5.gate_proj.weight",
        "model.layers.3.mlp.experts.5.up_proj.weight",
    )
    assert mapping.is_expert


@pytest.mark.parametrize("parameter", WEIGHT_MAP)
def test_parameters_and_tensors_of_a_mapping_have_the_same_numbers(parameter: str) -> None:
    _, tensors = WEIGHT_MAP[parameter]
    numbers = parameter.count("{}")
    assert [tensor.count("{}") for tensor in tensors] == [numbers] * len(tensors)
    numbered = parameter.replace("{}", "7")
    assert EXPERT_NUMBER.sub("{}", LAYER_NUMBER.sub("{}", numbered)) == parameter
