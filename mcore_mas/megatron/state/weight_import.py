"""Hugging Face tensors of each Megatron parameter in any layout (`WEIGHT_MAP`), and their import.

`import_weights` fills a rank's shards, and `write_folder` writes full tensors as a Hugging Face
folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor

from mcore_mas.megatron.model.parameter_names import EXPERT_NUMBER, LAYER_NUMBER
from mcore_mas.megatron.rank_watch import heartbeat
from mcore_mas.megatron.state.tensor_sources import LazyTensor
from rollout.base.errors import ModelError
from rollout.base.files import atomic_folder
from rollout.base.json_files import read_json
from rollout.models.architecture import Architecture
from rollout.models.layout import Projection
from rollout.models.tensors import shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Conversion of full tensors to one shard per tensor-parallel rank, and back.

    Attributes:
        fill: fills a rank's shard in place; called with the shard, the full tensors, the
            architecture, the number of ranks and the rank. A new tensor for each shard would cost
            memory: the allocator keeps part of the memory of temporary copies, which over many
            weights adds up to a good part of a model.
        join: returns each full tensor as a list of blocks of rows; called with all shards, the
            architecture and the number of full tensors. The blocks are views of the shards, unless
            each shard has only some columns.
    """

    fill: Callable[[Tensor, Sequence[LazyTensor], Architecture, int, int], object]
    join: Callable[[Sequence[Tensor], Architecture, int], list[list[Tensor]]]


