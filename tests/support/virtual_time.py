"""An event loop whose clock jumps to the next timer: what sleeps for an hour takes no time, in the right order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: the time that it is asked to wait has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # nothing is timed: something outside must happen
            return super().select(None)
        events = super().select(0)
        if not events:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its `time()` is in virtual seconds from 0."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
