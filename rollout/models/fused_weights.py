"""Weights of a decoder with fused projections, in buffers that live as long as the engine."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.models.architecture import Architecture
from rollout.models.named_buffers import (
    META_STORAGE,
    BufferAllocator,
    NamedBuffer,
    NamedBuffers,
    in_hugging_face_order,
)
from rollout.models.tensors import WEIGHT_UPDATE, RowBlocks, WeightStream, join_blocks

_EMBEDDING = "model.embed_tokens.weight"
_OUTPUT_LAYER = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one decoder layer; rotated dimensions of a head are stored as neighbouring pairs.

    H is the number of heads, KV that of key/value heads, D the size of a head. The feed-forward
    weights of a dense layer have no dimension of experts E.
    """

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(H + 2 KV) · D, hidden]
    qkv_bias: Tensor | None  # [(H + 2 KV) · D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Tensor  # [hidden, H · D]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [E, 2 · ffn, hidden]
    down: Tensor  # [E, hidden, ffn]
    router: Tensor | None = None  # [E, hidden]; None: the layer is dense


class DecoderWeights(NamedBuffers):
    """All weights of a decoder, by their Hugging Face names.

    If the output layer is tied to the embedding, `head` is the embedding's buffer, and `buffers` has
    no entry for the output layer.
    """

    def __init__(self, architecture: Architecture, storage: Tensor | None = None) -> None:
        """Lay the buffers out in `storage`, a flat tensor of `elements` numbers, or in new memory."""
        if storage is None:
            elements = DecoderWeights(architecture, META_STORAGE).elements  # counts them only
            storage = torch.empty(elements)
        allocator = BufferAllocator(storage)
        vocab = architecture.vocab
        hidden = architecture.hidden
        is_tied = architecture.tied

        self.storage = storage
        self.embed = allocator.allocate(vocab, hidden)
        self.head = self.embed if is_tied else allocator.allocate(vocab, hidden)
        self.norm = allocator.allocate(hidden)
        self.layers = [
            _allocate_layer(architecture, layer, allocator) for layer in range(architecture.layers)
        ]
        self.elements = allocator.used
        self._is_tied = is_tied

        self.buffers: dict[str, NamedBuffer] = {
            _EMBEDDING: NamedBuffer(shape=self.embed.shape, view=self.embed),
            "model.norm.weight": NamedBuffer(shape=self.norm.shape, view=self.norm),
        }
        if not is_tied:
            self.buffers[_OUTPUT_LAYER] = NamedBuffer(shape=self.head.shape, view=self.head)
        for number, layer_weights in enumerate(self.layers):
            layer_buffers = _name_layer_buffers(layer_weights, architecture)
            for name, buffer in layer_buffers.items():
                self.buffers[f"model.layers.{number}.{name}"] = buffer

    def with_destinations(
        self, stream: WeightStream, where: str = WEIGHT_UPDATE
    ) -> Iterator[tuple[str, RowBlocks, Tensor]]:
        """Yield each tensor of a stream with its destination, see `NamedBuffers`.

        Raises:
            EngineError: as in `NamedBuffers`, or the output layer is tied to the embedding and the
                stream gives them different values.
        """
        if not self._is_tied:
            yield from super().with_destinations(stream, where)
            return
        tied = _TiedTensors()
        yield from super().with_destinations(tied.watch(stream), where)
        tied.check(where)


