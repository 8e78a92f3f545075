"""Weight sync through shared memory: the trainer writes into buffers that the embedded engine maps."""

from __future__ import annotations

import mmap
import os
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.base.errors import EngineError
from rollout.models.adapter_weights import AdapterShape, AdapterWeights
from rollout.models.architecture import Architecture, read_architecture
from rollout.models.fused_weights import DecoderWeights
from rollout.models.named_buffers import META_STORAGE
from rollout.models.tensors import WeightStream, blocks_of, copy_with_checksum
from rollout.sync.transport import SentWeights, SyncRoute, WeightSender

_HEADER_BYTES = mmap.PAGESIZE  # so that the buffers begin on a page


class SharedWeights:
    """Two float32 buffers, each for all weights of a decoder or of an adapter.

    The engine computes from one half while the trainer writes the next version into the other.

    Attributes:
        versions: version in each half, int64 [2]; -1 if it has none or is being written.
        interrupt: int64 [1]; not 0 while the engine's client has something new for the engine.
        halves: the two buffers.
    """

    def __init__(
        self,
        file: Path | None,
        shape: Architecture,
        adapter: AdapterShape | None = None,
        *,
        create: bool = False,
    ) -> None:
        """Map `file`, or memory of this process alone if it is None.

        Args:
            file: file in shared memory.
            shape: architecture of the decoder.
            adapter: shape of the adapter whose weights the buffers hold; None: those of the decoder.
            create: create the file first.

        Raises:
            EngineError: there is not enough shared memory, or the file does not exist.
        """
        make_buffers: Any = partial(DecoderWeights, shape)
        if adapter is not None:
            make_buffers = partial(AdapterWeights, shape, adapter)
        elements = make_buffers(META_STORAGE).elements
        size = _HEADER_BYTES + 2 * elements * torch.float32.itemsize
        memory = mmap.mmap(-1, size) if file is None else _map_file(file, size, create=create)

        self.file = file
        self.versions = np.frombuffer(memory, dtype=np.int64, count=2)
        self.interrupt = np.frombuffer(memory, dtype=np.int64, count=1, offset=16)
        flat = torch.frombuffer(memory, dtype=torch.float32, offset=_HEADER_BYTES)
        self.halves: tuple[Any, Any] = (
            make_buffers(flat[:elements]),
            make_buffers(flat[elements:]),
        )
        if create or file is None:
            self.versions[:] = -1


def _map_file(file: Path, size: int, *, create: bool) -> mmap.mmap:
    try:
        if create:
            _check_free_memory(file.parent, size)
            with file.open("xb") as created:
                os.posix_fallocate(created.fileno(), 0, size)
        with file.open("r+b") as opened:
            return mmap.mmap(opened.fileno(), size)
    except OSError as error:
        raise EngineError(f"{file}: the shared weights cannot be mapped ({error})") from error


def _check_free_memory(folder: Path, size: int) -> None:
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if size > free_bytes:
        raise EngineError(
            f"{folder}: {free_bytes >> 20} MiB are free, but two copies of the weights take "
            f"{size >> 20} MiB; make it larger or set engine.transport to disk"
        )


class SharedSender(WeightSender):
    """Sender in which rank 0 writes full tensors into the half that the engine does not use."""

    def __init__(self, route: SyncRoute, **ranks: Any) -> None:
        super().__init__(route, **ranks)
        self._shared: SharedWeights | None = None
        if self.rank == 0:
            architecture = read_architecture(route.model)
            self._shared = SharedWeights(Path(route.target), architecture, route.adapter)

    def write(self, weights: WeightStream, version: int, half: int | None) -> SentWeights:
        """Copy each tensor into the engine's buffers, and compute its checksum during the copy."""
        if self._shared is None:
            deque(weights, maxlen=0)  # takes part in gathering the tensors, without keeping any
            return SentWeights(location=self.route.target, bytes=0)

        assert half is not None
        checksums: dict[str, str] = {}
        size = 0
        self._shared.versions[half] = -1
        for name, rows, destination in self._shared.halves[half].with_destinations(weights):
            checksums[name] = copy_with_checksum(rows, destination)
            size += sum(block.nbytes for block in blocks_of(rows))
        self._shared.versions[half] = version
        return SentWeights(location=self.route.target, bytes=size, checksums=checksums)
