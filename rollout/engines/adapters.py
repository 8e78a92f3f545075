"""The engine of one adapter of several: their host has the processes, and the frozen weights once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.base.lookup import lookup_import
from rollout.engines.protocol import StreamingEngine, Tag, TokenCallback, TrainedEngine
from rollout.engines.registry import ENGINES
from rollout.models.fused_weights import AdapterShape
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import SyncRoute, WeightUpdate


class AdapterEngine(StreamingEngine, TrainedEngine):
    """The engine of one adapter, which its `host` knows by number: a `HostedEngine`, or SGLang's `AdapterServers`."""

    def __init__(self, host: Any, number: int) -> None:
        """Of the host's adapter `number`, counted from 1; it adds nothing before its first weights come."""
        self.host, self._number = host, number
        self.version, self.pause_s = 0, 0.0

    @property
    def starts(self) -> int:  # type: ignore[override]
        return int(self.host.starts)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback | None
    ) -> Completion:
        completion: Completion = await self.host.stream(
            prompt_ids, sampling, on_tokens, self._number
        )
        return completion

    async def begin_update(self) -> SyncRoute:
        route: SyncRoute = await self.host.route(self._number)
        return route

    async def commit_update(self, update: WeightUpdate) -> None:
        self.pause_s = await self.host.take(update, self._number)
        self.version = update.version

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        await self.host.sleep(tags)

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        await self.host.wake(tags)

    def close(self) -> None:
        self.host.close()


_HOSTS = ENGINES | {"sglang": "rollout.engines.sglang.adapters:AdapterServers"}


def adapter_engines(
    name: str, folder: Path | str, adapters: Sequence[AdapterShape], **settings: Any
) -> list[AdapterEngine]:
    """An engine for each of `adapters` on the model in `folder`: all in one actor, or on the same SGLang servers.

    Raises:
        EngineError: as the engine `name`, whose `settings` these are; or it would not compute the model, or all of an
            adapter.
    """
    host = lookup_import("engine", name, _HOSTS)(folder, adapters=adapters, **settings)
    return [AdapterEngine(host, number) for number in range(1, 1 + len(adapters))]
