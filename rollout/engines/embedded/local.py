"""Embedded engines in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.dispatcher import Dispatcher
from rollout.engines.embedded.requests import Report, Request
from rollout.engines.protocol import ScoredReply, StreamingEngine, TokenCallback
from rollout.models.tensors import WeightStream
from rollout.records.trajectory import Completion, Sampling


class LocalEngine(Dispatcher):
    """Embedded engine in this process, which decodes one step in each exchange.

    On a CPU it decodes on the event loop's thread, between other coroutines. On a GPU it decodes in
    another thread, so that other engines work while it waits for the GPU.

    Attributes:
        core: the embedded engine.
    """

    def __init__(self, core: EmbeddedEngine) -> None:
        super().__init__()
        self.core = core

    async def load_weights(self, tensors: WeightStream, version: int) -> None:
        """Replace all weights; see `Engine`."""
        self.core.load_weights(tensors, version)

    async def score(self, replies: Sequence[ScoredReply]) -> list[list[float]]:
        """Return the log-probabilities of replies; see `ScoringEngine`."""
        return self.core.score(replies)

    async def exchange(self, requests: list[Request], aborts: list[int]) -> list[Report]:
        """Exchange requests and reports with the engine, for one decoding step; see `Dispatcher`."""
        if self.core.decoder.device.type == "cpu":
            return self.core.exchange(requests, aborts)
        return await asyncio.to_thread(self.core.exchange, requests, aborts)


class LocalReplicas(StreamingEngine):
    """Several engines of one model; a request goes to the one with the smallest `load`."""

    def __init__(self, engines: Sequence[LocalEngine]) -> None:
        self.engines = engines

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback | None
    ) -> Completion:
        """Sample one completion; see `StreamingEngine`."""
        engine = min(self.engines, key=lambda engine: engine.load(prompt_ids))
        return await engine.stream(prompt_ids, sampling, on_tokens)
