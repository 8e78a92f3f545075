"""On the same GPUs there is room for engines or for trainers: who takes memory waits until the others have given it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcore_mas.runtime.checkpoint import Checkpoint
from mcore_mas.runtime.rank_pool import TrainerTurns
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.training.colocation import Colocation, trainers_away
from mcore_mas.training.session import load_weights
from mcore_mas.training.step import TrainingSession
from rollout.base.errors import EngineError


class Taker:
    """An engine or a trainer that notes what it does, and takes a moment for it."""

    def __init__(self, name: str, said: list[str], *, busy: bool = False) -> None:
        self._name, self._said, self._busy = name, said, busy

    async def sleep(self, tags: tuple[str, ...] = ("all",)) -> None:
        await self._note("gives", tags)
        if self._busy:
            raise EngineError("requests are running")

    async def wake(self, tags: tuple[str, ...] = ("all",)) -> None:
        await self._note("takes", tags)

    @asynccontextmanager
    async def offloaded(self) -> AsyncIterator[None]:
        await self.sleep()
        yield
        await self.wake()

    async def _note(self, verb: str, tags: tuple[str, ...]) -> None:
        await asyncio.sleep(0)
        self._said.append(f"{self._name} {verb} {'+'.join(tags)}")


def memory_of(said: list[str], *, sleep: bool = True, busy: bool = False) -> Colocation:
    engines: Any = {name: Taker(name, said, busy=busy) for name in ("learner", "frozen")}
    trainers: Any = [Taker("trainer", said), Taker("critic", said)]
    return Colocation(engines, trainers, sleeps=sleep)


def play(memory: Colocation, said: list[str], error: Exception | None = None) -> None:
    async def act() -> None:
        async with memory.rollout(["learner"]):
            said.append("-")
            if error:
                raise error

    asyncio.run(act())


BEFORE = [
    "trainer gives all",
    "critic gives all",
    "learner takes kv_cache",
    "frozen takes kv_cache",
    "-",
]
AFTER = ["trainer takes all", "critic takes all"]


def test_engines_take_what_trainers_gave_and_the_reverse() -> None:
    said: list[str] = []
    play(memory_of(said), said)
    # who is trained gets its weights anew, who is not keeps them
    assert said == [*BEFORE, "learner gives weights+kv_cache", "frozen gives kv_cache", *AFTER]


def test_what_is_abandoned_says_why_and_leaves_the_trainers_awake() -> None:
    said: list[str] = []
    with pytest.raises(ZeroDivisionError):
        play(memory_of(said, busy=True), said, ZeroDivisionError())
    assert said == [*BEFORE, "learner gives kv_cache", "frozen gives kv_cache", *AFTER]


def test_engines_of_their_own_stay_awake() -> None:
    said: list[str] = []
    play(memory_of(said, sleep=False), said)
    assert said == ["trainer gives all", "critic gives all", "-", *AFTER]


def test_of_trainers_one_by_one_only_the_one_that_works_has_memory() -> None:
    said: list[str] = []
    turns, trainers = TrainerTurns(), [Taker("policy", said), Taker("critic", said)]
    for trainer in trainers:
        turns.members.append(cast("TrainerGroup", trainer))

    async def work(trainer: Taker) -> None:
        async with turns.take(cast("TrainerGroup", trainer)):
            await asyncio.sleep(0)
            said.append("works")

    async def act() -> None:
        await asyncio.gather(*map(work, trainers))

    asyncio.run(act())
    assert said[:3] == ["critic gives all", "policy takes all", "works"]
    assert said[3:] == ["policy gives all", "critic takes all", "works"]
    said.clear()
    memory = Colocation({}, cast("list[TrainerGroup]", trainers), one_by_one=True)
    play(memory, said)
    assert said == ["policy gives all", "critic gives all", "-"]  # and take it when they are asked


def test_a_server_that_died_beside_trainers_starts_while_they_have_given_their_memory() -> None:
    said: list[str] = []
    trainers: Any = [Taker("trainer", said), Taker("critic", said)]

    async def start() -> None:
        async with trainers_away(trainers):
            said.append("starts")

    asyncio.run(start())
    assert said == [
        "trainer gives all",
        "critic gives all",
        "starts",
        "critic takes all",
        "trainer takes all",
    ]


@pytest.mark.parametrize("found", [True, False])
def test_engines_of_a_run_that_goes_on_start_while_trainers_have_given_their_memory(
    found: bool,
) -> None:
    """A server sizes its cache by the memory that it finds free, and starts when it is first asked, to sleep too."""
    said: list[str] = []

    async def note(what: str) -> None:
        said.append(what)

    own = SimpleNamespace(lora=None)
    session = SimpleNamespace(
        config=SimpleNamespace(engine=SimpleNamespace(sleep=True), policies={"learner": own}),
        groups={
            "trainer": SimpleNamespace(
                ready=lambda: note("loads"), restore=lambda _: note("restores")
            )
        },
        weight_sync={"learner": SimpleNamespace(push=lambda version: note(f"pushes {version}"))},
        memory=memory_of(said),
    )
    saved = Checkpoint(folder=Path("checkpoint"), step=3, state={}, metric=None) if found else None
    asyncio.run(load_weights(cast("TrainingSession", session), saved, engines_may_be_newer=False))
    asleep = ["learner gives weights+kv_cache", "frozen gives kv_cache", *AFTER]
    assert said == ["loads", *([*BEFORE[:-1], *asleep, "restores", "pushes 3"] if found else [])]
