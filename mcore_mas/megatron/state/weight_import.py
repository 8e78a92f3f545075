"""Weight map and import (resharding): which Hugging Face tensors make up each Megatron parameter, in any layout."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor

from mcore_mas.megatron.model.parameter_names import EXPERT_NUMBER, LAYER_NUMBER
from mcore_mas.megatron.rank_watch import heartbeat
from rollout.base.errors import ModelError
from rollout.base.files import atomic_folder
from rollout.models.architecture import Architecture
from rollout.models.layout import Projection
from rollout.models.tensors import TensorFiles, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTensor:
    """A full tensor that is somewhere else."""

    shape: tuple[int, ...]
    part: Callable[
        [tuple[slice, ...]], Tensor
    ]  # one slice for each dimension -> what it holds there

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """One that is here."""
        return cls(shape=tuple(tensor.shape), part=tensor.__getitem__)

    def read(self, *index: slice) -> Tensor:
        """A part of it: slices of its first dimensions, all of the others."""
        return self.part(index + (slice(None),) * (len(self.shape) - len(index)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How full tensors become one shard per tensor-parallel rank, and back."""

    # (a rank's shard, to be filled; full tensors; architecture; tp; the rank). In place: the allocator keeps part of
    # what copies on the way took, and over many weights that is a good part of a model
    fill: Callable[[Tensor, Sequence[LazyTensor], Architecture, int, int], object]
    # (shards, architecture, how many full tensors) -> the blocks of rows of each; no copies where rows are whole
    join: Callable[[Sequence[Tensor], Architecture, int], list[list[Tensor]]]


