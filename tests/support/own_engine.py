"""Engine class as a user would write it for `engine.name: package.module:Class`; it samples nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import SyncRoute, WeightUpdate

OWN_ENGINE = f"{__name__}:OwnEngine"


class OwnEngine:
    """Engine that remembers the arguments of its constructor."""

    def __init__(
        self,
        model: str,
        *,
        rows: int,
        max_length: int,
        place: Mapping[str, Any] | None = None,
    ) -> None:
        self.arguments = (model, rows, max_length, place)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        raise NotImplementedError

    async def begin_update(self) -> SyncRoute:
        raise NotImplementedError

    async def commit_update(self, update: WeightUpdate) -> None:
        raise NotImplementedError

    def abort_update(self, error: Exception) -> None:
        raise NotImplementedError

    async def weights_lost(self) -> None:
        raise NotImplementedError
