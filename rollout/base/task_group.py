"""Task group: coroutines side by side; when one breaks, none is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_S = 10.0  # that a cancelled task has to clean up, before it is cancelled again and left behind


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results in order. The first exception, or a cancellation, ends the others before it goes on.

    `asyncio.gather` leaves the others running, and a task group wraps the exception in a group.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_tasks(tasks)
        raise


async def cancel_tasks(tasks: Iterable[asyncio.Future[Any]]) -> bool:
    """Cancel what still runs and wait for its end, at most `PATIENCE_S`; what it raises on the way out is dropped.

    Whoever ignores that is left behind, to be cancelled again until it ends: nobody's deadline waits for it.

    Returns:
        Whether all have ended.
    """
    tasks = set(tasks)
    if not tasks:
        return True
    for task in tasks:
        task.cancel()
        task.add_done_callback(_drop)
    try:
        await asyncio.wait(tasks, timeout=PATIENCE_S)
    except asyncio.CancelledError:  # who is told again tells them again
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        raise
    finally:
        for task in tasks:
            _insist(task)
    return all(task.done() for task in tasks)


def _insist(task: asyncio.Future[Any]) -> None:
    """Cancel it now, and again after every `PATIENCE_S`, until it is done."""
    if not task.done():
        task.cancel()
        asyncio.get_running_loop().call_later(PATIENCE_S, _insist, task)


def _drop(task: asyncio.Future[Any]) -> None:
    """Have seen its exception, of which asyncio would complain otherwise."""
    if not task.cancelled():
        task.exception()
