"""Where full tensors come from, by Hugging Face name, read in parts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.base.errors import ModelError
from rollout.models.tensors import TensorFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A full tensor that is somewhere else."""

    shape: tuple[int, ...]
    part: Callable[[tuple[slice, ...]], Tensor]  # one slice for each dimension -> what it holds there

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        """One that is here."""
        return cls(shape=tuple(tensor.shape), part=tensor.__getitem__)

    def read(self, *index: slice) -> Tensor:
        """A part of it: slices of its first dimensions, all of the others."""
        return self.part(index + (slice(None),) * (len(self.shape) - len(index)))


# transformers writes one tensor for every expert, as models are published, or with save_original_format=False stacks
# of all of a layer's
_EXPERT = re.compile(r"(?P<stack>.*\.experts\.)(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
_STACKS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


class SafeTensors(TensorFiles):
    """Tensors of safetensors files as sources; what is read of them is what is sliced."""

    def __call__(self, name: str) -> Source:
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

    def _slice(self, name: str) -> Source:
        tensor = self.sliced(name)
        return Source(shape=tuple(tensor.get_shape()), part=tensor.__getitem__)


def _place(stack: Source, expert: int, projection: str) -> Source:
    """One expert's matrix in a stack [E, rows, columns]; gates are the first half of the rows, ups the second."""
    rows = stack.shape[1] // (1 if projection == "down" else 2)
    first = rows if projection == "up" else 0

    def part(index: tuple[slice, ...]) -> Tensor:
        start, stop, _ = index[0].indices(rows)
        return stack.part((slice(expert, expert + 1), slice(first + start, first + stop), index[1]))[0]

    return Source(shape=(rows, stack.shape[2]), part=part)


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

    def __call__(self, name: str) -> Source:
        """The tensor of this name, drawn when it is read."""
        return Source(shape=self._shapes[name], part=lambda index: self._draw(name)[index])

    def _draw(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(shape, generator=generator) * self._std
