"""Blocks of checkpoints: together they cover every tensor, and each says where it belongs."""

import pytest
import torch
from torch import Tensor

from mcore_mas.megatron.state.tensor_blocks import TensorBlock, tensor_blocks
from mcore_mas.megatron.state.tensor_sources import LazyTensor
from mcore_mas.megatron.state.weight_import import (
    BY_COLUMNS,
    VOCAB,
    WHOLE,
    WeightMapping,
    weight_mappings,
)
from rollout.models.architecture import Architecture, read_architecture
from tests.support import reference

PARAMETERS = [
    "embedding.word_embeddings.weight",
    "decoder.layers.3.self_attention.linear_qkv.weight",
    "decoder.layers.3.self_attention.linear_qkv.bias",
    "decoder.layers.3.self_attention.linear_proj.weight",
    "decoder.layers.3.mlp.linear_fc1.weight",
    "decoder.layers.3.input_layernorm.weight",
]


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    """Return an architecture with four heads, two key/value heads and an odd vocabulary."""
    folder = tmp_path_factory.mktemp("model")
    reference.make_model("qwen2", folder)
    return read_architecture(folder)


def full_tensors(mapping: WeightMapping, architecture: Architecture) -> dict[str, Tensor]:
    """Return the Hugging Face tensors of a parameter; all their elements are different numbers."""
    hidden = architecture.hidden
    query_rows = architecture.heads * architecture.head_dim
    kv_rows = architecture.kv_heads * architecture.head_dim
    sizes = {
        "embed_tokens": (architecture.vocab, hidden),
        "q_proj": (query_rows, hidden),
        "k_proj": (kv_rows, hidden),
        "v_proj": (kv_rows, hidden),
        "o_proj": (hidden, query_rows),
        "gate_proj": (architecture.ffn, hidden),
        "up_proj": (architecture.ffn, hidden),
        "input_layernorm": (hidden,),
    }
    tensors = {}
    for number, name in enumerate(mapping.tensors):
        size = torch.Size(sizes[name.split(".")[-2]])
        if name.endswith("bias"):
            size = size[:1]
        tensors[name] = (torch.arange(size.numel()) + number * 1_000_000).view(size)
    return tensors


def make_shard(
    mapping: WeightMapping,
    full: dict[str, Tensor],
    architecture: Architecture,
    tp: int,
    rank: int,
) -> Tensor:
    """Return the shard of one of `tp` ranks."""
    tensors = list(full.values())
    first = tensors[0]
    rows = sum(len(tensor) for tensor in tensors) // tp
    if mapping.sharding == WHOLE:
        shape: tuple[int, ...] = tuple(first.shape)
    elif mapping.sharding == BY_COLUMNS:
        shape = (len(first), first.shape[-1] // tp)
    elif mapping.sharding == VOCAB:
        shape = (architecture.vocab_padded(tp) // tp, *first.shape[1:])
    else:
        shape = (rows, *first.shape[1:])
    shard = torch.zeros(shape, dtype=torch.int64)
    sources = [LazyTensor.of(tensor) for tensor in tensors]
    mapping.sharding.fill(shard, sources, architecture, tp, rank)
    return shard


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_of_all_ranks_cover_the_tensors(
    architecture: Architecture, parameter: str, tp: int
) -> None:
    (mapping,) = weight_mappings([parameter])
    full = full_tensors(mapping, architecture)
    assembled = {name: torch.full_like(tensor, -1) for name, tensor in full.items()}
    times_covered = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    for rank in range(tp):
        shard = make_shard(mapping, full, architecture, tp, rank)
        flat = shard.reshape(-1)
        third = len(flat) // 3  # for a matrix, this is within a row
        for first, end in [(0, third), (third, third + 1), (third + 1, len(flat))]:
            span = (first, end)
            for block in tensor_blocks(mapping, shard.shape, architecture, tp, rank, span):
                assert block.shape == tuple(full[block.tensor].shape)
                index = tuple(
                    slice(start, start + size)
                    for start, size in zip(block.start, block.size, strict=True)
                )
                assembled[block.tensor][index] = block.view_in(flat[first:end], first)
                times_covered[block.tensor][index] += 1

    copies = tp if parameter.endswith("layernorm.weight") else 1
    for name, tensor in full.items():
        assert torch.equal(assembled[name], tensor), name
        assert bool((times_covered[name] == copies).all()), name


def test_a_span_of_a_matrix_is_split_into_rectangles(architecture: Architecture) -> None:
    (mapping,) = weight_mappings(["decoder.layers.3.mlp.linear_fc1.weight"])
    hidden = architecture.hidden
    ffn = architecture.ffn
    half = ffn // 2  # rows of gate, and of up, on each of two ranks
    # On the second rank, from the third row of gate into the first row of up.
    span = (2 * hidden + 3, half * hidden + 5)
    blocks = tensor_blocks(mapping, (ffn, hidden), architecture, 2, 1, span)
    prefix = "model.layers.3.mlp."
    assert [(block.tensor, block.start, block.size, block.offset) for block in blocks] == [
        (f"{prefix}gate_proj.weight", (half + 2, 3), (1, hidden - 3), 2 * hidden + 3),
        (f"{prefix}gate_proj.weight", (half + 3, 0), (half - 3, hidden), 3 * hidden),
        (f"{prefix}up_proj.weight", (half, 0), (1, 5), half * hidden),
    ]
    assert blocks[0].key == f"{prefix}gate_proj.weight[{half + 2}:{half + 3},3:{hidden}]"


def make_block(start: tuple[int, int], size: tuple[int, int]) -> TensorBlock:
    return TensorBlock(tensor="t", shape=(9, 9), start=start, size=size, offset=0)


def test_the_intersection_of_two_blocks() -> None:
    block = make_block(start=(2, 3), size=(4, 5))
    overlapping = make_block(start=(4, 0), size=(5, 5))
    assert block.intersection(overlapping) == (
        (slice(2, 4), slice(0, 2)),
        (slice(0, 2), slice(3, 5)),
    )
    assert block.intersection(make_block(start=(6, 3), size=(1, 1))) is None
