"""Tensors of a model: their names and shapes (the manifest), and full tensors in blocks of neighbouring rows."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollout.base.errors import EngineError

Rows = Tensor | Sequence[Tensor]  # a full tensor, or blocks of its rows in their order


def blocks_of(rows: Rows) -> Sequence[Tensor]:
    """The blocks; a full tensor is one."""
    return [rows] if isinstance(rows, Tensor) else rows


def whole(rows: Rows) -> Tensor:
    """The full tensor; blocks are copied, unless there is just one."""
    blocks = blocks_of(rows)
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))


def shape_of(rows: Rows) -> torch.Size:
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


def read_manifest(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor in the safetensors of `folder`, from their headers alone.

    Raises:
        EngineError: there are none, or one cannot be read.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder}: no *.safetensors file; expected a Hugging Face model folder")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                (size,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(size))
        except (OSError, ValueError, struct.error) as error:
            raise EngineError(f"{file}: not readable as safetensors ({error})") from error
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def complete(
    weights: Iterable[tuple[str, Rows]], manifest: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Pass on full tensors as long as they are what `manifest` says; a second name of a tied head is left out.

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
