"""Deadlines of coroutines, and the errors of those that took longer."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollout.base.async_tasks import cancel_tasks
from rollout.base.errors import EngineError, EnvError

_T = TypeVar("_T")

LEFT_BEHIND = "; it goes on though cancelled, and was left behind"


class Late(Exception):
    """Something took longer than its deadline.

    Attributes:
        part: name of the late part in the metrics: `agent/<name>`, `tool/<env>.<method>`,
            `tool/tools.<name>` or `tool/program`.
    """

    def __init__(self, message: str, part: str = "") -> None:
        super().__init__(message)
        self.part = part


class LateCall(Late, EngineError):
    """An engine had not replied when the deadline passed."""


class LateTool(Late, EnvError):
    """An environment or a tool had not returned when the deadline passed."""


async def with_deadline(
    seconds: float | None, work: Awaitable[_T], error: Callable[[str], Late] = Late
) -> _T:
    """Await `work` and return its result; cancel it if it takes longer than `seconds`.

    `asyncio.timeout` would wait without end for work that ignores its cancellation. This function
    waits for such work `CLEANUP_S` longer, and then leaves it behind (see `cancel_tasks`).

    Args:
        seconds: the deadline; None: no deadline.
        error: returns the error to raise, made from a message.

    Raises:
        Late: the work took longer; the error is the one that `error` returns.
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
    message = f"nothing came within {seconds:g} s"
    raise error(message if ended else message + LEFT_BEHIND)
