"""Engines of adapters on SGLang servers: the frozen model is there once, and every adapter beside it by name."""

import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollout.base.errors import EngineError
from rollout.engines.protocol import TokenCallback
from rollout.engines.sglang.engine import SGLangEngine, tell_server
from rollout.engines.sglang.fleet import Left
from rollout.engines.sglang.server import Replica
from rollout.models.fused_weights import AdapterShape
from rollout.records.trajectory import Completion, Sampling, VersionSpan
from rollout.sync.transport import SyncRoute, WeightUpdate


@dataclass(slots=True)
class _Slot:
    """An adapter at the servers."""

    shape: AdapterShape
    name: str | None = None  # of the present version; None: the bare model
    folder: str = ""  # that the servers read it from
    version: int = 0
    asked: Counter[str | None] = field(default_factory=Counter)  # requests under way, by name


class AdapterServers(SGLangEngine):
    """The servers of several adapters of one model, which nobody hands weights of its own.

    They compute requests of several adapters in one batch. A new version is loaded under a name of its own while the
    one before answers. Requests that run end with the version that they began with, so nothing pauses and a reply has
    one version; then the older one is given up. SGLang caches a prefix for its adapter only (`extra_key` of
    managers/schedule_batch.py).
    """

    def __init__(
        self, folder: Path | str, adapters: Sequence[AdapterShape], **settings: Any
    ) -> None:
        super().__init__(folder, adapters=adapters, **settings)
        self._slots = {number: _Slot(shape) for number, shape in enumerate(adapters, 1)}

    async def stream(  # type: ignore[override]
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_tokens: TokenCallback | None,
        adapter: int,
    ) -> Completion:
        """Sample one completion, with an adapter by number (see `SGLangEngine.stream`)."""
        slot = self._slots[adapter]
        while True:
            name, version, starts = slot.name, slot.version, self.starts
            slot.asked[name] += 1
            try:
                said = await super().stream(prompt_ids, sampling, on_tokens, name)
            except EngineError:
                if name == slot.name or starts == self.starts:
                    raise
                continue  # a server that was started again meanwhile has the present version only
            finally:
                slot.asked[name] -= 1
                self._give_up(slot)
            return replace(
                said, versions=(VersionSpan(version=version, start=0, end=len(said.token_ids)),)
            )

    async def route(self, number: int) -> SyncRoute:
        """Return the route to the folder of an adapter, by number."""
        return SyncRoute(
            transport="adapter",
            target=str(self.place / str(number)),
            model=str(self.folder),
            adapter=self._slots[number].shape,
        )

    async def take(self, update: WeightUpdate, number: int) -> float:
        """Compute with the adapter of `update` from the next request on; the seconds of the pause, which there is none.

        Raises:
            EngineError: a server refuses it, with its text, or is gone for good; the one before stays.
        """
        slot, name, starts = (
            self._slots[number],
            f"{number}-v{update.version}-{uuid.uuid4().hex[:8]}",
            -1,
        )
        slot.asked[name] = 0
        try:
            while starts != self.starts:  # one that was started again meanwhile is told once more
                starts = self.starts
                for replica in list(self._replicas):
                    with suppress(Left):
                        await _load(partial(self._fleet.call, replica), name, update.location)
            slot.name, slot.folder, slot.version = name, update.location, update.version
        finally:
            self._give_up(slot)
        return 0.0

    def _give_up(self, slot: _Slot) -> None:
        """Have every server unload versions that nobody asks any more; SGLang waits for the last request."""
        for name in [name for name, asked in slot.asked.items() if not asked and name != slot.name]:
            del slot.asked[name]
            for replica in self._replicas if name else ():
                tell_server(replica, "/unload_lora_adapter", {"lora_name": name}, self._tasks)

    async def _weigh(self, replica: Replica) -> bool:
        for slot in self._slots.values():
            if slot.name:
                await _load(replica.client.call, slot.name, slot.folder)
        return True


async def _load(call: Callable[..., Awaitable[Any]], name: str, folder: str) -> None:
    """Have the server that `call` asks hold an adapter, which it may have heard of before its connection broke."""
    try:
        await call("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
    except EngineError as error:
        if "already loaded" not in str(error):
            raise
