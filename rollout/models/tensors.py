"""Model weights: tensors in safetensors files, the shapes that a model has, and full tensors in blocks of rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout.base.errors import EngineError, ModelError

RowBlocks = Tensor | Sequence[Tensor]  # a full tensor, or blocks of its rows in their order


def blocks_of(rows: RowBlocks) -> Sequence[Tensor]:
    """The blocks; a full tensor is one."""
    return [rows] if isinstance(rows, Tensor) else rows


def whole(rows: RowBlocks) -> Tensor:
    """The full tensor; blocks are copied, unless there is just one."""
    blocks = blocks_of(rows)
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))


def shape_of(rows: RowBlocks) -> torch.Size:
    """Shape of the full tensor."""
    if isinstance(rows, Tensor):
        return rows.shape
    return torch.Size((sum(len(block) for block in rows), *rows[0].shape[1:]))


def cut(target: Tensor, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """The part of `target` for each block, cut in its first dimension, which may stand for several rows."""
    if len(blocks) == 1:
        return [target]
    rows = sum(len(block) for block in blocks)
    parts: Sequence[Tensor] = target.split([len(block) * len(target) // rows for block in blocks])
    return parts


class TensorFiles:
    """The tensors in safetensors files, by Hugging Face name; what is read of them is what is sliced."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Map `files`.

        Raises:
            ModelError: one cannot be read.
        """
        self.where = files[0].parent
        self._files: dict[str, Any] = {}  # opened file by the name of each tensor in it
        for file in files:
            try:
                opened: Any = safe_open(str(file), "pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file}: not a readable safetensors file ({error})") from error
            self._files |= dict.fromkeys(opened.keys(), opened)

    @classmethod
    def of_folder(cls, folder: Path | str) -> Self:
        """Those of a Hugging Face folder: what its index names, else all of them.

        Raises:
            ModelError: there are none, or one cannot be read.
        """
        index = Path(folder) / "model.safetensors.index.json"
        if index.is_file():
            files = {index.with_name(name) for name in json.loads(index.read_text())["weight_map"].values()}
        else:
            files = set(Path(folder).glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder}: no *.safetensors file; expected a Hugging Face model folder")
        return cls(sorted(files))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def sliced(self, name: str) -> Any:
        """The tensor as safetensors cuts it: `get_shape()`, and `[slices]` for a part."""
        return self._files[name].get_slice(name)


def read_tensors(folder: Path | str) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of all in a folder, one at a time.

    Raises:
        ModelError: there are none, or a file cannot be read.
    """
    files = TensorFiles.of_folder(folder)
    return ((name, files.read(name)) for name in files)


def tensor_shapes(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor of a folder, from the files' headers alone.

    Raises:
        ModelError: there are none, or a file cannot be read.
    """
    files = TensorFiles.of_folder(folder)
    return {name: tuple(files.sliced(name).get_shape()) for name in files}


def complete(
    weights: Iterable[tuple[str, RowBlocks]], manifest: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Pass on full tensors as long as `manifest` has their names and shapes; a tied head's second name is left out.

    Raises:
        EngineError: names the tensor that is missing, unknown, repeated or of another shape.
    """
    left = dict(manifest)
    for name, rows in weights:
        if name not in left:
            if name == "lm_head.weight" and name not in manifest:
                continue
            raise EngineError(f"tensor '{name}' {'comes twice' if name in manifest else 'is unknown to this model'}")
        shape, tensor = left.pop(name), whole(rows)
        if tuple(tensor.shape) != shape:
            raise EngineError(f"tensor '{name}' has shape {list(tensor.shape)}; expected {list(shape)}")
        yield name, tensor
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise EngineError(f"tensor '{next(iter(left))}'{more} is missing from the update")


def compare(engine: Mapping[str, str], trainer: Mapping[str, str], version: int) -> None:
    """Hold an engine's checksums against the trainer's; tensors that only one side names are not compared.

    Raises:
        EngineError: names the first tensor that differs.
    """
    differ = [name for name, value in trainer.items() if name in engine and engine[name] != value]
    if differ:
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise EngineError(
            f"tensor '{differ[0]}'{more}: the engine's bytes differ from the trainer's at version {version}; "
            "the hand-over is broken"
        )
