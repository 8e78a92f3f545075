"""Colocation: engines and trainers free GPU memory before the others take it."""

import asyncio
from typing import Any

import pytest

from mcore_mas.training.colocation import Colocation, offload_trainers
from tests.support.sleepers import Sleeper

BEFORE_ROLLOUT = [
    "trainer sleeps",
    "critic sleeps",
    "learner wakes kv_cache",
    "frozen wakes kv_cache",
    "rollout",
]
AFTER_ROLLOUT = ["trainer wakes", "critic wakes"]


def make_trainers(log: list[str]) -> Any:
    return [Sleeper("trainer", log), Sleeper("critic", log)]


def make_colocation(log: list[str], *, sleeps: bool = True, is_busy: bool = False) -> Colocation:
    engines: Any = {name: Sleeper(name, log, is_busy=is_busy) for name in ("learner", "frozen")}
    return Colocation(engines, make_trainers(log), sleeps=sleeps)


def run_rollout(colocation: Colocation, log: list[str], error: Exception | None = None) -> None:
    """Enter the block of a rollout after which the policy `learner` is trained."""

    async def run() -> None:
        async with colocation.rollout(["learner"]):
            log.append("rollout")
            if error is not None:
                raise error

    asyncio.run(run())


def test_engines_take_the_memory_that_trainers_free_and_the_reverse() -> None:
    """The trained policy gets new weights, so that its engine frees the old ones."""
    log: list[str] = []
    run_rollout(make_colocation(log), log)
    assert log == [
        *BEFORE_ROLLOUT,
        "learner sleeps weights+kv_cache",
        "frozen sleeps kv_cache",
        *AFTER_ROLLOUT,
    ]


def test_after_an_error_the_trainers_are_awake_and_the_error_is_raised() -> None:
    log: list[str] = []
    with pytest.raises(ZeroDivisionError):
        run_rollout(make_colocation(log, is_busy=True), log, ZeroDivisionError())
    assert log == [
        *BEFORE_ROLLOUT,
        "learner sleeps kv_cache",
        "frozen sleeps kv_cache",
        *AFTER_ROLLOUT,
    ]


def test_engines_on_gpus_of_their_own_stay_awake() -> None:
    log: list[str] = []
    run_rollout(make_colocation(log, sleeps=False), log)
    assert log == ["trainer sleeps", "critic sleeps", "rollout", *AFTER_ROLLOUT]


def test_trainers_that_take_turns_are_not_woken_after_a_rollout() -> None:
    log: list[str] = []
    run_rollout(Colocation({}, make_trainers(log), one_by_one=True), log)
    assert log == ["trainer sleeps", "critic sleeps", "rollout"]


def test_all_trainers_are_offloaded_while_a_server_is_restarted() -> None:
    log: list[str] = []

    async def restart() -> None:
        async with offload_trainers(make_trainers(log)):
            log.append("the server starts")

    asyncio.run(restart())
    assert log == [
        "trainer sleeps",
        "critic sleeps",
        "the server starts",
        "critic wakes",
        "trainer wakes",
    ]
