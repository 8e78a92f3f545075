"""Fused weight buffers, allocated once and filled by Hugging Face name."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.base.files import atomic_folder
from rollout.models.architecture import Architecture
from rollout.models.layout import Projection
from rollout.models.tensors import RowBlocks, WeightStream, blocks_of, complete, split_like, whole

_TIED = ("model.embed_tokens.weight", "lm_head.weight")
_ALIGNED = 16  # elements: every buffer starts on a cache line
NOWHERE = torch.empty(0, device="meta")  # a storage that lays buffers out and holds none
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # as PEFT names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer; the rotated dimensions of a head are stored as neighbouring pairs."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(H + 2 KV) * D, hidden]
    qkv_bias: Tensor | None  # [(H + 2 KV) * D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Tensor  # [hidden, H * D]
    post_norm: Tensor  # [hidden]
    gate_up: (
        Tensor  # [E, 2 * intermediate, hidden] of a layer's experts; of a dense layer without the E
    )
    down: Tensor  # [E, hidden, intermediate]
    router: Tensor | None = None  # [E, hidden]; None: the layer is dense


class NamedBuffers:
    """Buffers that are filled by name."""

    _tied = False
    elements: int  # float32 numbers that their storage holds
    places: dict[
        str, tuple[torch.Size, Tensor]
    ]  # name -> (shape in the stream, view of a buffer in the same order)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Name, full tensor) of all that is in the buffers; a tied head is its embedding alone."""
        for name, (shape, view) in self.places.items():
            yield name, view.reshape(shape)

    def fill(self, stream: WeightStream) -> None:
        """Copy a full set of named tensors into the buffers, converting to float32.

        Raises:
            EngineError: as `placed`. The buffers are then a mixture of old and new.
        """
        for _, rows, place in self.placed(stream):
            blocks = blocks_of(rows)
            for block, part in zip(blocks, split_like(place, blocks), strict=True):
                part.copy_(block.detach().reshape(part.shape))

    def placed(self, stream: WeightStream) -> Iterator[tuple[str, RowBlocks, Tensor]]:
        """(name, tensor, place) of a full set of named tensors; the place has the same elements in the same order.

        Raises:
            EngineError: names the tensor that is missing, unknown, repeated or of another shape.
        """
        tied: dict[str, Tensor] = {}

        def noted() -> Iterator[tuple[str, RowBlocks]]:
            for name, rows in stream:
                if self._tied and name in _TIED:
                    tied[name] = whole(rows).detach()
                yield name, rows

        for name, rows in complete(
            noted(), {name: shape for name, (shape, _) in self.places.items()}
        ):
            yield name, rows, self.places[name][1]
        if len(tied) == 2 and not _same(*tied.values()):
            raise EngineError(
                "tensor 'lm_head.weight' differs from the embedding to which this model's head is tied"
            )


