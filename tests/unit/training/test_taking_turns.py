"""On the same GPUs there is room for engines or for trainers: who takes memory waits until the others have given it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mcore_mas.rollout.base.errors import EngineError
from mcore_mas.training.trainer_group import TrainerGroup, TrainerTurns
from mcore_mas.training.weight_sync import Memory


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

    async def _note(self, verb: str, tags: tuple[str, ...]) -> None:
        await asyncio.sleep(0)
        self._said.append(f"{self._name} {verb} {'+'.join(tags)}")


def memory_of(said: list[str], *, sleep: bool = True, busy: bool = False) -> Memory:
    engines: Any = {name: Taker(name, said, busy=busy) for name in ("learner", "frozen")}
    trainers: Any = [Taker("trainer", said), Taker("critic", said)]
    return Memory(engines, trainers, sleeps=sleep)


def play(memory: Memory, said: list[str], error: Exception | None = None) -> None:
    async def act() -> None:
        async with memory.rollout(["learner"]):
            said.append("-")
            if error:
                raise error

    asyncio.run(act())


BEFORE = ["trainer gives all", "critic gives all", "learner takes kv_cache", "frozen takes kv_cache", "-"]
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
        turns.groups.append(cast("TrainerGroup", trainer))

    async def work(trainer: Taker) -> None:
        async with turns.of(cast("TrainerGroup", trainer)):
            await asyncio.sleep(0)
            said.append("works")

    async def act() -> None:
        await asyncio.gather(*map(work, trainers))

    asyncio.run(act())
    assert said[:3] == ["critic gives all", "policy takes all", "works"]
    assert said[3:] == ["policy gives all", "critic takes all", "works"]
    said.clear()
    memory = Memory({}, cast("list[TrainerGroup]", trainers), one_by_one=True)
    play(memory, said)
    assert said == ["policy gives all", "critic gives all", "-"]  # and take it when they are asked
