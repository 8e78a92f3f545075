"""Weight import (resharding): full Hugging Face tensors into any parallel layout, and folders of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor

from mcore_mas.megatron.state.names import Entry, entries
from mcore_mas.megatron.state.sources import Source
from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture


def scatter(local: Mapping[str, Tensor], architecture: Architecture, source: Callable[[str], Source]) -> None:
    """Fill this rank's shards, reading no more than them: one Megatron parameter at a time, in place.

    Args:
        local: this rank's tensors by Megatron parameter name, written in place.
        source: full tensor by Hugging Face name.

    Raises:
        ModelError: a tensor has not the shape that the architecture gives it.
    """
    with torch.no_grad():
        for entry in entries(local, tied=architecture.tied):
            target = local[entry.parameter]
            tp, rank = tensor_parallel(entry)
            full = [source(name) for name in entry.tensors]
            for name, tensor, shape in zip(
                entry.tensors, full, entry.shapes(target.shape, architecture, tp), strict=True
            ):
                if tensor.shape != shape:
                    raise ModelError(f"tensor '{name}' has shape {tensor.shape}; config.json makes it {shape}")
            entry.cut.fill(target, full, architecture, tp, rank)


def shapes(local: Mapping[str, Tensor], architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The shapes, by Hugging Face name, of the full tensors that this rank holds shards of."""
    return {
        name: shape
        for entry in entries(local, tied=architecture.tied)
        for name, shape in zip(
            entry.tensors,
            entry.shapes(local[entry.parameter].shape, architecture, tensor_parallel(entry)[0]),
            strict=True,
        )
    }


def tensor_parallel(entry: Entry) -> tuple[int, int]:
    """How many ranks cut this parameter, and which of them this is."""
    if entry.expert:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def write_folder(like: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write a Hugging Face folder with the config and tokenizer of `like` and these weights, complete or not at all.

    Weights with a value head make it a model for sequence classification with one label, as transformers calls it.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(like, partial, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", "*.bin"))
    if "score.weight" in tensors:
        config = json.loads((partial / "config.json").read_text())
        names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
        config |= {"architectures": names, "id2label": {"0": "value"}, "label2id": {"value": 0}}
        (partial / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, str(partial / "model.safetensors"), metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
