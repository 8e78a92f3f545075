"""Weight import (resharding): full Hugging Face tensors into any parallel layout, and folders of them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor

from mcore_mas.megatron.state.names import LazyTensor, WeightMapping, weight_mappings
from rollout.base.errors import ModelError
from rollout.base.files import atomic_folder
from rollout.models.architecture import Architecture
from rollout.models.tensors import TensorFiles


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
            target = local[entry.parameter]
            tp, rank = tensor_parallel(entry)
            full = {name: source(name) for name in entry.tensors}
            for name, shape in entry.shapes(target.shape, architecture, tp).items():
                if full[name].shape != shape:
                    raise ModelError(f"tensor '{name}' has shape {full[name].shape}; config.json makes it {shape}")
            entry.sharding.fill(target, list(full.values()), architecture, tp, rank)


def full_shapes(local: Mapping[str, Tensor], architecture: Architecture) -> dict[str, tuple[int, ...]]:
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
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def write_folder(like: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write a Hugging Face folder with the config and tokenizer of `like` and these weights, complete or not at all.

    Weights with a value head make it a model for sequence classification with one label, as transformers calls it.
    """
    weights = shutil.ignore_patterns("*.safetensors", "*.index.json", "*.bin")
    with atomic_folder(folder) as partial:
        shutil.copytree(like, partial, ignore=weights, dirs_exist_ok=True)
        if "score.weight" in tensors:
            config = json.loads((partial / "config.json").read_text())
            names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
            config |= {"architectures": names, "id2label": {"0": "value"}, "label2id": {"value": 0}}
            (partial / "config.json").write_text(json.dumps(config, indent=2))
        save_file(tensors, str(partial / "model.safetensors"), metadata={"format": "pt"})


# transformers writes one tensor for every expert, as models are published, or with save_original_format=False stacks
# of all of a layer's
_EXPERT = re.compile(r"(?P<stack>.*\.experts\.)(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
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
        return stack.part((slice(expert, expert + 1), slice(first + start, first + stop), index[1]))[0]

    return LazyTensor(shape=(rows, stack.shape[2]), part=part)


class RandomTensors:
    """Weights nobody has trained: normal matrices, norms of 1, biases of 0; a tensor is its name, shape and seed.

    So every layout starts from the same model, at the price of each rank drawing what it then cuts.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, std: float, seed: int) -> None:
        """`shapes` by Hugging Face name; `std` of the matrices."""
        self._shapes = shapes
        self._std = std
        self._seed = seed

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __call__(self, name: str) -> LazyTensor:
        """The tensor of this name, drawn when it is read."""
        return LazyTensor(shape=self._shapes[name], part=lambda index: self._draw(name)[index])

    def _draw(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(shape, generator=generator) * self._std
