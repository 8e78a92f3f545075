"""Model weights: safetensors files, full tensors in blocks of rows, and checksums (XXH3)."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.models.tensor_files import open_tensors, tensor_files

RowBlocks = Tensor | Sequence[Tensor]  # a full tensor, or consecutive blocks of its rows
WEIGHT_UPDATE = "the weight update"  # source of a trainer's stream, for errors
WeightStream = Iterable[tuple[str, RowBlocks]]  # Hugging Face name and tensor, one at a time
_Key = TypeVar("_Key")

# Buffers that older checkpoints contain, but that models compute: rotary frequencies and their
# cosines and sines, masks and positions of attention.
_COMPUTED_BUFFER = re.compile(
    r"(.*\.)?(rotary_emb\..+|inv_freq|causal_mask|masked_bias|position_ids|self_attn\.bias)"
)


def blocks_of(rows: RowBlocks) -> Sequence[Tensor]:
    """Return the blocks; a full tensor is one block."""
    return [rows] if isinstance(rows, Tensor) else rows


def join_blocks(rows: RowBlocks) -> Tensor:
    """Return the full tensor; several blocks are copied into one."""
    blocks = blocks_of(rows)
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))


def shape_of(rows: RowBlocks) -> torch.Size:
    """Return the shape of the full tensor."""
    if isinstance(rows, Tensor):
        return rows.shape
    return torch.Size((sum(len(block) for block in rows), *rows[0].shape[1:]))


def split_like(target: Tensor, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split `target` along its first dimension into one part for each block.

    `target` has the elements of all blocks in the same order, but its first dimension may count
    several rows as one.
    """
    if len(blocks) == 1:
        return [target]
    rows = sum(len(block) for block in blocks)
    parts: Sequence[Tensor] = target.split([len(block) * len(target) // rows for block in blocks])
    return parts


def buckets(
    tensors: Iterable[tuple[_Key, Tensor]], limit: int
) -> Iterator[list[tuple[_Key, Tensor]]]:
    """Group a stream of tensors into lists of at most `limit` bytes, or of one larger tensor."""
    bucket: list[tuple[_Key, Tensor]] = []
    size = 0
    for key, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket = []
            size = 0
        bucket.append((key, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


class TensorFiles:
    """Tensors of safetensors files by Hugging Face name. Only the slices that are used are read.

    Buffers that a model computes are ignored, as transformers does: checkpoints of the first
    generations of Llama, Qwen and Mistral have, for example, `rotary_emb.inv_freq` in every layer.

    Attributes:
        where: the folder, for errors.
    """

    def __init__(self, folder: Path | str, *files: Path) -> None:
        """Open `files`, or the files of the folder's index, or else all safetensors files in it.

        Raises:
            ModelError: there is no file, or one cannot be read.
        """
        self.where = folder
        self._file_of: dict[str, Any] = {}
        for path in files or tensor_files(folder):
            file = open_tensors(path, "pt")
            for name in file.keys():  # noqa: SIM118  (a safetensors file is not iterable)
                if _COMPUTED_BUFFER.fullmatch(name) is None:
                    self._file_of[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def read(self, name: str) -> Tensor:
        """Return the full tensor."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def sliced(self, name: str) -> Any:
        """Return safetensors' slice of the tensor: `get_shape()`, and `[slices]` for a part."""
        return self._file_of[name].get_slice(name)


def read_tensors(folder: Path | str) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of all tensors in a folder."""
    files = TensorFiles(folder)
    return ((name, files.read(name)) for name in files)


def tensor_shapes(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a folder by name; only file headers are read."""
    files = TensorFiles(folder)
    return {name: tuple(files.sliced(name).get_shape()) for name in files}


def check_stream(
    weights: WeightStream, shapes: Mapping[str, Sequence[int]], where: str = WEIGHT_UPDATE
) -> Iterator[tuple[str, RowBlocks]]:
    """Yield the tensors of a stream, and check that they are exactly those of `shapes`.

    An output layer that `shapes` does not have is dropped: it is tied to the embedding.

    Args:
        weights: stream of the tensors.
        shapes: expected shape of each tensor by name.
        where: folder or other source of the stream, for errors.

    Raises:
        EngineError: a tensor is missing, unknown, repeated or of another shape.
    """
    missing = dict(shapes)
    for name, rows in weights:
        if name not in missing:
            if name == "lm_head.weight" and name not in shapes:
                continue
            problem = "comes twice" if name in shapes else "is unknown to this model"
            raise EngineError(f"{where}: tensor '{name}' {problem}")
        expected = list(missing.pop(name))
        if list(shape_of(rows)) != expected:
            raise EngineError(
                f"{where}: tensor '{name}' has shape {list(shape_of(rows))}; expected {expected}"
            )
        yield name, rows
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise EngineError(f"{where}: tensor '{next(iter(missing))}'{more} is missing")


def compare_checksums(engine: Mapping[str, str], trainer: Mapping[str, str], version: int) -> None:
    """Check that an engine's checksums are the trainer's, for all tensors that both name.

    Raises:
        EngineError: names the first tensor that differs.
    """
    differ = [name for name, value in trainer.items() if name in engine and engine[name] != value]
    if differ:
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise EngineError(
            f"tensor '{differ[0]}'{more}: the engine's bytes differ from the trainer's at version "
            f"{version}; the weight sync is broken"
        )


_COPIED_BYTES = 1 << 19  # copied at a time, so that the checksum reads them from the CPU's cache


def checksum(tensor: Tensor) -> str:
    """Return the XXH3 checksum of a tensor's shape and bytes, as 32 hexadecimal digits."""
    digest = _begin_checksum(tensor.shape)
    digest.update(_flat_bytes(tensor.detach().cpu().contiguous()).data)
    return digest.hexdigest()


def copy_with_checksum(rows: RowBlocks, target: Tensor) -> str:
    """Copy a tensor into the float32 `target`; return the checksum of what was copied.

    Args:
        target: has the same elements in the same order, but may have another shape and strides.
    """
    digest = _begin_checksum(shape_of(rows))
    blocks = blocks_of(rows)
    for block, destination in zip(blocks, split_like(target, blocks), strict=True):
        data = block.detach().to("cpu", torch.float32).contiguous()
        source = _flat_bytes(data)
        if not destination.is_contiguous():
            destination.copy_(data.view(destination.shape))
            digest.update(source.data)
            continue
        flat_destination = _flat_bytes(destination)
        for first in range(0, len(source), _COPIED_BYTES):
            part = source[first : first + _COPIED_BYTES]
            flat_destination[first : first + _COPIED_BYTES] = part
            digest.update(part.data)
    return digest.hexdigest()


def _begin_checksum(shape: Sequence[int]) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(str(list(shape)).encode())


def _flat_bytes(tensor: Tensor) -> np.ndarray:
    """Return the memory of a contiguous CPU tensor as bytes."""
    flat: np.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    return flat
