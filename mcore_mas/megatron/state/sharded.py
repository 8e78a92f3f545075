"""A trainer's state on disk: every rank writes its own pieces, and reads those it needs of anybody's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from mcore_mas.megatron import parallel
from mcore_mas.megatron.state.names import entries
from mcore_mas.megatron.state.optimizer import OptimizerState
from mcore_mas.megatron.state.pieces import Piece, pieces_of
from mcore_mas.megatron.state.weight_import import tensor_parallel
from rollout.base.errors import ModelError
from rollout.base.files import Digest, write_chunks
from rollout.models.architecture import Architecture

_RECORD = "trainer.json"


class Shards:
    """What one rank of a trainer saves and restores."""

    def __init__(self, state: OptimizerState, parameters: Mapping[str, Tensor], architecture: Architecture) -> None:
        """`parameters` are this rank's shards by Megatron name."""
        self._state = state
        self._parameters = parameters
        self._architecture = architecture
        self._mine: dict[str, list[Piece]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[dict[str, Digest]] | None = None
        self._host: Tensor | None = None

    def save(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Copy this rank's pieces to host memory and return; a thread writes them into `folder` (see `written`).

        Every rank must call it. Rank 0 writes `record` too.
        """
        assert self._writing is None, "the last save's files are still being written"
        if self._mine is None:
            self._mine = self._dealt()
        pieces = [piece for own in self._mine.values() for piece in own]
        rank = dist.get_rank()
        self._writing = self._thread.submit(_write, folder, rank, pieces, self._copied(), None if rank else record)

    def written(self) -> dict[str, Digest]:
        """Wait until what `save` copied is on disk; size and digest of this rank's files by name.

        Raises:
            OSError: it could not be written.
        """
        assert self._writing is not None
        try:
            return self._writing.result()
        finally:
            self._writing = None

    def restore(self, folder: Path) -> dict[str, Any]:
        """Fill this rank's weights and optimizer state from what `save` wrote in any layout; returns the record.

        Raises:
            ModelError: the folder has not every element, or tensors of another shape.
        """
        record: dict[str, Any] = json.loads((folder / _RECORD).read_text())
        saved = _Saved(folder)

        def read(name: str, kind: str, first: int, last: int) -> Tensor:
            flat = torch.zeros(last - first)
            saved.fill(flat, kind, self._pieces(name, (first, last)), first)
            return flat

        self._state.load(read, record["updates"])
        return record

    def _copied(self) -> dict[str, Tensor]:
        """This rank's pieces by kind and place, one after the other in host memory that the next save uses again."""
        assert self._mine is not None
        own = {
            f"{kind}/{piece.key}": piece.of(tensor, part.first)
            for name, part in self._state.parts().items()
            for kind, tensor in part.tensors.items()
            for piece in self._mine[name]
        }
        sizes = [tensor.numel() for tensor in own.values()]
        if self._host is None or len(self._host) != sum(sizes):  # moments come with the first step
            self._host = torch.empty(sum(sizes), pin_memory=torch.cuda.is_available())
        copies = {}
        for (key, tensor), stretch in zip(own.items(), self._host.split(sizes), strict=True):
            copies[key] = stretch.view(tensor.shape).copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _pieces(self, name: str, span: tuple[int, int]) -> list[Piece]:
        (entry,) = entries([name], tied=self._architecture.tied)
        tp, rank = tensor_parallel(entry)
        return pieces_of(entry, self._parameters[name].shape, self._architecture, tp, rank, span)

    def _dealt(self) -> dict[str, list[Piece]]:
        """The pieces by Megatron name that this rank writes.

        What several ranks hold is one's: the largest pieces first, each to the holder with the least so far.
        """
        held = {
            name: self._pieces(name, (part.first, part.last))
            for name, part in self._state.parts().items()
            # a tied output layer on the last pipeline stage is a copy of the first one's embedding
            if not (self._architecture.tied and name == "output_layer.weight")
        }
        own = {piece.key: piece.numel for pieces in held.values() for piece in pieces}
        everyone: list[dict[str, int]] = parallel.exchange(own)
        sizes = {key: size for rank in everyone for key, size in rank.items()}
        load = [0] * len(everyone)
        mine = set()
        for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
            writer = min((rank for rank, keys in enumerate(everyone) if key in keys), key=lambda rank: load[rank])
            load[writer] += sizes[key]
            if writer == dist.get_rank():
                mine.add(key)
        return {name: [piece for piece in held.get(name, ()) if piece.key in mine] for name in self._parameters}


class _Saved:
    """The pieces that the ranks of some layout wrote into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._pieces: dict[str, list[tuple[Path, Piece]]] = {}
        for index in sorted(folder.glob("rank_*.json")):
            for row in json.loads(index.read_text()):
                shape, start, size = (tuple(row[name]) for name in ("shape", "start", "size"))
                piece = Piece(tensor=row["tensor"], shape=shape, start=start, size=size, offset=0)
                self._pieces.setdefault(piece.tensor, []).append((index.with_suffix(".safetensors"), piece))

    def fill(self, flat: Tensor, kind: str, wanted: Sequence[Piece], first: int) -> None:
        """Read the `wanted` pieces into `flat`, which holds a shard's elements from `first` on."""
        for piece in wanted:
            target, filled = piece.of(flat, first), 0
            for path, source in self._pieces.get(piece.tensor, ()):
                if source.shape != piece.shape:
                    raise ModelError(f"{self._folder}: {piece.tensor} is {source.shape}, expected {piece.shape}")
                common = piece.common(source)
                if common is None:
                    continue
                read = self._open(path).get_slice(f"{kind}/{source.key}")[common[1]]
                target[common[0]] = read
                filled += read.numel()
            if filled != piece.numel:
                raise ModelError(f"{self._folder}: {kind} of {piece.key}: {filled} of {piece.numel} elements are here")

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = safe_open(str(path), "pt")
        return self._files[path]


def _write(
    folder: Path, rank: int, pieces: Sequence[Piece], copies: Mapping[str, Tensor], record: Mapping[str, Any] | None
) -> dict[str, Digest]:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rank_{rank:05d}"
    index = [{"tensor": p.tensor, "shape": p.shape, "start": p.start, "size": p.size} for p in pieces]
    files = {
        f"{name}.safetensors": _safetensors(copies),
        f"{name}.json": [json.dumps(index).encode()],
    }
    if record is not None:
        files[_RECORD] = [json.dumps(record).encode()]
    return {file: write_chunks(folder / file, chunks) for file, chunks in files.items()}


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file of float32 tensors: its header's length, its header, and what they hold."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
