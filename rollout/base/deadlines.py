"""Deadlines: how long calls, tools, trajectories and batches may take, and what is raised when they take longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from rollout.base.errors import EngineError, EnvError
from rollout.base.task_group import cancel_tasks

T = TypeVar("T")

LEFT = "; it goes on though cancelled, and was left behind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that one of each may take; None is any time. A call's own limit belongs to its policy's `Player`."""

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


async def within(seconds: float | None, work: Awaitable[T], late: type[Late] = Late) -> T:
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