def _rank_range(size: int, tp: int, rank: int) -> slice:
    """Return the range of a dimension that a rank holds."""
    return slice(size // tp * rank, size // tp * (rank + 1))


def _fill_dimension(
    dim: int, shard: Tensor, full: Sequence[LazyTensor], _: Architecture, tp: int, rank: int
) -> None:
    """Fill a shard with the rank's range of dimension `dim` of each tensor, one below the other."""
    for part, source in zip(shard.chunk(len(full)), full, strict=True):
        part.copy_(source.read(*[slice(None)] * dim, _rank_range(source.shape[dim], tp, rank)))


def _fill_qkv(
    shard: Tensor, full: Sequence[LazyTensor], architecture: Architecture, tp: int, rank: int
) -> None:
    """Fill a shard of queries, keys and values, which Megatron interleaves by key/value group."""
    # [groups, (heads / kv_heads + 2) · head_dim, ...]
    groups = shard.view(architecture.kv_heads // tp, -1, *shard.shape[1:])
    parts = groups.split(_qkv_group_rows(architecture), dim=1)
    for part, source in zip(parts, full, strict=True):
        part.copy_(source.read(_rank_range(source.shape[0], tp, rank)).view(part.shape))


def _qkv_group_rows(architecture: Architecture) -> list[int]:
    """Return the numbers of rows of a group's queries, key and value."""
    query_rows = architecture.heads // architecture.kv_heads * architecture.head_dim
    return [query_rows, architecture.head_dim, architecture.head_dim]


def _join_qkv(shards: Sequence[Tensor], architecture: Architecture, _: int) -> list[list[Tensor]]:
    groups_per_shard = architecture.kv_heads // len(shards)
    groups = [group for shard in shards for group in shard.chunk(groups_per_shard)]
    group_parts = [group.split(_qkv_group_rows(architecture)) for group in groups]
    return [list(parts) for parts in zip(*group_parts, strict=True)]


def _fill_vocab(
    shard: Tensor, full: Sequence[LazyTensor], architecture: Architecture, tp: int, rank: int
) -> None:
    """Fill a shard of the vocabulary's rows; padding rows are zero."""
    rows = _rank_range(architecture.vocab_padded(tp), tp, rank)
    vocab = architecture.vocab
    real_rows = slice(min(rows.start, vocab), min(rows.stop, vocab))
    count = real_rows.stop - real_rows.start
    shard[:count].copy_(full[0].read(real_rows))
    shard[count:].zero_()


def _join_vocab(shards: Sequence[Tensor], architecture: Architecture, _: int) -> list[list[Tensor]]:
    """Return the embedding's rows in blocks, without the padding, which is in the last shards."""
    first_rows = accumulate((len(shard) for shard in shards), initial=0)
    blocks = [
        shard[: max(architecture.vocab - first_row, 0)]
        for shard, first_row in zip(shards, first_rows, strict=False)
    ]
    return [[block for block in blocks if len(block)]]


def _tensor_parts(shards: Sequence[Tensor], count: int) -> Iterator[list[Tensor]]:
    """Yield each tensor's parts in all shards, which hold `count` tensors one below the other."""
    return map(list, zip(*(shard.chunk(count) for shard in shards), strict=True))


def _join_rows(shards: Sequence[Tensor], _: Architecture, count: int) -> list[list[Tensor]]:
    return list(_tensor_parts(shards, count))


def _join_columns(shards: Sequence[Tensor], _: Architecture, count: int) -> list[list[Tensor]]:
    return [
        parts if len(parts) == 1 else [torch.cat(parts, dim=1)]
        for parts in _tensor_parts(shards, count)
    ]


WHOLE = Sharding(
    fill=lambda shard, full, *_: shard.copy_(full[0].read()),
    join=lambda shards, *_: [[shards[0]]],
)
BY_COLUMNS = Sharding(fill=partial(_fill_dimension, 1), join=_join_columns)
BY_ROWS = Sharding(fill=partial(_fill_dimension, 0), join=_join_rows)
VOCAB = Sharding(fill=_fill_vocab, join=_join_vocab)
QKV = Sharding(fill=_fill_qkv, join=_join_qkv)

VALUE_HEAD = "output_layer.value"

_ATTENTION = "model.layers.{}.self_attn."
_MLP = "model.layers.{}.mlp."
_INPUT_NORM = ("model.layers.{}.input_layernorm.weight",)
_MLP_NORM = ("model.layers.{}.post_attention_layernorm.weight",)
_EXPERT_IN = (_MLP + "experts.{}.gate_proj.weight", _MLP + "experts.{}.up_proj.weight")
_EXPERT_OUT = (_MLP + "experts.{}.down_proj.weight",)

# Sharding and Hugging Face tensors by Megatron parameter; the first {} is the layer, the second the
# expert.
WEIGHT_MAP: dict[str, tuple[Sharding, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": (VOCAB, ("model.embed_tokens.weight",)),
    "decoder.layers.{}.input_layernorm.weight": (WHOLE, _INPUT_NORM),
    # Transformer Engine fuses linear layers with the norms before them.
    "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight": (WHOLE, _INPUT_NORM),
    "decoder.layers.{}.self_attention.linear_qkv.weight": (
        QKV,
        tuple(_ATTENTION + f"{x}_proj.weight" for x in "qkv"),
    ),
    "decoder.layers.{}.self_attention.linear_qkv.bias": (
        QKV,
        tuple(_ATTENTION + f"{x}_proj.bias" for x in "qkv"),
    ),
    "decoder.layers.{}.self_attention.q_layernorm.weight": (WHOLE, (_ATTENTION + "q_norm.weight",)),
    "decoder.layers.{}.self_attention.k_layernorm.weight": (WHOLE, (_ATTENTION + "k_norm.weight",)),
    "decoder.layers.{}.self_attention.linear_proj.weight": (
        BY_COLUMNS,
        (_ATTENTION + "o_proj.weight",),
    ),
    "decoder.layers.{}.pre_mlp_layernorm.weight": (WHOLE, _MLP_NORM),
    "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight": (WHOLE, _MLP_NORM),
    "decoder.layers.{}.mlp.linear_fc1.weight": (
        BY_ROWS,
        (_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
    ),
    "decoder.layers.{}.mlp.linear_fc2.weight": (BY_COLUMNS, (_MLP + "down_proj.weight",)),
    "decoder.layers.{}.mlp.router.weight": (WHOLE, (_MLP + "gate.weight",)),
    # With Transformer Engine a parameter holds one expert ("3"), else all experts of the rank
    # ("0-63").
    "decoder.layers.{}.mlp.experts.linear_fc1.weight{}": (BY_ROWS, _EXPERT_IN),
    "decoder.layers.{}.mlp.experts.linear_fc2.weight{}": (BY_COLUMNS, _EXPERT_OUT),
    "decoder.final_layernorm.weight": (WHOLE, ("model.norm.weight",)),
    "output_layer.weight": (VOCAB, ("lm_head.weight",)),
    # The name is that of transformers' models for sequence classification.
    VALUE_HEAD: (WHOLE, ("score.weight",)),
}

# Linear layers of a Megatron layer: prefix of their Hugging Face names, the projections that they
# fuse, and whether tensor parallelism splits their inputs.
LINEARS: dict[str, tuple[str, tuple[Projection, ...], bool]] = {
    "self_attention.linear_qkv": (_ATTENTION, ("q", "k", "v"), False),
    "self_attention.linear_proj": (_ATTENTION, ("o",), True),
    "mlp.linear_fc1": (_MLP, ("gate", "up"), False),
    "mlp.linear_fc2": (_MLP, ("down",), True),
}


def _adapter_map() -> dict[str, tuple[Sharding, tuple[str, ...]]]:
    """Return the rows of `WEIGHT_MAP` for adapters, whose tensors have the names of PEFT."""
    rows: dict[str, tuple[Sharding, tuple[str, ...]]] = {}
    for linear, (prefix, projections, inputs_are_split) in LINEARS.items():
        for projection in projections:
            parameter = f"decoder.layers.{{}}.{linear}.adapter"
            tensor = f"base_model.model.{prefix}{projection}_proj.lora"
            sharding_a = BY_COLUMNS if inputs_are_split else WHOLE
            sharding_b = WHOLE if inputs_are_split else BY_ROWS
            rows[f"{parameter}.a_{projection}"] = (sharding_a, (f"{tensor}_A.weight",))
            rows[f"{parameter}.b_{projection}"] = (sharding_b, (f"{tensor}_B.weight",))
    return rows


WEIGHT_MAP |= _adapter_map()


def is_adapter(parameter: str) -> bool:
    """Return True if a Megatron parameter is part of an adapter."""
    return ".adapter." in parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMapping:
    """A Megatron parameter and the Hugging Face tensors that it holds."""

    parameter: str
    sharding: Sharding
    tensors: tuple[str, ...]

    @property
    def is_expert(self) -> bool:
        """True for parameters of experts; each expert-parallel rank has different experts."""
        return EXPERT_NUMBER.search(self.parameter) is not None

    def join(self, shards: Sequence[Tensor], architecture: Architecture) -> list[list[Tensor]]:
        """Return each full tensor in blocks of rows, from all ranks' shards."""
        return self.sharding.join(shards, architecture, len(self.tensors))

    def shapes(
        self, shard: Sequence[int], architecture: Architecture, tp: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the full tensors by name.

        Args:
            shard: shape of a rank's shard.
            architecture: architecture of the model.
            tp: number of ranks that hold a shard.
        """
        joined = self.join([torch.empty(tuple(shard), device="meta")] * tp, architecture)
        return {
            name: tuple(shape_of(blocks)) for name, blocks in zip(self.tensors, joined, strict=True)
        }


def weight_mappings(parameters: Iterable[str], *, tied: bool = False) -> list[WeightMapping]:
    """Return the mappings of Megatron parameters, in their order.

    Args:
        parameters: names, numbered over the whole model.
        tied: the output layer is a copy of the embedding, which the last pipeline stage holds.

    Raises:
        KeyError: a parameter is not in `WEIGHT_MAP`.
    """
    mappings = []
    for name in parameters:
        row = EXPERT_NUMBER.sub("{}", LAYER_NUMBER.sub("{}", name))
        if tied and name == "output_layer.weight":
            row = "embedding.word_embeddings.weight"
        sharding, patterns = WEIGHT_MAP[row]
        layer = LAYER_NUMBER.findall(name)
        tensors: list[str] = []
        for expert in _expert_numbers(name):
            tensors += [pattern.format(*layer, expert) for pattern in patterns]
        mappings.append(WeightMapping(parameter=name, sharding=sharding, tensors=tuple(tensors)))
    return mappings


def _expert_numbers(name: str) -> range:
    """Return the numbers of the experts that a Megatron parameter holds.

    A parameter without experts gets a single number, 0, which the names of its tensors do not contain.
    """
    match = EXPERT_NUMBER.search(name)
    if match is None:
        return range(1)
    first, _, last = match[0].partition("-")
    return range(int(first), int(last or first) + 1)


def import_weights(
    local: Mapping[str, Tensor],
    architecture: Architecture,
    source: Callable[[str], LazyTensor],
    where: str,
) -> None:
    """Fill this rank's shards in place, one parameter at a time, reading only what they hold.

    Args:
        local: this rank's tensors by Megatron parameter name.
        architecture: architecture of the model.
        source: returns the full tensor of a Hugging Face name.
        where: folder of the source, for errors.

    Raises:
        ModelError: a tensor is missing, or does not have the shape that config.json implies.
    """
    with torch.no_grad():
        for mapping in weight_mappings(local, tied=architecture.tied):
            heartbeat()
            shard = local[mapping.parameter]
            tp, rank = tensor_parallel(mapping)
            full = {name: source(name) for name in mapping.tensors}
            for name, shape in mapping.shapes(shard.shape, architecture, tp).items():
                if full[name].shape != shape:
                    raise ModelError(
                        f"{where}: tensor '{name}' has shape {full[name].shape}; "
                        f"config.json makes it {shape}"
                    )
            mapping.sharding.fill(shard, list(full.values()), architecture, tp, rank)


def full_shapes(
    local: Mapping[str, Tensor], architecture: Architecture
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the full tensors of this rank's shards, by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for mapping in weight_mappings(local, tied=architecture.tied):
        tp, _ = tensor_parallel(mapping)
        shapes |= mapping.shapes(local[mapping.parameter].shape, architecture, tp)
    return shapes


def tensor_parallel(mapping: WeightMapping) -> tuple[int, int]:
    """Return the number of ranks that a parameter is split over, and this rank's number."""
    if mapping.is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


# Files that are not copied with a model: weights of any published format, and the hidden folders of
# git and of the hub's client.
_IGNORED_FILES = shutil.ignore_patterns(
    ".*",
    "*.safetensors",
    "*.index.json",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.onnx*",
    "*.h5",
    "*.msgpack",
)


def write_folder(like: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write a Hugging Face folder, complete or not at all.

    Weights with a value head become a model for sequence classification with one label.

    Args:
        like: folder whose config and tokenizer are copied.
        tensors: weights by Hugging Face name.
    """
    with atomic_folder(folder) as partial_folder:
        shutil.copytree(like, partial_folder, ignore=_IGNORED_FILES, dirs_exist_ok=True)
        partial_folder.chmod(0o700)  # copytree has copied the mode of `like`
        if "score.weight" in tensors:
            _convert_config_to_classifier(partial_folder / "config.json")
        weights = str(partial_folder / "model.safetensors")
        save_file(tensors, weights, metadata={"format": "pt"})


def _convert_config_to_classifier(path: Path) -> None:
    config = read_json(path)
    config["architectures"] = [
        name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]
    ]
    config["id2label"] = {"0": "value"}
    config["label2id"] = {"value": 0}
    path.write_text(json.dumps(config, indent=2))