class _TiedTensors:
    """Embedding and output layer of a stream whose model ties them."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def watch(self, stream: WeightStream) -> Iterator[tuple[str, RowBlocks]]:
        """Yield the tensors of a stream, and keep the embedding and the output layer."""
        for name, rows in stream:
            if name in (_EMBEDDING, _OUTPUT_LAYER):
                self._tensors[name] = join_blocks(rows).detach()
            yield name, rows

    def check(self, where: str) -> None:
        """Raise EngineError if both tensors came, and they are not equal."""
        if len(self._tensors) < 2:
            return
        embedding = self._tensors[_EMBEDDING].float()
        output_layer = self._tensors[_OUTPUT_LAYER].float()
        is_equal = embedding.shape == output_layer.shape and torch.allclose(
            embedding, output_layer, rtol=0, atol=0, equal_nan=True
        )
        if not is_equal:
            raise EngineError(
                f"{where}: tensor '{_OUTPUT_LAYER}' differs from the embedding to which this model's "
                "output layer is tied"
            )


def _allocate_layer(
    architecture: Architecture, layer: int, allocator: BufferAllocator
) -> LayerWeights:
    """Allocate the weights of one layer, dense or with experts."""
    hidden = architecture.hidden
    head_dim = architecture.head_dim
    qkv_rows = (architecture.heads + 2 * architecture.kv_heads) * head_dim
    allocate = allocator.allocate

    experts = architecture.experts
    if experts is not None and not experts.sparse[layer]:
        experts = None
    expert_dims: tuple[int, ...] = () if experts is None else (experts.count,)
    ffn = architecture.ffn if experts is None else experts.ffn

    # The arguments are evaluated in the order in which the buffers follow one another.
    return LayerWeights(
        input_norm=allocate(hidden),
        qkv=allocate(qkv_rows, hidden),
        qkv_bias=allocate(qkv_rows) if architecture.qkv_bias else None,
        q_norm=allocate(head_dim) if architecture.qk_norm else None,
        k_norm=allocate(head_dim) if architecture.qk_norm else None,
        out=allocate(hidden, architecture.heads * head_dim),
        post_norm=allocate(hidden),
        gate_up=allocate(*expert_dims, 2 * ffn, hidden),
        down=allocate(*expert_dims, hidden, ffn),
        router=allocate(*expert_dims, hidden) if experts is not None else None,
    )


def _name_layer_buffers(layer: LayerWeights, architecture: Architecture) -> dict[str, NamedBuffer]:
    """Return the buffers of a layer by their Hugging Face names without `model.layers.<n>.`."""
    head_dim = architecture.head_dim
    buffers: dict[str, NamedBuffer] = {}

    def add(name: str, buffer: Tensor | None) -> None:
        if buffer is not None:
            buffers[name] = NamedBuffer(shape=buffer.shape, view=buffer)

    def add_rotated(name: str, buffer: Tensor | None) -> None:
        if buffer is not None:
            view = in_hugging_face_order(buffer, head_dim)
            buffers[name] = NamedBuffer(shape=buffer.shape, view=view)

    def add_qkv(kind: str, fused: Tensor | None) -> None:
        if fused is None:
            return
        query_rows = architecture.heads * head_dim
        kv_rows = architecture.kv_heads * head_dim
        q, k, v = fused.split([query_rows, kv_rows, kv_rows])
        add_rotated(f"self_attn.q_proj.{kind}", q)
        add_rotated(f"self_attn.k_proj.{kind}", k)
        add(f"self_attn.v_proj.{kind}", v)

    def add_mlp(name: str, gate_up: Tensor, down: Tensor) -> None:
        gate, up = gate_up.chunk(2)
        add(f"{name}.gate_proj.weight", gate)
        add(f"{name}.up_proj.weight", up)
        add(f"{name}.down_proj.weight", down)

    add("input_layernorm.weight", layer.input_norm)
    add_qkv("weight", layer.qkv)
    add("self_attn.o_proj.weight", layer.out)
    add("post_attention_layernorm.weight", layer.post_norm)
    if layer.router is None:
        add_mlp("mlp", layer.gate_up, layer.down)
    else:
        add("mlp.gate.weight", layer.router)
        for expert, (gate_up, down) in enumerate(zip(layer.gate_up, layer.down, strict=True)):
            add_mlp(f"mlp.experts.{expert}", gate_up, down)
    add_qkv("bias", layer.qkv_bias)
    add_rotated("self_attn.q_norm.weight", layer.q_norm)
    add_rotated("self_attn.k_norm.weight", layer.k_norm)
    return buffers
