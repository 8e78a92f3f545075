"""The inside of the Ray actor that an embedded engine runs in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.base.errors import EngineError
from rollout.engines import TRANSPORTS, Tag
from rollout.engines.embedded.batching import Ask, EmbeddedEngine, Outcome
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import read_architecture
from rollout.models.tensors import compare, read_tensors
from rollout.sync.disk import patched
from rollout.sync.shared import SharedCheck, SharedWeights

Held = tuple[int, int | None]  # version of the weights, and the shared half they are in; None: they are the folder's


@dataclass(frozen=True, kw_only=True)
class HostedSettings:
    """Settings of an embedded engine in an actor.

    Raises:
        EngineError: no such transport.
    """

    max_length: int  # tokens of prompt and reply
    rows: int = 192  # sequences held at once
    threads: int = 1
    deterministic: bool = False  # as in `EmbeddedEngine`
    device: str = "cpu"  # or "cuda", which needs a GPU in `place`
    place: Mapping[str, Any] | None = None  # actor options; None: nothing set aside
    transport: str = "shared"  # how new weights come; "disk" and "delta" go through ...
    weights_folder: Path | str | None = None  # ... this folder, which the trainer sees too; None: one in shared memory
    restarts: int = 2

    def __post_init__(self) -> None:
        """Check the transport."""
        known = sorted(TRANSPORTS["embedded"])
        if self.transport not in known:
            raise EngineError(f"the embedded engine has no transport '{self.transport}'; known: {', '.join(known)}")


class Host:
    """Decodes, and takes new weights, when it is asked to."""

    def __init__(self, folder: str, file: str, held: Held, settings: HostedSettings) -> None:
        torch.set_num_threads(settings.threads)
        shape = read_architecture(folder, dense=True)
        self._shared = SharedWeights(Path(file), shape)
        decoder = CachedDecoder(shape, settings.max_length, self._shared.halves, settings.device)
        version, half = held
        if half is None:
            decoder.load(read_tensors(folder))
        else:
            decoder.adopt(half)
        self._core = EmbeddedEngine(decoder, rows=settings.rows, version=version, deterministic=settings.deterministic)
        self._check: SharedCheck | None = None  # of the update under way

    def exchange(self, asks: list[Ask], aborts: list[int], budget_s: float) -> list[tuple[int, Outcome]]:
        """See `EmbeddedEngine.exchange`."""
        return self._core.exchange(asks, aborts, budget_s)

    def follow(self, half: int) -> None:
        """Take the checksum of every tensor that the trainer writes into `half` as soon as it is there."""
        if self._check is not None:
            self._check.stop()
        self._check = SharedCheck(self._shared, half)

    def adopt(self, half: int, version: int, checksums: dict[str, str]) -> str:
        """Compute from what was written into `half`, and is right; "" or what is wrong with it."""
        if self._shared.versions[half] != version:
            return f"the shared weights hold version {self._shared.versions[half]}; expected {version}"
        try:
            check = self._check if self._check is not None else SharedCheck(self._shared, half)
            self._check = None
            compare(check.finish(), checksums, version)
        except EngineError as error:
            return str(error)
        self._core.adopt(half, version)
        return ""

    def read(self, half: int, place: str, version: int, checksums: dict[str, str]) -> str:
        """Fill `half` from a folder, or with its changes to what is held, and adopt it; "" or what is wrong."""
        held = self._core.decoder.weights.tensors()
        self._shared.versions[half] = -1
        try:
            self._shared.halves[half].fill(patched(held, Path(place), self._core.version))
        except EngineError as error:
            return str(error)
        self._shared.versions[half] = version
        return self.adopt(half, version, checksums)

    def sleep(self, tags: Sequence[Tag]) -> str:
        """Give memory back; "" or why not."""
        try:
            self._core.sleep(tags)
        except EngineError as error:
            return str(error)
        return ""

    def wake(self, tags: Sequence[Tag]) -> None:
        self._core.wake(tags)

    def pid(self) -> int:
        """The actor's process."""
        return os.getpid()

    def stats(self) -> dict[str, float]:
        """The counters of the engine, `rollout.engines.embedded.batching.Stats` by field name."""
        return asdict(self._core.stats)
