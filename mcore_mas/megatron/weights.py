"""Hugging Face tensors into any tensor-parallel layout, and back out as a stream of full tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_mas.megatron.models import Architecture, ModelError
from mcore_mas.megatron.names import entries


class TensorFolder:
    """Lazy access by name to the safetensors of a Hugging Face folder, sharded or not."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`.

        Raises:
            ModelError: it holds no safetensors.
        """
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.is_file():
            files = json.loads(index.read_text())["weight_map"]
        elif single.is_file():
            with safe_open(str(single), "pt") as tensors:
                files = dict.fromkeys(tensors.keys(), single.name)
        else:
            raise ModelError(f"{folder}: no weights here; expected model.safetensors or its index")
        self._folder = folder
        self._files: dict[str, str] = files

    def __call__(self, name: str) -> Tensor:
        """Read one tensor from disk."""
        if name not in self._files:
            raise ModelError(f"{self._folder}: no tensor '{name}'; is config.json of the same model?")
        with safe_open(str(self._folder / self._files[name]), "pt") as tensors:
            return tensors.get_tensor(name)


def scatter(local: Mapping[str, Tensor], architecture: Architecture, read: Callable[[str], Tensor]) -> None:
    """Fill this rank's shards from full tensors, holding one Megatron parameter's tensors at a time.

    Args:
        local: this rank's tensors by Megatron parameter name, written in place.
        read: full tensor by Hugging Face name.

    Raises:
        ModelError: a shard and its tensors differ in shape.
    """
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for entry in entries(local):
            shard = entry.cut.split([read(name) for name in entry.tensors], architecture, tp)[rank]
            target = local[entry.parameter]
            if shard.shape != target.shape:
                names = ", ".join(entry.tensors)
                raise ModelError(f"{names}: shape gives a shard {tuple(shard.shape)}, expected {tuple(target.shape)}")
            target.copy_(shard)


def gather(local: Mapping[str, Tensor], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, full tensor) from this rank's shards; every tensor-parallel rank must drain it.

    Args:
        local: this rank's tensors by Megatron parameter name: parameters, or anything shaped like them.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    for entry in entries(local):
        mine = local[entry.parameter].detach().contiguous()
        shards = [mine]
        if tp > 1:
            shards = [torch.empty_like(mine) for _ in range(tp)]
            dist.all_gather(shards, mine, group=group)
        yield from zip(entry.tensors, entry.cut.join(shards, architecture), strict=True)


def write_folder(like: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write a Hugging Face folder with the config and tokenizer of `like` and these weights, complete or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(like, partial, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", "*.bin"))
    save_file(tensors, str(partial / "model.safetensors"), metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
