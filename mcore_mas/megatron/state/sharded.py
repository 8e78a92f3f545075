"""Sharded checkpoints: every rank writes its own part of weights and moments, and reads the parts that it needs."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
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
from mcore_mas.megatron.state.weight_import import (
    LazyTensor,
    WeightMapping,
    tensor_parallel,
    weight_mappings,
)
from rollout.base.digests import Digest, write_chunks
from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBlock:
    """A rectangle of a Hugging Face tensor, which a shard holds row by row in one stretch of its memory."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]  # the rectangle's first index, by dimension
    size: tuple[int, ...]
    offset: int  # in the flat shard, of the first element

    @property
    def key(self) -> str:
        """The rectangle as text, `tensor[rows, columns]`."""
        ranges = (
            f"{first}:{first + length}" for first, length in zip(self.start, self.size, strict=True)
        )
        return f"{self.tensor}[{','.join(ranges)}]"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.size)

    def of(self, flat: Tensor, first: int = 0) -> Tensor:
        """The rectangle as a view of `flat`, which holds the shard's elements from `first` on."""
        return flat[self.offset - first : self.offset - first + self.numel].view(self.size)

    def common(self, other: TensorBlock) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """What two rectangles of a tensor have in common, as indices into the one and into the other."""
        mine, theirs = [], []
        for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            mine.append(slice(low - a, high - a))
            theirs.append(slice(low - b, high - b))
        return tuple(mine), tuple(theirs)


def tensor_blocks(
    entry: WeightMapping,
    shard: Sequence[int],
    architecture: Architecture,
    tp: int,
    rank: int,
    span: tuple[int, int],
) -> list[TensorBlock]:
    """The rectangles that elements [first, last) = `span` of a flat shard hold; padding is in none.

    Args:
        shard: shape of tensor-parallel rank `rank`'s shard of the parameter, one of `tp`.
    """
    return [
        part
        for block in _blocks(entry, shard, architecture, tp, rank)
        for part in _within(block, *span)
    ]


def _blocks(
    entry: WeightMapping, shard: Sequence[int], architecture: Architecture, tp: int, rank: int
) -> Iterator[TensorBlock]:
    """The shard's blocks of neighbouring rows, found by cutting tensors of numbers as the real ones are cut.

    The tensors' rows are counted through; a row of a matrix is `tp` numbers, as it is cut into so many parts at most.
    """
    shapes = list(entry.shapes(shard, architecture, tp).values())
    parts = tp if len(shapes[0]) == 2 else 1
    heads = list(accumulate((shape[0] for shape in shapes), initial=0))
    numbers = [
        torch.arange(head * parts + 1, (head + shape[0]) * parts + 1).view(
            -1, *[parts] * (len(shape) - 1)
        )
        for head, shape in zip(heads, shapes, strict=False)
    ]
    cut = torch.zeros(
        shard[0], shard[1] * parts // shapes[0][1] if len(shard) == 2 else 1, dtype=torch.int64
    )
    own = cut if len(shard) == 2 else cut[:, 0]
    entry.sharding.fill(own, [LazyTensor.of(tensor) for tensor in numbers], architecture, tp, rank)
    rows = (cut[:, 0] - 1) // parts  # -1 is padding
    column = int(cut[0, 0] - 1) % parts
    breaks = (rows[1:] != rows[:-1] + 1) | torch.isin(rows[1:], torch.tensor(heads))
    edges = [0, *(breaks.nonzero()[:, 0] + 1).tolist(), len(rows)]
    for first, last in pairwise(edges):
        row = int(rows[first])
        if row < 0:
            continue
        which = bisect_right(heads, row) - 1
        shape = shapes[which]
        width = math.prod(shape[1:]) * cut.shape[1] // parts
        yield TensorBlock(
            tensor=entry.tensors[which],
            shape=shape,
            start=(row - heads[which], column * width)[: len(shape)],
            size=(last - first, width)[: len(shape)],
            offset=first * width,
        )


