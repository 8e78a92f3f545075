"""Event loop with a virtual clock, which jumps to the next timer: sleeping for an hour takes no time.

The clock stops while a thread works, so that results do not depend on the machine's speed.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that advances the virtual time instead of waiting; only for threads does it wait.

    Attributes:
        now: virtual time in seconds.
        threads: number of threads that work.
    """

    now = 0.0
    threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or (timeout > 0 and self.threads):
            return super().select(None)  # until a thread or another process acts
        events = super().select(0)
        if not events:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time()` is in virtual seconds from 0."""

    def __init__(self) -> None:
        self._selector_clock = _JumpingSelector()
        super().__init__(self._selector_clock)

    def time(self) -> float:
        return self._selector_clock.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., T], *arguments: Any
    ) -> asyncio.Future[T]:
        """Run a function in a thread; the clock stops until it returns."""
        self._selector_clock.threads += 1
        future = super().run_in_executor(executor, func, *arguments)
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, _: asyncio.Future[Any]) -> None:
        self._selector_clock.threads -= 1


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, as `asyncio.run`; return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