def _share(size: int, tp: int, rank: int) -> slice:
    return slice(size // tp * rank, size // tp * (rank + 1))


def _fill_part(
    dim: int, shard: Tensor, full: Sequence[LazyTensor], a: Architecture, tp: int, rank: int
) -> None:
    for part, source in zip(shard.chunk(len(full)), full, strict=True):
        part.copy_(source.read(*[slice(None)] * dim, _share(source.shape[dim], tp, rank)))


def _fill_qkv(
    shard: Tensor, full: Sequence[LazyTensor], a: Architecture, tp: int, rank: int
) -> None:
    # Megatron interleaves by key/value group: [queries of the group, key, value]
    groups = shard.view(
        a.kv_heads // tp, -1, *shard.shape[1:]
    )  # [groups, (heads/kv_heads + 2) · head_dim, ...]
    for part, source in zip(groups.split(_group_rows(a), dim=1), full, strict=True):
        part.copy_(source.read(_share(source.shape[0], tp, rank)).view(part.shape))


def _group_rows(a: Architecture) -> list[int]:
    return [a.heads // a.kv_heads * a.head_dim, a.head_dim, a.head_dim]


def _join_qkv(shards: Sequence[Tensor], a: Architecture, _: int) -> list[list[Tensor]]:
    groups = [group for shard in shards for group in shard.chunk(a.kv_heads // len(shards))]
    return [
        list(parts)
        for parts in zip(*(group.split(_group_rows(a)) for group in groups), strict=True)
    ]


def _fill_vocab(
    shard: Tensor, full: Sequence[LazyTensor], a: Architecture, tp: int, rank: int
) -> None:
    rows = _share(a.vocab_padded(tp), tp, rank)
    own = slice(min(rows.start, a.vocab), min(rows.stop, a.vocab))
    held = own.stop - own.start
    shard[:held].copy_(full[0].read(own))
    shard[held:].zero_()


def _join_vocab(shards: Sequence[Tensor], a: Architecture, _: int) -> list[list[Tensor]]:
    ends = accumulate((len(shard) for shard in shards), initial=0)
    blocks = [shard[: max(a.vocab - first, 0)] for shard, first in zip(shards, ends, strict=False)]
    return [[block for block in blocks if len(block)]]


def _parts(shards: Sequence[Tensor], count: int) -> Iterator[list[Tensor]]:
    """Of each of `count` tensors below each other in every shard its part of each."""
    return map(list, zip(*(shard.chunk(count) for shard in shards), strict=True))


WHOLE = Sharding(
    fill=lambda shard, full, *_: shard.copy_(full[0].read()),
    join=lambda shards, a, _: [[shards[0]]],
)
BY_COLUMNS = Sharding(
    fill=partial(_fill_part, 1),
    join=lambda shards, a, count: [
        parts if len(parts) == 1 else [torch.cat(parts, dim=1)] for parts in _parts(shards, count)
    ],
)
BY_ROWS = Sharding(
    fill=partial(_fill_part, 0), join=lambda shards, a, count: list(_parts(shards, count))
)
VOCAB = Sharding(fill=_fill_vocab, join=_join_vocab)
QKV = Sharding(fill=_fill_qkv, join=_join_qkv)

VALUE_HEAD = "output_layer.value"

_ATTENTION = "model.layers.{}.self_attn."
_MLP = "model.layers.{}.mlp."
_INPUT_NORM = ("model.layers.{}.input_layernorm.weight",)
_MLP_NORM = ("model.layers.{}.post_attention_layernorm.weight",)
_EXPERT_IN = (_MLP + "experts.{}.gate_proj.weight", _MLP + "experts.{}.up_proj.weight")
_EXPERT_OUT = (_MLP + "experts.{}.down_proj.weight",)

# Megatron parameter -> (its cut, Hugging Face tensors); the first {} is the layer, the second the expert
WEIGHT_MAP: dict[str, tuple[Sharding, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": (VOCAB, ("model.embed_tokens.weight",)),
    "decoder.layers.{}.input_layernorm.weight": (WHOLE, _INPUT_NORM),
    "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight": (
        WHOLE,
        _INPUT_NORM,
    ),  # Transformer Engine
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
    "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight": (WHOLE, _MLP_NORM),  # Transformer Engine
    "decoder.layers.{}.mlp.linear_fc1.weight": (
        BY_ROWS,
        (_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
    ),
    "decoder.layers.{}.mlp.linear_fc2.weight": (BY_COLUMNS, (_MLP + "down_proj.weight",)),
    "decoder.layers.{}.mlp.router.weight": (WHOLE, (_MLP + "gate.weight",)),
    # of one expert with Transformer Engine, else of as many as the rank has: 0-63 in place of 0
    "decoder.layers.{}.mlp.experts.linear_fc1.weight{}": (BY_ROWS, _EXPERT_IN),
    "decoder.layers.{}.mlp.experts.linear_fc2.weight{}": (BY_COLUMNS, _EXPERT_OUT),
    "decoder.final_layernorm.weight": (WHOLE, ("model.norm.weight",)),
    "output_layer.weight": (VOCAB, ("lm_head.weight",)),
    VALUE_HEAD: (
        WHOLE,
        ("score.weight",),
    ),  # as in transformers' models for sequence classification
}

# linear layer of a Megatron layer -> (its place in Hugging Face's, the projections it fuses, whether inputs are cut)
LINEARS: dict[str, tuple[str, tuple[Projection, ...], bool]] = {
    "self_attention.linear_qkv": (_ATTENTION, ("q", "k", "v"), False),
    "self_attention.linear_proj": (_ATTENTION, ("o",), True),
    "mlp.linear_fc1": (_MLP, ("gate", "up"), False),
    "mlp.linear_fc2": (_MLP, ("down",), True),
}

for _linear, (
    _at,
    _projections,
    _inputs_cut,
) in LINEARS.items():  # adapters, each under its name in PEFT
    for _x in _projections:
        _own, _peft = (
            f"decoder.layers.{{}}.{_linear}.adapter",
            f"base_model.model.{_at}{_x}_proj.lora",
        )
        WEIGHT_MAP[f"{_own}.a_{_x}"] = (
            BY_COLUMNS if _inputs_cut else WHOLE,
            (f"{_peft}_A.weight",),
        )
        WEIGHT_MAP[f"{_own}.b_{_x}"] = (WHOLE if _inputs_cut else BY_ROWS, (f"{_peft}_B.weight",))


def is_adapter(parameter: str) -> bool:
    """Whether a Megatron parameter is part of an adapter."""
    return ".adapter." in parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMapping:
    """One Megatron parameter and the Hugging Face tensors it holds."""

    parameter: str
    sharding: Sharding
    tensors: tuple[str, ...]

    @property
    def expert(self) -> bool:
        """Whether it is of experts, of which expert-parallel ranks hold different ones."""
        return EXPERT_NUMBER.search(self.parameter) is not None

    def join(self, shards: Sequence[Tensor], a: Architecture) -> list[list[Tensor]]:
        """The blocks of rows of each of its full tensors, from all ranks' shards."""
        return self.sharding.join(shards, a, len(self.tensors))

    def shapes(self, shard: Sequence[int], a: Architecture, tp: int) -> dict[str, tuple[int, ...]]:
        """The shapes of its full tensors by name, of which each of `tp` ranks holds a shard of this shape."""
        joined = self.join([torch.empty(tuple(shard), device="meta")] * tp, a)
        return {
            name: tuple(shape_of(blocks)) for name, blocks in zip(self.tensors, joined, strict=True)
        }


def weight_mappings(parameters: Iterable[str], *, tied: bool = False) -> list[WeightMapping]:
    """The table's rows for Megatron parameter names, in their order.

    An output layer that is `tied` is a second copy of the embedding, which the last pipeline stage keeps.

    Raises:
        KeyError: a parameter has no row.
    """
    rows = []
    for name in parameters:
        copy = tied and name == "output_layer.weight"
        row = (
            "embedding.word_embeddings.weight"
            if copy
            else EXPERT_NUMBER.sub("{}", LAYER_NUMBER.sub("{}", name))
        )
        sharding, tensors = WEIGHT_MAP[row]
        layer = [found[0] for found in LAYER_NUMBER.finditer(name)]
        held = tuple(
            tensor.format(*layer, expert) for expert in _experts(name) for tensor in tensors
        )
        rows.append(WeightMapping(parameter=name, sharding=sharding, tensors=held))
    return rows


def _experts(name: str) -> range:
    """Which experts a Megatron parameter holds; one that is of none is once."""
    if (found := EXPERT_NUMBER.search(name)) is None:
        return range(1)
    first, _, last = found[0].partition("-")
    return range(int(first), int(last or first) + 1)


def import_weights(
    local: Mapping[str, Tensor], architecture: Architecture, source: Callable[[str], LazyTensor]
) -> None:
    """Fill this rank's shards, reading no more than them: one Megatron parameter at a time, in place.

    Args:
        local: this rank's tensors by Megatron parameter name, written in place.
        source: full tensor by Hugging Face name.

    Raises:
        ModelError: a tensor has not the shape that the architecture gives it.
    """
    with torch.no_grad():
        for entry in weight_mappings(local, tied=architecture.tied):
            heartbeat()
            target = local[entry.parameter]
            tp, rank = tensor_parallel(entry)
            full = {name: source(name) for name in entry.tensors}
            for name, shape in entry.shapes(target.shape, architecture, tp).items():
                if full[name].shape != shape:
                    raise ModelError(
                        f"tensor '{name}' has shape {full[name].shape}; config.json makes it {shape}"
                    )
            entry.sharding.fill(target, list(full.values()), architecture, tp, rank)


def full_shapes(
    local: Mapping[str, Tensor], architecture: Architecture
) -> dict[str, tuple[int, ...]]:
    """The shapes, by Hugging Face name, of the full tensors that this rank holds shards of."""
    found: dict[str, tuple[int, ...]] = {}
    for entry in weight_mappings(local, tied=architecture.tied):
        found |= entry.shapes(local[entry.parameter].shape, architecture, tensor_parallel(entry)[0])
    return found


def tensor_parallel(entry: WeightMapping) -> tuple[int, int]:
    """How many ranks cut this parameter, and which of them this is."""
    if entry.expert:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


# in whatever format they are published, and what git or the hub's client keeps in a hidden folder beside them
_WEIGHTS = shutil.ignore_patterns(
    *(
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
)


def write_folder(like: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write a Hugging Face folder with the config and tokenizer of `like` and these weights, complete or not at all.

    Weights with a value head make it a model for sequence classification with one label, as transformers calls it.
    """
    with atomic_folder(folder) as made:
        shutil.copytree(like, made, ignore=_WEIGHTS, dirs_exist_ok=True)
        made.chmod(0o700)  # that of `like` was copied, too
        if "score.weight" in tensors:
            config = json.loads((made / "config.json").read_text())
            names = [
                name.replace("ForCausalLM", "ForSequenceClassification")
                for name in config["architectures"]
            ]
            config |= {"architectures": names, "id2label": {"0": "value"}, "label2id": {"value": 0}}
            (made / "config.json").write_text(json.dumps(config, indent=2))
        save_file(tensors, str(made / "model.safetensors"), metadata={"format": "pt"})


# transformers writes one tensor for every expert, as models are published, or with save_original_format=False stacks
# of all of a layer's
_EXPERT = re.compile(
    r"(?P<stack>.*\.experts\.)(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight"
)
_STACKS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


class SafeTensors(TensorFiles):
    """Tensors of safetensors files as sources; what is read of them is what is sliced."""

    def __call__(self, name: str) -> LazyTensor:
        """The tensor of this name, also where it is one expert's place in a stack.

        Raises:
            ModelError: there is none.
        """
        if name in self:
            return self._slice(name)
        expert = _EXPERT.fullmatch(name)
        stack = expert["stack"] + _STACKS[expert["projection"]] if expert else name
        if expert is None or stack not in self:
            raise ModelError(f"{self.where}: no tensor '{name}'; is config.json of the same model?")
        return _place(self._slice(stack), int(expert["expert"]), expert["projection"])

    def _slice(self, name: str) -> LazyTensor:
        tensor = self.sliced(name)
        return LazyTensor(shape=tuple(tensor.get_shape()), part=tensor.__getitem__)


def _place(stack: LazyTensor, expert: int, projection: str) -> LazyTensor:
    """One expert's matrix in a stack [E, rows, columns]; gates are the first half of the rows, ups the second."""
    rows = stack.shape[1] // (1 if projection == "down" else 2)
    first = rows if projection == "up" else 0

    def part(index: tuple[slice, ...]) -> Tensor:
        start, stop, _ = index[0].indices(rows)
        return stack.part(
            (slice(expert, expert + 1), slice(first + start, first + stop), index[1])
        )[0]

    return LazyTensor(shape=(rows, stack.shape[2]), part=part)


@dataclass(frozen=True)
class RandomTensors:
    """Weights nobody has trained: normal matrices, norms of 1, biases of 0; a tensor is its name, shape and seed.

    So every layout starts from the same model, at the price of each rank drawing what it then cuts.
    """

    shapes: Mapping[str, tuple[int, ...]]  # by Hugging Face name
    _: KW_ONLY
    std: float  # of the matrices
    seed: int

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def __call__(self, name: str) -> LazyTensor:
        """The tensor of this name, drawn when it is read."""
        return LazyTensor(shape=self.shapes[name], part=lambda index: self._draw(name)[index])

    def _draw(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(shape, generator=generator) * self.std
