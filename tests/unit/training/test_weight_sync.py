"""Weight sync of one policy: versions, deaths of the engine, and weights that are sent again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from mcore_mas.training.weight_sync import WeightSync, resend_lost_weights
from rollout.base.errors import EngineError
from rollout.sync.transport import SyncRoute, WeightUpdate
from tests.support.simulated import handed_over

# Reason why an engine does not take an update: its process dies and is started again, or it
# refuses.
Failure = Literal["death", "refusal"]


class FakeTrainer:
    """Trainer that records its calls, and sends nothing.

    Attributes:
        log: such as "export 3".
    """

    def __init__(self) -> None:
        self.log: list[str] = []

    async def send_weights(self, route: SyncRoute, version: int) -> WeightUpdate:
        self.log.append(f"export {version}")
        return handed_over(version)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        self.log.append("awake")
        yield


class FakeEngine:
    """Engine that does not take the first updates.

    Attributes:
        failures: one for each update that it does not take.
        aborted: messages of the errors that ended an update.
        lost: set when it has lost its weights.
    """

    def __init__(self, *failures: Failure) -> None:
        self.version = 0
        self.pause_s = 0.25
        self.starts = 1
        self.failures: list[Failure] = list(failures)
        self.aborted: list[str] = []
        self.lost = asyncio.Event()
        self._is_dead = False

    async def begin_update(self) -> SyncRoute:
        if self._is_dead:
            self.starts += 1
            self._is_dead = False
        return SyncRoute(transport="none", target="", model="")

    async def commit_update(self, update: WeightUpdate) -> None:
        if self.failures:
            self._is_dead = self.failures.pop(0) == "death"
            raise EngineError("not taken")
        self.version = update.version

    def abort_update(self, error: Exception) -> None:
        self.aborted.append(str(error))

    async def weights_lost(self) -> None:
        await self.lost.wait()
        self.lost.clear()


def make_sync(
    trainer: FakeTrainer, engine: FakeEngine, versions: Sequence[int] = (0,)
) -> WeightSync:
    return WeightSync(trainer, engine, versions=versions)  # type: ignore[arg-type]


def test_a_push_is_repeated_after_deaths_of_the_engine() -> None:
    trainer = FakeTrainer()
    engine = FakeEngine("death", "death")
    sync = make_sync(trainer, engine, versions=[3])
    metrics = asyncio.run(sync.push(5))
    assert trainer.log == ["export 5"] * 3
    assert engine.version == 5
    assert engine.starts == 3
    assert engine.aborted == []
    assert metrics["engine_pause_s"] == 0.25
    assert metrics["hand_over_mb"] == 0.0
    assert sync.versions == [3, 5]


def test_a_refusal_ends_the_push() -> None:
    sync = make_sync(FakeTrainer(), FakeEngine("death", "refusal"))
    with pytest.raises(EngineError, match="not taken"):
        asyncio.run(sync.push(1))
    assert sync.versions == [0]


def test_the_age_of_a_version_is_the_number_of_later_updates() -> None:
    sync = make_sync(FakeTrainer(), FakeEngine(), versions=[3, 5])
    assert [sync.age(version) for version in (2, 3, 4, 5)] == [2, 1, 1, 0]


def test_versions_that_no_turn_can_be_of_are_forgotten() -> None:
    sync = make_sync(FakeTrainer(), FakeEngine(), versions=[1, 2, 4, 7])
    sync.forget_versions(max_age=1)
    assert sync.versions == [4, 7]
    sync.forget_versions(max_age=0)
    assert sync.versions == [7]


def test_an_engine_that_lost_its_weights_gets_the_same_version_again() -> None:
    """A push that fails is reported to waiting calls, and the next loss is answered."""
    trainer = FakeTrainer()
    engine = FakeEngine()
    sync = make_sync(trainer, engine)

    async def lose_weights(*failures: Failure) -> None:
        engine.failures = list(failures)
        engine.lost.set()
        while engine.lost.is_set():
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)

    async def run() -> None:
        async with resend_lost_weights([sync]):
            await sync.push(1)
            await lose_weights()
            await lose_weights("refusal")
            await lose_weights()

    asyncio.run(run())
    assert trainer.log == ["export 1", *["awake", "export 1"] * 3]
    assert engine.aborted == ["not taken"]
    assert sync.versions == [0, 1]
