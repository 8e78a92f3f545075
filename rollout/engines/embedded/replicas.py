"""Several embedded engines of one policy on one machine, each in a process of its own."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.base.terminal import say
from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.engines.protocol import ScoredReply, StreamingEngine, Tag, TokenCallback, TrainedEngine
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import SyncRoute, WeightUpdate


class ReplicatedEngine(StreamingEngine, TrainedEngine):
    """Replicas of the embedded engine that read new weights from one folder.

    A call goes to the replica with the smallest load. All samples of one prompt go to the same
    replica, which computes the prompt once, unless it has many more open calls than another.

    A replica whose process dies is started again, up to `restarts` times an hour, and samples its
    open requests again.
    """

    transport = "disk"

    def __init__(
        self,
        settings: EmbeddedSettings,
        placements: Sequence[Mapping[str, Any]],
        *,
        tell: Callable[[str], None] = say,
    ) -> None:
        """Start the replicas.

        Args:
            settings: settings of each replica. They must name a weights folder; `transport` and
                `placement` are replaced.
            placements: Ray's actor options of each replica.
            tell: called with one line when a replica is started again.
        """
        self.version = settings.version
        self.pause_s = 0.0
        self._settings = replace(settings, transport=self.transport)
        self.replicas = [
            HostedEngine(replace(self._settings, placement=placement), tell=tell)
            for placement in placements
        ]

    @property
    def starts(self) -> int:  # type: ignore[override]
        """Number of processes that the replicas have started so far."""
        return sum(replica.starts for replica in self.replicas)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback | None
    ) -> Completion:
        """Sample one completion on the replica with the smallest load; see `StreamingEngine`."""
        replica = min(self.replicas, key=lambda replica: replica.load(prompt_ids))
        return await replica.stream(prompt_ids, sampling, on_tokens)

    async def score(self, replies: Sequence[ScoredReply]) -> list[list[float]]:
        """Return the log-probabilities of replies, of which each replica scores a part."""
        count = len(self.replicas)
        parts = [list(replies[number::count]) for number in range(count)]
        scored_parts = await asyncio.gather(
            *(replica.score(part) for replica, part in zip(self.replicas, parts, strict=True))
        )
        scores: list[list[float]] = [[] for _ in replies]
        for number, scored in enumerate(scored_parts):
            scores[number::count] = scored
        return scores

    async def begin_update(self) -> SyncRoute:
        """Return the route to the folder that all replicas read."""
        return SyncRoute(
            transport=self.transport,
            target=str(self._settings.weights_folder),
            model=str(self._settings.folder),
            checksums=True,
        )

    async def commit_update(self, update: WeightUpdate) -> None:
        """Have every replica compute from the weights of `update`."""
        await asyncio.gather(*(replica.commit_update(update) for replica in self.replicas))
        self.pause_s = max(replica.pause_s for replica in self.replicas)
        self.version = update.version

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Free the memory of all replicas."""
        await asyncio.gather(*(replica.sleep(tags) for replica in self.replicas))

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Allocate the memory of all replicas again."""
        await asyncio.gather(*(replica.wake(tags) for replica in self.replicas))

    def close(self) -> None:
        """End the replicas and remove the weights folder."""
        for replica in self.replicas:
            replica.close()
