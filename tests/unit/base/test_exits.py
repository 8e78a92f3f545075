"""`sys.exit` in a task is that task's error, and nothing else of a task changes."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import warnings

import pytest

from rollout.base.task_group import Exited, contain_exits


def test_a_task_that_exits_fails_alone_and_who_waits_hears_of_it() -> None:
    async def leave(status: int) -> None:
        await asyncio.sleep(0)
        sys.exit(status)

    async def cleans_up_and_leaves() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            sys.exit("while it was cancelled")

    async def play() -> str:
        contain_exits()
        with pytest.raises(Exited, match=r"^sys\.exit\(3\)$"):
            await asyncio.create_task(leave(3))
        ending = asyncio.create_task(cleans_up_and_leaves())
        await asyncio.sleep(0)
        ending.cancel()
        with pytest.raises(Exited, match="while it was cancelled"):
            await ending
        return "goes on"

    assert asyncio.run(play()) == "goes on"


def test_a_task_is_as_before_to_libraries_that_look_at_it() -> None:
    async def value(number: int) -> int:
        await asyncio.sleep(0)
        return number

    async def play() -> int:
        contain_exits()
        task = asyncio.create_task(value(7), name="seven")
        coroutine = task.get_coro()
        assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED  # type: ignore[arg-type]
        assert "value() running" in repr(task) and task.get_name() == "seven"
        never = asyncio.create_task(value(8))
        never.cancel()  # before it began
        await asyncio.wait({never})
        assert never.cancelled()
        return await task

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of coroutines that nobody awaited
        assert asyncio.run(play()) == 7
        gc.collect()
