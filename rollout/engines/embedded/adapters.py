"""Engines of several adapters on one frozen model, which one actor holds once and computes in mixed batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_mas.rollout.engines import Hear, Tag, TrainedEngine
from mcore_mas.rollout.engines.embedded.engine import HostedEngine
from mcore_mas.rollout.models.architecture import read_architecture
from mcore_mas.rollout.models.fused_weights import AdapterShape
from mcore_mas.rollout.records.trajectory import Completion, Sampling
from mcore_mas.rollout.sync import SyncRoute, WeightUpdate
from mcore_mas.rollout.sync.shared import SharedWeights


class AdapterEngine(TrainedEngine):
    """The engine of one adapter, in the actor of a `HostedEngine` that holds the frozen weights of several once."""

    transport = "shared"

    def __init__(self, host: HostedEngine, number: int) -> None:
        """Of the host's adapter `number`, counted from 1; it adds nothing before its first weights come."""
        self.host, self._number, self._held = host, number, host.adapters[number - 1]
        self.version, self.pause_s = 0, 0.0
        self._free = 0  # the half that the next weights go into
        shape = read_architecture(host.folder)
        self._shared = SharedWeights(self._held.file, shape, self._held.shape)

    @property
    def starts(self) -> int:  # type: ignore[override]
        """Starts of the actor."""
        return self.host.starts

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion, in the same batches as those of other adapters (see `Engine`)."""
        return await self.host.stream(prompt_ids, sampling, None, self._number)

    async def stream(self, prompt_ids: Sequence[int], sampling: Sampling, hear: Hear | None) -> Completion:
        """As `generate`, telling `hear` of tokens as they come (see `StreamingEngine`)."""
        return await self.host.stream(prompt_ids, sampling, hear, self._number)

    async def begin_update(self) -> SyncRoute:
        """The half of the adapter's shared memory that is free."""
        self._shared.written[self._free] = 0
        self.host.follow(self._free, self._number)
        place, options = str(self._held.file), {"adapter": self._held.shape}
        state = {"half": self._free}
        return SyncRoute(transport="shared", place=place, model=self.host.folder, options=options, state=state)

    async def commit_update(self, update: WeightUpdate) -> None:
        """Compute with the adapter of `update` (see `TrainedEngine`).

        Raises:
            EngineError: its bytes are not the trainer's; the old ones stay.
        """
        began = time.perf_counter()
        try:
            await self.host.take(self._free, update, self._number)
        finally:
            self.pause_s = time.perf_counter() - began
        self._held.half, self._free = self._free, 1 - self._free
        self.version = self._held.version = update.version

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Give the host's memory back, which is that of all adapters (see `HostedEngine`)."""
        await self.host.sleep(tags)

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Take it again."""
        await self.host.wake(tags)

    def close(self) -> None:
        """End the host."""
        self.host.close()


def adapter_engines(folder: Path | str, adapters: Sequence[AdapterShape], **settings: Any) -> list[AdapterEngine]:
    """An engine for each of `adapters` on the model in `folder`, all in one actor; `settings` of `HostedEngine`.

    Raises:
        EngineError: as `HostedEngine`; or the folder is no model that this engine computes.
    """
    host = HostedEngine(folder, adapters=adapters, **settings)
    return [AdapterEngine(host, number) for number in range(1, 1 + len(adapters))]
