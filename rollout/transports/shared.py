"""The embedded engine's weight buffers in memory that the trainer maps too, and writes into."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.engines.architecture import Architecture
from rollout.engines.protocol import EngineError
from rollout.engines.weights import Weights
from rollout.transports.checksum import checksum
from rollout.transports.handover import Handover, Route

_HEADER = 4096  # bytes before the halves: the version in each, -1 where there is none or one is being written


class SharedWeights:
    """Two halves, each all weights of a decoder: one the engine computes from, one the next version is written into."""

    def __init__(self, file: Path, shape: Architecture, *, create: bool = False) -> None:
        """Map `file`, made first with `create`.

        Raises:
            EngineError: there is no room for it, or no such file.
        """
        half = Weights.elements(shape)
        size = _HEADER + 2 * half * 4
        try:
            if create:
                room = os.statvfs(file.parent)
                if size > room.f_bavail * room.f_frsize:
                    raise EngineError(
                        f"{file.parent}: {room.f_bavail * room.f_frsize >> 20} MiB are free, two copies of the weights "
                        f"take {size >> 20}; make it larger or set engine.transport to disk"
                    )
                with file.open("xb") as made:
                    os.posix_fallocate(made.fileno(), 0, size)
            with file.open("r+b") as opened:
                memory = mmap.mmap(opened.fileno(), size)
        except OSError as error:
            raise EngineError(f"{file}: the shared weights cannot be mapped ({error})") from error
        self.file = file
        self.versions = np.frombuffer(memory, dtype=np.int64, count=2)
        flat = torch.frombuffer(memory, dtype=torch.float32, offset=_HEADER)
        self.halves = (Weights(shape, flat[:half]), Weights(shape, flat[half:]))
        if create:
            self.versions[:] = -1


class SharedSender:
    """Rank 0 writes full tensors into the half that the engine does not use: one copy, in the engine's order."""

    def __init__(self, route: Route, *, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        self._route = route
        shape = Architecture.read(Path(route.model))
        self._shared = SharedWeights(Path(route.place), shape) if rank == 0 else None

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, state: Mapping[str, Any]) -> Handover:
        """Fill the half `state["half"]` (see `Sender`)."""
        began = time.perf_counter()
        sums: dict[str, str] = {}
        size = 0

        def counted() -> Iterable[tuple[str, Tensor]]:
            nonlocal size
            for name, tensor in weights:
                size += tensor.nbytes
                sums[name] = checksum(tensor.detach().float())
                yield name, tensor

        if self._shared is None:
            for _ in weights:
                pass
        else:
            half = int(state["half"])
            self._shared.versions[half] = -1
            self._shared.halves[half].fill(counted())
            self._shared.versions[half] = version
        return Handover(
            version=version,
            transport=self._route.transport,
            place=self._route.place,
            checksums=sums,
            bytes=size,
            seconds=time.perf_counter() - began,
        )
