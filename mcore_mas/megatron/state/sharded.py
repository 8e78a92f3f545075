"""Sharded checkpoints: every rank writes its part of weights and moments in blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from mcore_mas.megatron.collectives import all_gather_json
from mcore_mas.megatron.host_memory import BlockMemory
from mcore_mas.megatron.rank_watch import heartbeat
from mcore_mas.megatron.state.optimizer import OptimizerState
from mcore_mas.megatron.state.tensor_blocks import TensorBlock, tensor_blocks
from mcore_mas.megatron.state.weight_import import tensor_parallel, weight_mappings
from rollout.base.digests import Digest, write_chunks
from rollout.base.errors import ModelError
from rollout.base.json_files import read_json
from rollout.models.architecture import Architecture

# Name of the file with the trainer's record, which rank 0 writes.
_RECORD = "trainer.json"


class ShardedCheckpoint:
    """One rank's part of a trainer's checkpoints, which it saves and restores."""

    def __init__(
        self, state: OptimizerState, parameters: Mapping[str, Tensor], architecture: Architecture
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            state: state of the optimizer.
            parameters: this rank's shards by Megatron name.
            architecture: architecture of the model.
        """
        self._state = state
        self._parameters = parameters
        self._architecture = architecture
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # Writes the files of the last save.
        self._write: Callable[[], dict[str, Digest]] | None = None
        self._writing: Future[dict[str, Digest]] | None = None
        # Holds the copies of the last save, and is reused by the next.
        self._host_memory = BlockMemory()

    def save(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Copy this rank's blocks to host memory and return; a thread writes them to `folder`.

        Every rank must call it, and then `wait_written`.

        Args:
            folder: folder of the checkpoint.
            record: JSON values that rank 0 writes too, and that `restore` returns. The value
                "updates" is the number of optimizer steps taken.
        """
        assert self._writing is None, "the last save's files are still being written"
        rank = dist.get_rank()
        blocks = list(chain.from_iterable(self._written_blocks.values()))
        shapes, copies = self._copy_blocks()

        def write() -> dict[str, Digest]:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"rank_{rank:05d}"
            index = [
                {
                    "tensor": block.tensor,
                    "shape": block.shape,
                    "start": block.start,
                    "size": block.size,
                }
                for block in blocks
            ]
            files = {
                f"{name}.safetensors": _safetensors_chunks(shapes, copies),
                f"{name}.json": [json.dumps(index).encode()],
            }
            if rank == 0:
                files[_RECORD] = [json.dumps(record).encode()]
            return {file: write_chunks(folder / file, chunks) for file, chunks in files.items()}

        self._write = write
        self._writing = self._thread.submit(write)

    def wait_written(self) -> dict[str, Digest]:
        """Wait until the files of the last `save` are on disk.

        A second call writes them again, so that a caller can retry after an error.

        Returns:
            Size and digest of each file of this rank, by name.

        Raises:
            OSError: the files could not be written.
        """
        assert self._write is not None
        writing = self._writing or self._thread.submit(self._write)
        self._writing = None
        return writing.result()

    def restore(self, folder: Path) -> dict[str, Any]:
        """Load this rank's weights and optimizer state from files that `save` wrote in any layout.

        Returns:
            The record.

        Raises:
            ModelError: elements are missing, or a tensor has another shape.
        """
        record: dict[str, Any] = read_json(folder / _RECORD)
        saved = _SavedBlocks(folder)

        def read(name: str, kind: str, first: int, end: int) -> Tensor:
            heartbeat()
            flat = torch.zeros(end - first)
            saved.read(self._blocks(name, (first, end)), kind=kind, flat=flat, first=first)
            return flat

        self._state.load(read, record["updates"])
        return record

    def _copy_blocks(self) -> tuple[dict[str, torch.Size], list[Tensor]]:
        """Copy the blocks that this rank writes to the host.

        Returns:
            Shape of each block, by its key in the file; their bytes, in several parts.
        """
        blocks: dict[str, Tensor] = {}
        for name, shard in self._state.parts().items():
            for kind, tensor in shard.tensors.items():
                for block in self._written_blocks[name]:
                    blocks[f"{kind}/{block.key}"] = block.view_in(tensor, shard.first)

        copies = [
            slot.copy_(part, non_blocking=True)
            for part, slot in self._host_memory.slots(blocks.values())
        ]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # wait until the copies are complete
        return {key: tensor.shape for key, tensor in blocks.items()}, copies

    def _blocks(self, name: str, span: tuple[int, int]) -> list[TensorBlock]:
        """Return the blocks in a span of elements of this rank's shard of a parameter."""
        (mapping,) = weight_mappings([name], tied=self._architecture.tied)
        tp, rank = tensor_parallel(mapping)
        shape = self._parameters[name].shape
        return tensor_blocks(mapping, shape, self._architecture, tp, rank, span)

    @cached_property
    def _written_blocks(self) -> dict[str, list[TensorBlock]]:
        """Blocks that this rank writes, by Megatron parameter name.

        A block that several ranks hold is written by one of them: the largest blocks are assigned
        first, each to the holder with the fewest elements so far.
        """
        held_blocks = {
            name: self._blocks(name, (shard.first, shard.end))
            for name, shard in self._state.parts().items()
            # A tied output layer on the last pipeline stage is a copy of the first stage's
            # embedding.
            if not (self._architecture.tied and name == "output_layer.weight")
        }
        local_sizes = {
            block.key: block.numel for block in chain.from_iterable(held_blocks.values())
        }
        sizes_by_rank: list[dict[str, int]] = all_gather_json(local_sizes)
        sizes: dict[str, int] = {}
        for rank_sizes in sizes_by_rank:
            sizes |= rank_sizes

        loads = [0] * len(sizes_by_rank)
        keys_to_write = set()
        for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
            holders = [rank for rank, rank_sizes in enumerate(sizes_by_rank) if key in rank_sizes]
            writer = min(holders, key=lambda rank: loads[rank])
            loads[writer] += sizes[key]
            if writer == dist.get_rank():
                keys_to_write.add(key)
        return {
            name: [block for block in held_blocks.get(name, ()) if block.key in keys_to_write]
            for name in self._parameters
        }


class _SavedBlocks:
    """Blocks of tensors in a checkpoint folder, which ranks of any layout have written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = cache(lambda path: safe_open(str(path), "pt"))
        # By tensor: files and the blocks in them.
        self._blocks: dict[str, list[tuple[Path, TensorBlock]]] = {}
        for index in sorted(folder.glob("rank_*.json")):
            for row in read_json(index):
                block = TensorBlock(
                    tensor=row["tensor"],
                    shape=tuple(row["shape"]),
                    start=tuple(row["start"]),
                    size=tuple(row["size"]),
                    offset=0,  # a position in a shard, which a block in a file does not have
                )
                file_and_block = (index.with_suffix(".safetensors"), block)
                self._blocks.setdefault(block.tensor, []).append(file_and_block)

    def read(self, blocks: Sequence[TensorBlock], *, kind: str, flat: Tensor, first: int) -> None:
        """Read blocks of weights or of one of their moments.

        Args:
            blocks: blocks of a shard.
            kind: key of the tensors in the files: "weight" or the name of a moment.
            flat: elements of the shard from `first` on, which are overwritten.
            first: index in the shard of the first element of `flat`.

        Raises:
            ModelError: elements are missing, or a tensor has another shape.
        """
        for block in blocks:
            target = block.view_in(flat, first)
            filled = 0
            for path, saved_block in self._blocks.get(block.tensor, ()):
                if saved_block.shape != block.shape:
                    raise ModelError(
                        f"{self._folder}: {block.tensor} has shape {saved_block.shape}, "
                        f"expected {block.shape}"
                    )
                intersection = block.intersection(saved_block)
                if intersection is None:
                    continue
                in_target, in_saved = intersection
                part = self._open(path).get_slice(f"{kind}/{saved_block.key}")[in_saved]
                target[in_target] = part
                filled += part.numel()
            if filled != block.numel:
                raise ModelError(
                    f"{self._folder}: {kind} of {block.key}: found {filled} of "
                    f"{block.numel} elements"
                )


def _safetensors_chunks(
    shapes: Mapping[str, torch.Size], parts: Iterable[Tensor]
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file of float32 tensors: its header, then the tensors' bytes."""
    header = {}
    begin = 0
    for name, shape in shapes.items():
        end = begin + 4 * shape.numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for part in parts:
        yield memoryview(part.numpy())  # type: ignore[arg-type]
