"""Several embedded engines of one policy on one machine, each in a process of its own."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.protocol import StreamingEngine, Tag, TokenCallback, TrainedEngine
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import SyncRoute, WeightUpdate


class ReplicatedEngine(StreamingEngine, TrainedEngine):
    """Replicas of the embedded engine that read new weights from one folder.

    A call goes to the replica with the smallest load. All samples of one prompt go to the same replica, which computes
    the prompt once, unless its load is much larger. A replica whose process dies is started again, up to `restarts`
    times an hour, and answers its calls then.
    """

    transport = "disk"

    def __init__(
        self,
        folder: Path | str,
        *,
        places: Sequence[Mapping[str, Any]],
        weights_folder: Path | str,
        **settings: Any,
    ) -> None:
        """Start the replicas on the Hugging Face model in `folder`.

        Args:
            folder: the model.
            places: Ray's actor options of each replica.
            weights_folder: folder that trainers write new weights to.
            settings: other fields of `HostedSettings`.
        """
        self.version = 0
        self.pause_s = 0.0
        self._folder = str(folder)
        self._weights_folder = str(weights_folder)
        self._replicas = [
            HostedEngine(
                folder,
                place=place,
                transport=self.transport,
                weights_folder=weights_folder,
                **settings,
            )
            for place in places
        ]

    @property
    def starts(self) -> int:  # type: ignore[override]
        """Number of processes that the replicas have started so far."""
        return sum(replica.starts for replica in self._replicas)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: TokenCallback | None
    ) -> Completion:
        """Sample one completion on the replica with the smallest load; see `StreamingEngine`."""
        replica = min(self._replicas, key=lambda replica: replica.burden(prompt_ids))
        return await replica.stream(prompt_ids, sampling, on_tokens)

    async def begin_update(self) -> SyncRoute:
        """Return the route to the folder that all replicas read."""
        return SyncRoute(
            transport=self.transport,
            target=self._weights_folder,
            model=self._folder,
            checksums=True,
        )

    async def commit_update(self, update: WeightUpdate) -> None:
        """Let every replica read the weights of an update and compare their checksums."""
        await asyncio.gather(*(replica.commit_update(update) for replica in self._replicas))
        self.version = update.version
        self.pause_s = max(replica.pause_s for replica in self._replicas)

    async def sleep(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        await asyncio.gather(*(replica.sleep(tags) for replica in self._replicas))

    async def wake(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        await asyncio.gather(*(replica.wake(tags) for replica in self._replicas))

    def close(self) -> None:
        """End the processes of the replicas, and remove the folder for weights."""
        for replica in self._replicas:
            replica.close()
