"""Sources of full tensors, of which a rank reads only the parts that its shards hold."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from rollout.base.errors import ModelError
from rollout.models.tensors import TensorFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTensor:
    """A full tensor that is read in parts.

    Attributes:
        shape: shape of the tensor.
        part: function that reads the elements at a tuple of slices, one for each dimension.
    """

    shape: tuple[int, ...]
    part: Callable[[tuple[slice, ...]], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """Wrap a tensor in memory."""
        return cls(shape=tuple(tensor.shape), part=tensor.__getitem__)

    def read(self, *index: slice) -> Tensor:
        """Read slices of the first dimensions, and all of the others."""
        return self.part(index + (slice(None),) * (len(self.shape) - len(index)))


# transformers writes one tensor for every expert, as models are published. With
# save_original_format=False it writes one stack for all experts of a layer.
_EXPERT_NAME = re.compile(
    r"(?P<stack>.*\.experts\.)(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight"
)
_STACK_NAMES = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


class SafeTensors(TensorFiles):
    """Tensors of safetensors files; only the slices that are read are loaded."""

    def __call__(self, name: str) -> LazyTensor:
        """Return the tensor of this name; an expert's is also found in a stack of experts.

        Raises:
            ModelError: the files have no such tensor.
        """
        if name in self:
            return self._lazy_tensor(name)
        expert = _EXPERT_NAME.fullmatch(name)
        if expert is not None:
            stack = expert["stack"] + _STACK_NAMES[expert["projection"]]
            if stack in self:
                number = int(expert["expert"])
                return _expert_of_stack(self._lazy_tensor(stack), number, expert["projection"])
        raise ModelError(f"{self.where}: no tensor '{name}'; is config.json of the same model?")

    def _lazy_tensor(self, name: str) -> LazyTensor:
        tensor = self.sliced(name)
        return LazyTensor(shape=tuple(tensor.get_shape()), part=tensor.__getitem__)


def _expert_of_stack(stack: LazyTensor, expert: int, projection: str) -> LazyTensor:
    """Return one expert's matrix in a stack [E, rows, columns].

    Gate projections are the first half of the rows, up projections the second half.
    """
    rows = stack.shape[1] // (1 if projection == "down" else 2)
    first_row = rows if projection == "up" else 0

    def part(index: tuple[slice, ...]) -> Tensor:
        row_index, column_index = index
        start, stop, _ = row_index.indices(rows)
        stack_rows = slice(first_row + start, first_row + stop)
        return stack.part((slice(expert, expert + 1), stack_rows, column_index))[0]

    return LazyTensor(shape=(rows, stack.shape[2]), part=part)


@dataclass(frozen=True)
class RandomTensors:
    """Initial weights: normally distributed matrices, norm weights of 1, and biases of 0.

    A tensor depends on its name, its shape and the seed alone, so every layout starts from the
    same model. Each rank draws a whole tensor and takes its part.

    Attributes:
        shapes: shapes of the tensors by Hugging Face name.
        std: standard deviation of the matrices.
        seed: seed of all tensors.
    """

    shapes: Mapping[str, tuple[int, ...]]
    _: KW_ONLY
    std: float
    seed: int

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def __call__(self, name: str) -> LazyTensor:
        """Return the tensor of this name, which is drawn when it is read."""
        return LazyTensor(shape=self.shapes[name], part=lambda index: self.draw(name)[index])

    def draw(self, name: str) -> Tensor:
        """Return the whole tensor of this name."""
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(shape, generator=generator) * self.std
