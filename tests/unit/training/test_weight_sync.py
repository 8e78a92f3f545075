"""One policy's weight sync: versions in order, an engine's death survived, and lost weights pushed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mcore_mas.training.weight_sync import WeightSync, resend_lost_weights
from rollout.base.errors import EngineError
from rollout.sync.transport import SyncRoute, WeightUpdate
from tests.support.simulated import handed_over


class Trainer:
    """Sends nothing, and notes what for."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def export(self, route: SyncRoute, version: int) -> WeightUpdate:
        self.said.append(f"export {version}")
        return handed_over(version)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        self.said.append("awake")
        yield


class Engine:
    """Refuses the first updates, of which some are followed by a start."""

    def __init__(self, *refusals: bool) -> None:
        self.version, self.pause_s, self.starts = 0, 0.25, 1
        self.refusals = list(refusals)  # whether it has died of it
        self.aborted: list[str] = []
        self.lost = asyncio.Event()
        self._died = False

    async def begin_update(self) -> SyncRoute:
        self.starts += self._died
        self._died = False
        return SyncRoute(transport="none", target="", model="")

    async def commit_update(self, update: WeightUpdate) -> None:
        if self.refusals:
            self._died = self.refusals.pop(0)
            raise EngineError("not taken")
        self.version = update.version

    def abort_update(self, error: Exception) -> None:
        self.aborted.append(str(error))

    async def weights_lost(self) -> None:
        await self.lost.wait()
        self.lost.clear()


def test_a_push_survives_deaths_of_the_engine_and_numbers_go_up() -> None:
    trainer, engine = Trainer(), Engine(True, True)
    sync = WeightSync(trainer, engine, versions=[3])  # type: ignore[arg-type]
    metrics = asyncio.run(sync.push(5))
    assert trainer.said == ["export 5"] * 3
    assert (engine.version, engine.starts, engine.aborted) == (5, 3, [])
    assert metrics["engine_pause_s"] == 0.25 and metrics["hand_over_mb"] == 0.0
    assert sync.versions == [3, 5]
    assert [sync.age(version) for version in (2, 3, 4, 5)] == [2, 1, 1, 0]


def test_what_is_refused_for_another_reason_ends_the_push() -> None:
    engine = Engine(True, False)
    sync = WeightSync(Trainer(), engine)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="not taken"):
        asyncio.run(sync.push(1))
    assert sync.versions == [0]


def test_an_engine_that_lost_its_weights_gets_the_same_version_again() -> None:
    async def play() -> tuple[Any, Any, Any]:
        trainer, engine = Trainer(), Engine()
        sync = WeightSync(trainer, engine)  # type: ignore[arg-type]
        async with resend_lost_weights([sync]):
            await sync.push(1)
            for refusals in ([], [False], []):
                engine.refusals = refusals
                engine.lost.set()
                while engine.lost.is_set():
                    await asyncio.sleep(0)
                for _ in range(5):
                    await asyncio.sleep(0)
        return trainer, engine, sync

    trainer, engine, sync = asyncio.run(play())
    assert trainer.said == ["export 1", *["awake", "export 1"] * 3]
    assert engine.aborted == [
        "not taken"
    ]  # who waits for the weights hears of it, and the watch goes on
    assert sync.versions == [0, 1]
