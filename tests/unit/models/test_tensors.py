"""Tensor files: buffers of older checkpoints are ignored, and errors name the model's folder."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_mas.megatron.state.tensor_sources import SafeTensors
from rollout.base.errors import EngineError
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.models.tensors import read_tensors, tensor_shapes
from rollout.sync.transport import SyncRoute, make_sender
from tests.support import reference

COMPUTED_BUFFERS = [
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.1.self_attn.rotary_emb.original_inv_freq",
    "model.layers.0.self_attn.rotary_emb.cos_cached",
    "model.layers.0.self_attn.rotary_emb.sin_cached",
    "model.layers.0.self_attn.bias",
    "model.layers.0.self_attn.masked_bias",
    "model.rotary_emb.inv_freq",
    "model.causal_mask",
    "model.position_ids",
    "rotary_emb.inv_freq",
]
FAMILIES = ["llama", "qwen2", "qwen3"]


def change_tensors(
    folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> None:
    """Replace the tensors of a model folder by what `change` returns for them."""
    path = folder / "model.safetensors"
    save_file(dict(change(load_file(path))), path, metadata={"format": "pt"})


def add_computed_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {name: torch.ones(4) for name in COMPUTED_BUFFERS}


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_that_a_model_computes_are_ignored(family: str, tmp_path: Path) -> None:
    reference.make_model(family, tmp_path)
    expected = dict(read_tensors(tmp_path))
    change_tensors(tmp_path, add_computed_buffers)

    tensors = dict(read_tensors(tmp_path))
    assert tensors.keys() == tensor_shapes(tmp_path).keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    source = SafeTensors(tmp_path)
    assert not any(name in source for name in COMPUTED_BUFFERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_loads_an_older_checkpoint(family: str, tmp_path: Path) -> None:
    reference.make_model(family, tmp_path)
    expected = dict(EmbeddedEngine.from_folder(tmp_path, max_length=64).decoder.weights.tensors())
    change_tensors(tmp_path, add_computed_buffers)

    engine = EmbeddedEngine.from_folder(tmp_path, max_length=64)
    weights = dict(engine.decoder.weights.tensors())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_an_update_of_an_older_checkpoint_needs_no_computed_buffers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    reference.make_model("llama", folder)
    weights = dict(read_tensors(folder))
    change_tensors(folder, add_computed_buffers)

    target = tmp_path / "updates"
    route = SyncRoute(transport="disk", target=str(target), model=str(folder))
    update = make_sender(route).send(weights.items(), 1)
    assert dict(read_tensors(update.location)).keys() == weights.keys()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda tensors: {n: t for n, t in tensors.items() if n != "model.norm.weight"},
            "tensor 'model.norm.weight' is missing",
        ),
        (
            lambda tensors: tensors | {"model.extra.weight": torch.ones(4)},
            "tensor 'model.extra.weight' is unknown to this model",
        ),
        (
            lambda tensors: tensors | {"model.norm.weight": torch.ones(4)},
            "tensor 'model.norm.weight' has shape [4]; expected",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_wrong_tensor_is_reported_with_its_folder(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], problem: str
) -> None:
    reference.make_model("llama", tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(EngineError, match=re.escape(f"{tmp_path}: {problem}")):
        EmbeddedEngine.from_folder(tmp_path, max_length=64)
