"""Every element of every tensor lies in one piece, and the piece says where."""

import pytest
import torch

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
    """Two key/value heads, four heads; the vocabulary is odd."""
    folder = tmp_path_factory.mktemp("model")
    reference.make_model("qwen2", folder)
    return read_architecture(folder)


def full_tensors(entry: WeightMapping, a: Architecture) -> list[torch.Tensor]:
    """The entry's Hugging Face tensors, each element with a number of its own."""
    sizes = {
        "embed_tokens": (a.vocab, a.hidden),
        "q_proj": (a.heads * a.head_dim, a.hidden),
        "k_proj": (a.kv_heads * a.head_dim, a.hidden),
        "v_proj": (a.kv_heads * a.head_dim, a.hidden),
        "o_proj": (a.hidden, a.heads * a.head_dim),
        "gate_proj": (a.ffn, a.hidden),
        "up_proj": (a.ffn, a.hidden),
        "input_layernorm": (a.hidden,),
    }
    tensors = []
    for number, name in enumerate(entry.tensors):
        size = sizes[name.split(".")[-2]][: 1 if name.endswith("bias") else 2]
        count = torch.Size(size).numel()
        tensors.append((torch.arange(count) + number * 1_000_000).view(size))
    return tensors


def shard_of(
    entry: WeightMapping, full: list[torch.Tensor], a: Architecture, tp: int, rank: int
) -> torch.Tensor:
    """What one rank of `tp` holds of the entry's tensors."""
    rows, rest = sum(len(tensor) for tensor in full) // tp, full[0].shape[1:]
    shapes = {
        WHOLE: full[0].shape,
        BY_COLUMNS: (len(full[0]), full[0].shape[-1] // tp),
        VOCAB: (a.vocab_padded(tp) // tp, *rest),
    }
    shard = torch.zeros(shapes.get(entry.sharding, (rows, *rest)), dtype=torch.int64)
    entry.sharding.fill(shard, [LazyTensor.of(tensor) for tensor in full], a, tp, rank)
    return shard


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("tp", [1, 2])
def test_pieces_of_all_ranks_are_the_tensors(
    architecture: Architecture, parameter: str, tp: int
) -> None:
    (entry,) = weight_mappings([parameter])
    full = dict(zip(entry.tensors, full_tensors(entry, architecture), strict=True))
    found = {name: torch.full_like(tensor, -1) for name, tensor in full.items()}
    seen = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    for rank in range(tp):
        shard = shard_of(entry, list(full.values()), architecture, tp, rank)
        flat = shard.reshape(-1)
        third = len(flat) // 3  # inside a row, for a matrix
        for span in [(0, third), (third, third + 1), (third + 1, len(flat))]:
            for piece in tensor_blocks(entry, shard.shape, architecture, tp, rank, span):
                assert piece.shape == tuple(full[piece.tensor].shape)
                place = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
                own = flat[span[0] : span[1]]
                found[piece.tensor][place] = piece.of(own, span[0])
                seen[piece.tensor][place] += 1
    times = tp if parameter.endswith("layernorm.weight") else 1
    for name, tensor in full.items():
        assert torch.equal(found[name], tensor), name
        assert bool((seen[name] == times).all()), name


def test_a_stretch_of_a_matrix_is_at_most_three_rectangles_a_block(
    architecture: Architecture,
) -> None:
    (entry,) = weight_mappings(["decoder.layers.3.mlp.linear_fc1.weight"])
    hidden, ffn = architecture.hidden, architecture.ffn
    span = (
        2 * hidden + 3,
        (ffn // 2) * hidden + 5,
    )  # of rank 1 of 2: from gate's third row into up's first
    pieces = tensor_blocks(entry, (ffn, hidden), architecture, 2, 1, span)
    assert [
        (piece.tensor.split(".")[-2], piece.start, piece.size, piece.offset) for piece in pieces
    ] == [
        ("gate_proj", (ffn // 2 + 2, 3), (1, hidden - 3), 2 * hidden + 3),
        ("gate_proj", (ffn // 2 + 3, 0), (ffn // 2 - 3, hidden), 3 * hidden),
        ("up_proj", (ffn // 2, 0), (1, 5), ffn // 2 * hidden),
    ]
    assert (
        pieces[0].key
        == f"model.layers.3.mlp.gate_proj.weight[{ffn // 2 + 2}:{ffn // 2 + 3},3:{hidden}]"
    )


def test_what_two_rectangles_have_in_common() -> None:
    one = TensorBlock(tensor="t", shape=(9, 9), start=(2, 3), size=(4, 5), offset=0)
    other = TensorBlock(tensor="t", shape=(9, 9), start=(4, 0), size=(5, 5), offset=0)
    assert one.common(other) == ((slice(2, 4), slice(0, 2)), (slice(0, 2), slice(3, 5)))
    assert (
        one.common(TensorBlock(tensor="t", shape=(9, 9), start=(6, 3), size=(1, 1), offset=0))
        is None
    )
