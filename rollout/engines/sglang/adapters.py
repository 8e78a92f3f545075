"""SGLang servers that hold adapters of several policies on one frozen model."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from rollout.base.errors import EngineError
from rollout.engines.protocol import ScoredReply, TokenCallback
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.fleet import ServerLeft
from rollout.engines.sglang.replica import Replica
from rollout.engines.sglang.settings import SGLangSettings
from rollout.models.adapter_weights import AdapterShape
from rollout.records.trajectory import Completion, Sampling, VersionSpan
from rollout.sync.transport import SyncRoute, WeightUpdate

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _AdapterSlot:
    """One adapter on the servers.

    Attributes:
        shape: rank, scale and targets of the adapter.
        name: name of the present version on the servers; None before the first update, when the bare
            model computes the requests.
        folder: folder from which the servers read the present version.
        version: number of the present version.
        open_requests: number of open calls for completions and scores of each version, by its name; None
            is the bare model. While a version is being loaded, its update counts as a call.
    """

    shape: AdapterShape
    name: str | None = None
    folder: str = ""
    version: int = 0
    open_requests: Counter[str | None] = field(default_factory=Counter)


class AdapterServers(SGLangEngine):
    """Host of the adapters of several policies, for `AdapterEngine`.

    The servers compute requests of several adapters in one batch. A new version is loaded under a
    name of its own while the one before answers. Requests end with the version with which they
    began, so nothing pauses, and a reply has one version. The older version is unloaded after its
    last request.
    SGLang caches a prefix for its adapter only (`extra_key` of managers/schedule_batch.py).
    """

    def __init__(self, settings: SGLangSettings, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self._slots = {
            number: _AdapterSlot(shape) for number, shape in enumerate(settings.adapters, 1)
        }

    async def stream(  # type: ignore[override]
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_tokens: TokenCallback | None,
        adapter: int,
    ) -> Completion:
        """Sample one completion; see `StreamingEngine`.

        Args:
            adapter: number of the adapter, from 1.
        """
        request = partial(super().stream, prompt_ids, sampling, on_tokens)
        completion, version = await self._call_with_version(self._slots[adapter], request)
        span = VersionSpan(version=version, start=0, end=len(completion.token_ids))
        return replace(completion, versions=(span,))

    async def score(  # type: ignore[override]
        self, replies: Sequence[ScoredReply], adapter: int
    ) -> list[list[float]]:
        """Return the log-probabilities of replies; see `ScoringEngine`.

        Args:
            adapter: number of the adapter, from 1.
        """
        request = partial(super().score, replies)
        logprobs, _version = await self._call_with_version(self._slots[adapter], request)
        return logprobs

    async def _call_with_version(
        self, slot: _AdapterSlot, request: Callable[[str | None], Awaitable[_Answer]]
    ) -> tuple[_Answer, int]:
        """Call `request` with the name of the present version, which stays loaded until the call ends.

        Returns:
            The answer, and the number of the version.
        """
        while True:
            name = slot.name
            version = slot.version
            starts = self.starts
            slot.open_requests[name] += 1
            try:
                return await request(name), version
            except EngineError:
                if name == slot.name or starts == self.starts:
                    raise
                # A server was started again meanwhile, and has the present version only. The loop
                # repeats the call with that version.
            finally:
                slot.open_requests[name] -= 1
                self._unload_unused_versions(slot)

    async def adapter_route(self, number: int) -> SyncRoute:
        """Return the route to an adapter's folder."""
        return SyncRoute(
            transport="adapter",
            target=str(self.weights_folder / str(number)),
            model=str(self.settings.folder),
            adapter=self._slots[number].shape,
        )

    async def commit_adapter(self, update: WeightUpdate, number: int) -> float:
        """Use an adapter's new version from the next request on; return the pause, which is 0 s.

        Raises:
            EngineError: a server refuses the version, or the last server is gone for good. The
                previous version stays in use.
        """
        slot = self._slots[number]
        name = f"{number}-v{update.version}-{uuid.uuid4().hex[:8]}"
        slot.open_requests[name] += 1  # requests that end meanwhile must not unload the version
        starts: int | None = None
        try:
            # A server that starts again loads only the previous version. Send the new one to all servers
            # again in this case; those that have loaded it already leave it as it is.
            while starts != self.starts:
                starts = self.starts
                for replica in list(self.fleet.replicas):
                    with suppress(ServerLeft):
                        await _load(partial(self.fleet.call, replica), name, update.location)
            slot.name = name
            slot.folder = update.location
            slot.version = update.version
        finally:
            slot.open_requests[name] -= 1
            self._unload_unused_versions(slot)
        return 0.0

    def _unload_unused_versions(self, slot: _AdapterSlot) -> None:
        """Have every server unload the versions without open requests, except the present version.

        These may include a new version that one server has refused, and others have loaded.
        """
        unused = [
            name
            for name, open_requests in slot.open_requests.items()
            if open_requests == 0 and name != slot.name
        ]
        for name in unused:
            del slot.open_requests[name]
            if name is None:
                continue  # the bare model stays loaded
            for replica in self.fleet.replicas:
                self.send_in_background(replica, "/unload_lora_adapter", {"lora_name": name})

    async def load_present_weights(self, replica: Replica) -> bool:
        """Load the present versions into a server that was started again.

        Returns:
            True, because the versions always have files to load them from.
        """
        for slot in self._slots.values():
            if slot.name is not None:
                await _load(replica.client.call, slot.name, slot.folder)
        return True


async def _load(call: Callable[..., Awaitable[Any]], name: str, folder: str) -> None:
    """Have a server load an adapter, unless it has loaded it already.

    An earlier request may have succeeded although its answer was lost, and `commit_adapter` repeats
    its requests if a server was started again.
    """
    try:
        await call("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
    except EngineError as error:
        if "already loaded" not in str(error):
            raise
