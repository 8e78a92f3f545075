"""Task groups and deadlines: coroutines side by side, of which none is left running, and how long each may take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout.base.errors import EngineError, EnvError

_T = TypeVar("_T")

PATIENCE_S = 10.0  # that a cancelled task has to clean up, before it is cancelled again and left behind


async def together(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
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


LEFT = "; it goes on though cancelled, and was left behind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that one of each may take; None is any time. A call's own limit is its policy's `EngineClient`'s."""

    tool_s: float | None = None  # a step or another call of the environment
    trajectory_s: float | None = None
    batch_s: float | None = None  # everything that one `collect` plays


class Late(Exception):
    """Something took longer than it may."""

    def __init__(self, text: str, what: str = "") -> None:
        super().__init__(text)
        self.what = what  # `agent/<name>` or `tool/<env>.<method>`, under which it is counted


class LateCall(Late, EngineError):
    """An engine was still at a reply when its time was up."""


class LateTool(Late, EnvError):
    """An environment was still at work when its time was up."""


async def within(seconds: float | None, work: Awaitable[_T], late: type[Late] = Late) -> _T:
    """What `work` gives; it is cancelled when it takes longer than `seconds`, and left behind if it goes on still.

    Raises:
        Late: it did; of the kind `late`.
    """
    if seconds is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
    finally:
        ended = await cancel_tasks([task])
    raise late(f"nothing came within {seconds:g} s" + ("" if ended else LEFT))
