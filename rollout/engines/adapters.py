"""Engine of one adapter among several that a host serves on one frozen model."""

from collections.abc import Sequence
from typing import Any

from rollout.engines.protocol import ScoredReply, StreamingEngine, Tag, TokenCallback, TrainedEngine
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import SyncRoute, WeightUpdate


class AdapterEngine(StreamingEngine, TrainedEngine):
    """Engine of one adapter; several of them share a host.

    Attributes:
        host: `HostedEngine` or `AdapterServers`, which has the processes and the frozen weights.
        number: number of the adapter on the host, from 1. The adapter has no effect before its first
            weights come.
    """

    def __init__(self, host: Any, number: int) -> None:
        self.host = host
        self.number = number
        self.version = 0
        self.pause_s = 0.0

    @property
    def starts(self) -> int:  # type: ignore[override]
        """The host's `starts`; see `TrainedEngine`."""
        return int(self.host.starts)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback | None
    ) -> Completion:
        """Sample one completion with the adapter; see `StreamingEngine`."""
        completion: Completion = await self.host.stream(
            prompt_ids, sampling, on_tokens, self.number
        )
        return completion

    async def score(self, replies: Sequence[ScoredReply]) -> list[list[float]]:
        """Return the log-probabilities of replies with the adapter; see `ScoringEngine`."""
        scores: list[list[float]] = await self.host.score(replies, self.number)
        return scores

    async def begin_update(self) -> SyncRoute:
        """Return the route of the adapter's next weights."""
        route: SyncRoute = await self.host.adapter_route(self.number)
        return route

    async def commit_update(self, update: WeightUpdate) -> None:
        """Use the adapter's new weights; see `TrainedEngine`."""
        self.pause_s = await self.host.commit_adapter(update, self.number)
        self.version = update.version

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Have the host give memory back."""
        await self.host.sleep(tags)

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Have the host take memory again."""
        await self.host.wake(tags)

    def close(self) -> None:
        """End the host's processes, which the engines of its other adapters use too."""
        self.host.close()


def adapter_engines(host: Any, count: int) -> list[AdapterEngine]:
    """Return the engines of a host's adapters 1 to `count`."""
    return [AdapterEngine(host, number) for number in range(1, count + 1)]
