"""Engines of adapters on SGLang servers: the frozen model is there once, and every adapter beside it by name."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_mas.rollout.base.errors import EngineError
from mcore_mas.rollout.engines import AdapterEngine, Hear
from mcore_mas.rollout.engines.sglang.engine import SGLangEngine, tell_server
from mcore_mas.rollout.engines.sglang.fleet import Left
from mcore_mas.rollout.engines.sglang.server import Replica
from mcore_mas.rollout.models.fused_weights import AdapterShape
from mcore_mas.rollout.records.trajectory import Completion, Sampling, VersionSpan
from mcore_mas.rollout.sync import SyncRoute, WeightUpdate


class AdapterServers(SGLangEngine):
    """The servers of several adapters of one model, which nobody hands weights of its own."""

    def __init__(self, folder: Path | str, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.held: dict[int, tuple[str, str]] = {}  # name and folder of each adapter's present version, by its number

    async def load(self, name: str, folder: str) -> None:
        """Have every server hold the adapter in PEFT's `folder` as `name`.

        Raises:
            EngineError: a server refuses it, with its text, or is gone for good.
        """
        starts = -1
        while starts != self.starts:  # one that was started again meanwhile is told once more
            starts = self.starts
            for replica in list(self._replicas):
                with suppress(Left):
                    await _load(partial(self._fleet.call, replica), name, folder)

    def give_up(self, name: str) -> None:
        """Have every server unload an adapter; SGLang waits for its last request."""
        for replica in self._replicas:
            tell_server(replica, "/unload_lora_adapter", {"lora_name": name}, self._tasks)

    async def _weigh(self, replica: Replica) -> bool:
        for name, folder in self.held.values():
            await _load(replica.client.call, name, folder)
        return True


async def _load(call: Callable[..., Awaitable[Any]], name: str, folder: str) -> None:
    """Have the server that `call` asks hold an adapter, which it may have heard of before its connection broke."""
    try:
        await call("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
    except EngineError as error:
        if "already loaded" not in str(error):
            raise


class SlotEngine(AdapterEngine):
    """The engine of one adapter; the servers of its `host` compute requests of several adapters in one batch.

    A new version is loaded under a name of its own while the one before answers. Requests that run end with the
    version that they began with, so nothing pauses and a reply has one version; then the older one is given up.
    SGLang caches a prefix for its adapter only (`extra_key` of managers/schedule_batch.py).
    """

    def __init__(self, host: AdapterServers, number: int, shape: AdapterShape) -> None:
        super().__init__(host, number)
        self._shape = shape
        self._name: str | None = None  # of the present version at the servers; None: the bare model
        self._asked = Counter[str | None]()  # requests under way, by name

    async def stream(self, prompt_ids: Sequence[int], sampling: Sampling, hear: Hear | None) -> Completion:
        """As `generate`, telling `hear` of tokens as they come (see `StreamingEngine`).

        Raises:
            EngineError: as `SGLangEngine.stream`.
        """
        while True:
            name, version, starts = self._name, self.version, self.starts
            self._asked[name] += 1
            try:
                said: Completion = await self.host.stream(prompt_ids, sampling, hear, name)
            except EngineError:
                if name == self._name or starts == self.starts:
                    raise
                continue  # a server that was started again meanwhile has the present version only
            finally:
                self._asked[name] -= 1
                self._give_up()
            return replace(said, versions=(VersionSpan(version=version, start=0, end=len(said.token_ids)),))

    async def begin_update(self) -> SyncRoute:
        """A folder of this adapter's own (see `TrainedEngine`)."""
        place, options = str(self.host.place / str(self._number)), {"adapter": self._shape}
        return SyncRoute(transport="adapter", place=place, model=str(self.host.folder), options=options)

    async def commit_update(self, update: WeightUpdate) -> None:
        """Compute with the adapter of `update` from the next request on (see `TrainedEngine`).

        Raises:
            EngineError: a server refuses it, with its text; the one before stays.
        """
        name = f"{self._number}-v{update.version}-{uuid.uuid4().hex[:8]}"
        self._asked[name] = 0
        try:
            await self.host.load(name, update.place)
            self._name, self.version = name, update.version
            self.host.held[self._number] = name, update.place
        finally:
            self._give_up()

    def _give_up(self) -> None:
        for name in [name for name, asked in self._asked.items() if not asked and name != self._name]:
            del self._asked[name]
            if name is not None:
                self.host.give_up(name)


def slot_engines(folder: Path | str, adapters: Sequence[AdapterShape], **settings: Any) -> list[SlotEngine]:
    """An engine for each of `adapters` on the model in `folder`, all on the same servers; `settings` of `SGLangEngine`.

    Raises:
        EngineError: as `SGLangEngine`; or SGLang would not compute all of an adapter.
    """
    host = AdapterServers(folder, adapters=adapters, **settings)
    return [SlotEngine(host, number, shape) for number, shape in enumerate(adapters, 1)]
