"""asyncio tasks: run coroutines side by side, and cancel tasks that may ignore a cancellation."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")

CLEANUP_S = 10.0  # seconds that a cancelled task may clean up before it is cancelled again


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines concurrently and return their results in order.

    If one of them raises, or this call is cancelled, the others are cancelled and the exception is
    raised. `asyncio.gather` would leave the others running; `asyncio.TaskGroup` would wrap the
    exception in a group, and wait without end for a task that ignores its cancellation.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_tasks(tasks)
        raise


async def cancel_tasks(
    tasks: Iterable[asyncio.Future[Any]], patience_s: float | None = None
) -> bool:
    """Cancel tasks and wait for their end, at most `patience_s` or else `CLEANUP_S`; drop their exceptions.

    A task that ignores the cancellation is cancelled again every `CLEANUP_S` until it ends.

    Returns:
        True if all tasks have ended.
    """
    tasks = set(tasks)
    if not tasks:
        return True
    timeout_s = CLEANUP_S if patience_s is None else patience_s
    for task in tasks:
        task.cancel()
        task.add_done_callback(retrieve_exception)
    try:
        await asyncio.wait(tasks, timeout=timeout_s)
    except asyncio.CancelledError:
        # The caller of this function is cancelled again, and so are its tasks.
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=timeout_s)
        raise
    finally:
        for task in tasks:
            _cancel_until_done(task)
    return all(task.done() for task in tasks)


def _cancel_until_done(task: asyncio.Future[Any]) -> None:
    """Cancel a task now, and again after every `CLEANUP_S`, until it is done."""
    if not task.done():
        task.cancel()
        asyncio.get_running_loop().call_later(CLEANUP_S, _cancel_until_done, task)


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve a task's exception, because asyncio logs an exception that is never retrieved."""
    if not task.cancelled():
        task.exception()


def set_outcome(future: asyncio.Future[_T], outcome: _T | Exception) -> None:
    """Set the result or the exception of a future, unless it is done or cancelled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
