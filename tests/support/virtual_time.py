"""An event loop whose clock jumps to the next timer: what sleeps for an hour takes no time, in the right order.

What runs in a thread takes no virtual time: until it is done the clock stands still, so that nothing of the machine's
speed, or of what else it does, is seen in a result.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing but threads: the time that it is asked to wait has passed."""

    now = 0.0
    threads = 0  # that are at work

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or (timeout > 0 and self.threads):  # something outside must happen first
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

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., T], *arguments: Any
    ) -> asyncio.Future[T]:
        """As the base class does, with the clock stopped until the thread is done."""
        self._jumping.threads += 1
        done = super().run_in_executor(executor, func, *arguments)
        done.add_done_callback(self._came_back)
        return done

    def _came_back(self, _: asyncio.Future[Any]) -> None:
        self._jumping.threads -= 1


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
