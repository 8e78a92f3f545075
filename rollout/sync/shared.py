"""Weight sync through shared memory: the embedded engine's buffers, mapped and written by the trainer."""

import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.base.errors import EngineError
from rollout.models.architecture import Architecture, read_architecture
from rollout.models.fused_weights import NOWHERE, AdapterShape, AdapterWeights, Weights
from rollout.models.tensors import (
    WeightStream,
    begun_checksum,
    blocks_of,
    copy,
    flat_bytes,
    shape_of,
)
from rollout.sync import Stored, WeightSender

_PAGE = 4096  # bytes: the halves start on a page of their own
_LOOK_S = (
    5e-5,
    2e-3,
)  # between two looks at what the trainer has written: at first, and after long idling


class SharedWeights:
    """Two halves, each all weights of a decoder or of an adapter: one the engine has, one for the next version."""

    def __init__(
        self,
        file: Path | None,
        shape: Architecture,
        adapter: AdapterShape | None = None,
        *,
        create: bool = False,
    ) -> None:
        """Map `file`, made first with `create`; None: memory of this process's own.

        Raises:
            EngineError: there is no room for it, or no such file.
        """
        make: Any = partial(AdapterWeights, shape, adapter) if adapter else partial(Weights, shape)
        blank = make(NOWHERE)
        half, names = blank.elements, tuple(blank.places)
        header = _PAGE * math.ceil((24 + 16 * len(names)) / _PAGE)
        size = header + 2 * half * 4
        memory = mmap.mmap(-1, size) if file is None else _mapped(file, size, create)
        self.file = file
        # the version in each half, -1 where there is none or one is being written
        self.versions = np.frombuffer(memory, dtype=np.int64, count=2)
        # not 0 while the engine is wanted for something new
        self.called = np.frombuffer(memory, dtype=np.int64, count=1, offset=16)
        # of each tensor of each half the bytes that have been written since the engine asked for new ones
        self.written = np.frombuffer(
            memory, dtype=np.int64, count=2 * len(names), offset=24
        ).reshape(2, -1)
        self.numbers = {name: number for number, name in enumerate(names)}
        flat = torch.frombuffer(memory, dtype=torch.float32, offset=header)
        self.halves: tuple[Any, Any] = (make(flat[:half]), make(flat[half:]))
        if create or file is None:
            self.versions[:] = -1


def _mapped(file: Path, size: int, create: bool) -> mmap.mmap:
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
            return mmap.mmap(opened.fileno(), size)
    except OSError as error:
        raise EngineError(f"{file}: the shared weights cannot be mapped ({error})") from error


class SharedCheck:
    """Checksums of one half as the engine maps it: of every byte soon after the trainer has written it.

    Whoever asks for new weights unmarks those of the half, before either side starts.
    """

    def __init__(self, shared: SharedWeights, half: int) -> None:
        self._written, self._names = shared.written[half], tuple(shared.numbers)
        places = shared.halves[half].places.values()
        self._digests, self._views = (
            [begun_checksum(shape) for shape, _ in places],
            [view for _, view in places],
        )
        # of those that do not lie in the order of the indices None: they are read when all of one is there
        self._flat = [flat_bytes(view) if view.is_contiguous() else None for view in self._views]
        self.read = np.zeros(len(self._views), dtype=np.int64)  # bytes of each tensor so far
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def finish(self) -> dict[str, str]:
        """The checksum of every tensor by Hugging Face name; all must have been written."""
        self.stop()
        self._thread.join()
        for at, view in enumerate(self._views):
            self._take(at, view.nbytes)
        return {
            name: digest.hexdigest()
            for name, digest in zip(self._names, self._digests, strict=True)
        }

    def _follow(self) -> None:
        wait, longest = _LOOK_S
        while not self._stopped.wait(wait):
            more = np.flatnonzero(self._written > self.read)
            for at in more.tolist():
                self._take(at, int(self._written[at]))
            wait = _LOOK_S[0] if len(more) else min(2 * wait, longest)

    def _take(self, at: int, written: int) -> None:
        """Read on in a tensor, up to this many bytes."""
        flat, view = self._flat[at], self._views[at]
        if flat is not None:
            self._digests[at].update(flat[self.read[at] : written].data)
        elif self.read[at] < written == view.nbytes:
            self._digests[at].update(flat_bytes(view.contiguous()).data)
        self.read[at] = written


class SharedSender(WeightSender):
    """Rank 0 writes full tensors into the half that the engine does not use: one copy, in the engine's order, that
    also takes the checksums.
    """

    def _open(self) -> None:
        shape, adapter = read_architecture(self._route.model), self._route.options.get("adapter")
        self._shared = (
            SharedWeights(Path(self._route.place), shape, adapter) if self._leads else None
        )

    def _write(self, weights: WeightStream, version: int, state: Mapping[str, Any]) -> Stored:
        """Fill the half `state["half"]`."""
        sums: dict[str, str] = {}
        size, shared = 0, self._shared
        if shared is None:
            deque(weights, maxlen=0)
        else:
            half = int(state["half"])
            shared.versions[half] = -1
            for name, rows, place in shared.halves[half].placed(weights):
                digest, number = begun_checksum(shape_of(rows)), shared.numbers[name]
                for written in copy(rows, place, digest):
                    shared.written[half, number] = written
                sums[name] = digest.hexdigest()
                size += sum(block.nbytes for block in blocks_of(rows))
            shared.versions[half] = version
        return self._route.place, sums, size