def _within(block: TensorBlock, first: int, last: int) -> Iterator[TensorBlock]:
    """What [first, last) of the flat shard has of a block: a row's end, whole rows, a row's beginning."""
    width = block.size[1] if len(block.size) == 2 else 1
    low, high = max(first - block.offset, 0), min(last - block.offset, block.numel)
    while low < high:
        row, column = divmod(low, width)
        whole = column == 0 and high - low >= width
        end = high // width * width if whole else min(high, (row + 1) * width)
        start = (block.start[0] + row, *(at + column for at in block.start[1:]))
        size = ((end - low) // width, *block.size[1:]) if whole else (1, end - low)
        yield TensorBlock(
            tensor=block.tensor,
            shape=block.shape,
            start=start,
            size=size,
            offset=block.offset + low,
        )
        low = end


_RECORD = "trainer.json"


class ShardedCheckpoint:
    """What one rank of a trainer saves and restores."""

    def __init__(
        self, state: OptimizerState, parameters: Mapping[str, Tensor], architecture: Architecture
    ) -> None:
        """`parameters` are this rank's shards by Megatron name."""
        self._state = state
        self._parameters = parameters
        self._architecture = architecture
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write: Callable[[], dict[str, Digest]] | None = None  # the files of the last save
        self._writing: Future[dict[str, Digest]] | None = None
        self._host = BlockMemory()  # of the last save, and of the next

    def save(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Copy this rank's blocks to host memory and return; a thread writes them into `folder` (see `written`).

        Every rank must call it. Rank 0 writes `record` too.
        """
        assert self._writing is None, "the last save's files are still being written"
        blocks = [block for own in self._mine.values() for block in own]
        rank, (shapes, copies) = dist.get_rank(), self._copied()

        def write() -> dict[str, Digest]:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"rank_{rank:05d}"
            index = [
                {"tensor": p.tensor, "shape": p.shape, "start": p.start, "size": p.size}
                for p in blocks
            ]
            files = {
                f"{name}.safetensors": _safetensors(shapes, copies),
                f"{name}.json": [json.dumps(index).encode()],
            }
            if rank == 0:
                files[_RECORD] = [json.dumps(record).encode()]
            return {file: write_chunks(folder / file, chunks) for file, chunks in files.items()}

        self._write, self._writing = write, self._thread.submit(write)

    def written(self) -> dict[str, Digest]:
        """Wait until what `save` copied is on disk; size and digest of this rank's files by name.

        Asked again, it is written again.

        Raises:
            OSError: it could not be written.
        """
        assert self._write is not None
        writing, self._writing = self._writing or self._thread.submit(self._write), None
        return writing.result()

    def restore(self, folder: Path) -> dict[str, Any]:
        """Fill this rank's weights and optimizer state from what `save` wrote in any layout; returns the record.

        Raises:
            ModelError: the folder has not every element, or tensors of another shape.
        """
        record: dict[str, Any] = json.loads((folder / _RECORD).read_text())
        saved = _Saved(folder)

        def read(name: str, kind: str, first: int, last: int) -> Tensor:
            heartbeat()
            flat = torch.zeros(last - first)
            saved.fill(flat, kind, self._blocks(name, (first, last)), first)
            return flat

        self._state.load(read, record["updates"])
        return record

    def _copied(self) -> tuple[dict[str, torch.Size], list[Tensor]]:
        """Shapes of this rank's blocks by kind and place, and what they hold in parts, copied to the host."""
        own = {
            f"{kind}/{block.key}": block.of(tensor, part.first)
            for name, part in self._state.parts().items()
            for kind, tensor in part.tensors.items()
            for block in self._mine[name]
        }
        copies = [
            place.copy_(part, non_blocking=True) for part, place in self._host.slots(own.values())
        ]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {key: tensor.shape for key, tensor in own.items()}, copies

    def _blocks(self, name: str, span: tuple[int, int]) -> list[TensorBlock]:
        (entry,) = weight_mappings([name], tied=self._architecture.tied)
        tp, rank = tensor_parallel(entry)
        return tensor_blocks(
            entry, self._parameters[name].shape, self._architecture, tp, rank, span
        )

    @cached_property
    def _mine(self) -> dict[str, list[TensorBlock]]:
        """The blocks by Megatron name that this rank writes.

        What several ranks hold is one's: the largest blocks first, each to the holder with the least so far.
        """
        held = {
            name: self._blocks(name, (part.first, part.last))
            for name, part in self._state.parts().items()
            # a tied output layer on the last pipeline stage is a copy of the first one's embedding
            if not (self._architecture.tied and name == "output_layer.weight")
        }
        own = {block.key: block.numel for blocks in held.values() for block in blocks}
        everyone: list[dict[str, int]] = all_gather_json(own)
        sizes = {key: size for rank in everyone for key, size in rank.items()}
        load = [0] * len(everyone)
        mine = set()
        for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
            writer = min(
                (rank for rank, keys in enumerate(everyone) if key in keys),
                key=lambda rank: load[rank],
            )
            load[writer] += sizes[key]
            if writer == dist.get_rank():
                mine.add(key)
        return {
            name: [block for block in held.get(name, ()) if block.key in mine]
            for name in self._parameters
        }


class _Saved:
    """The blocks that the ranks of some layout wrote into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = cache(lambda path: safe_open(str(path), "pt"))
        self._blocks: dict[str, list[tuple[Path, TensorBlock]]] = {}
        for index in sorted(folder.glob("rank_*.json")):
            for row in json.loads(index.read_text()):
                shape, start, size = (tuple(row[name]) for name in ("shape", "start", "size"))
                block = TensorBlock(
                    tensor=row["tensor"], shape=shape, start=start, size=size, offset=0
                )
                self._blocks.setdefault(block.tensor, []).append(
                    (index.with_suffix(".safetensors"), block)
                )

    def fill(self, flat: Tensor, kind: str, wanted: Sequence[TensorBlock], first: int) -> None:
        """Read the `wanted` blocks into `flat`, which holds a shard's elements from `first` on."""
        for block in wanted:
            target, filled = block.of(flat, first), 0
            for path, source in self._blocks.get(block.tensor, ()):
                if source.shape != block.shape:
                    raise ModelError(
                        f"{self._folder}: {block.tensor} is {source.shape}, expected {block.shape}"
                    )
                common = block.common(source)
                if common is None:
                    continue
                read = self._open(path).get_slice(f"{kind}/{source.key}")[common[1]]
                target[common[0]] = read
                filled += read.numel()
            if filled != block.numel:
                raise ModelError(
                    f"{self._folder}: {kind} of {block.key}: {filled} of {block.numel} elements are here"
                )


def _safetensors(
    shapes: Mapping[str, torch.Size], parts: Iterable[Tensor]
) -> Iterator[bytes | memoryview]:
    """A safetensors file of float32 tensors: its header's length, its header, and the parts of what they hold."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * shape.numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for part in parts:
        yield memoryview(part.numpy())  # type: ignore[arg-type]