class Weights(NamedBuffers):
    """All weights of a decoder, in buffers that live as long as the engine."""

    def __init__(self, shape: Architecture, storage: Tensor | None = None) -> None:
        """Lay the buffers out in `storage`, float32 of `elements` or `NOWHERE`; in memory of their own without it."""
        self.storage = torch.empty(Weights(shape, NOWHERE).elements) if storage is None else storage
        empty = _Shelf(self.storage)
        self.embed = empty(shape.vocab, shape.hidden)
        self.head = self.embed if shape.tied else empty(shape.vocab, shape.hidden)
        self.norm = empty(shape.hidden)
        self.layers = [_allocate(shape, empty, layer) for layer in range(shape.layers)]
        self._tied = shape.tied
        self.places = {
            "model.embed_tokens.weight": (self.embed.shape, self.embed),
            "model.norm.weight": (self.norm.shape, self.norm),
        }
        if not shape.tied:
            self.places["lm_head.weight"] = (self.head.shape, self.head)
        for index, layer in enumerate(self.layers):
            for name, place in _places(layer, shape).items():
                self.places[f"model.layers.{index}.{name}"] = place
        self.elements = empty.used


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(
        a.float(), b.float(), rtol=0, atol=0, equal_nan=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """A low-rank adapter: scale · B A on some projections of every layer."""

    rank: int
    scale: float
    targets: tuple[Projection, ...]


class AdapterWeights(NamedBuffers):
    """One adapter's weights by their names in PEFT."""

    def __init__(self, shape: Architecture, adapter: AdapterShape, storage: Tensor) -> None:
        """Lay the buffers out in `storage`, float32 of `elements`, or as `NOWHERE`."""
        empty = _Shelf(storage)
        # of each layer by projection A [rank, inputs] and B [rows, rank], whose rows are in the order of `Layer`
        self.layers: list[dict[Projection, tuple[Tensor, Tensor]]] = []
        self.places = {}
        for index in range(shape.layers):
            self.layers.append({})
            for x in adapter.targets:
                rows, inputs = shape.projections[x]
                a, b = self.layers[-1][x] = empty(adapter.rank, inputs), empty(rows, adapter.rank)
                block = "mlp" if x in ("gate", "up", "down") else "self_attn"
                name = f"base_model.model.model.layers.{index}.{block}.{x}_proj.lora_"
                self.places |= {f"{name}A.weight": (a.shape, a)}
                self.places |= {
                    f"{name}B.weight": (b.shape, _paired(b, shape) if x in ("q", "k") else b)
                }
        self.elements = empty.used


def write_peft(
    folder: Path,
    base: str,
    tensors: dict[str, Tensor],
    *,
    rank: int,
    alpha: float,
    targets: Iterable[str],
) -> None:
    """Write an adapter, full `tensors` by PEFT name, of the model in folder `base`, complete or not at all."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(f"{target}_proj" for target in targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with atomic_folder(folder) as partial:
        described, held = (partial / name for name in ADAPTER_FILES)
        described.write_text(json.dumps(config, indent=2))
        save_file(tensors, str(held), metadata={"format": "pt"})


class _Shelf:
    """Hands out consecutive, aligned pieces of one storage in place of `torch.empty`."""

    def __init__(self, storage: Tensor) -> None:
        self._storage = storage
        self.used = 0

    def __call__(self, *size: int) -> Tensor:
        count = math.prod(size)
        start, self.used = self.used, self.used + _ALIGNED * math.ceil(count / _ALIGNED)
        if self._storage.is_meta:
            return torch.empty(size, device="meta")
        return self._storage[start : start + count].view(size)


def _allocate(shape: Architecture, empty: Callable[..., Tensor], number: int) -> Layer:
    hidden, rows = shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    experts = shape.experts if shape.experts and shape.experts.sparse[number] else None
    lead, ffn = ((experts.count,), experts.ffn) if experts else ((), shape.ffn)
    return Layer(
        input_norm=empty(hidden),
        qkv=empty(rows, hidden),
        qkv_bias=empty(rows) if shape.qkv_bias else None,
        q_norm=empty(shape.head_dim) if shape.qk_norm else None,
        k_norm=empty(shape.head_dim) if shape.qk_norm else None,
        out=empty(hidden, shape.heads * shape.head_dim),
        post_norm=empty(hidden),
        gate_up=empty(*lead, 2 * ffn, hidden),
        down=empty(*lead, hidden, ffn),
        router=empty(*lead, hidden) if experts else None,
    )


def _paired(buffer: Tensor, shape: Architecture) -> Tensor:
    """In Hugging Face's order, which rotates dimension i of a head with i + D/2.

    Here the two are neighbours, so that a rotation is one complex product.
    """
    pairs: Tensor = buffer.unflatten(0, (-1, shape.head_dim // 2, 2))
    return pairs.transpose(1, 2)


def _places(layer: Layer, shape: Architecture) -> dict[str, tuple[torch.Size, Tensor]]:
    places: dict[str, tuple[torch.Size, Tensor]] = {}

    def put(name: str, buffer: Tensor | None, *, paired: bool = False) -> None:
        if buffer is not None:
            places[name] = buffer.shape, _paired(buffer, shape) if paired else buffer

    def put_heads(kind: str, fused: Tensor | None) -> None:
        sizes = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
        for x, part in zip(
            "qkv", (None,) * 3 if fused is None else fused.split(sizes), strict=True
        ):
            put(f"self_attn.{x}_proj.{kind}", part, paired=x != "v")

    put("input_layernorm.weight", layer.input_norm)
    put_heads("weight", layer.qkv)
    put("self_attn.o_proj.weight", layer.out)
    put("post_attention_layernorm.weight", layer.post_norm)
    put("mlp.gate.weight", layer.router)
    mlps = {"mlp": (layer.gate_up, layer.down)}
    if layer.router is not None:
        mlps = {
            f"mlp.experts.{e}": pair
            for e, pair in enumerate(zip(layer.gate_up, layer.down, strict=True))
        }
    for name, (gate_up, down) in mlps.items():
        for x, part in zip(("gate", "up", "down"), (*gate_up.chunk(2), down), strict=True):
            put(f"{name}.{x}_proj.weight", part)
    put_heads("bias", layer.qkv_bias)
    put("self_attn.q_norm.weight", layer.q_norm, paired=True)
    put("self_attn.k_norm.weight", layer.k_norm, paired=True)
    return places
