"""Watchdogs of asynchronous work: one tells who waits for what, one tells that the event loop itself is blocked."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something that is waited for."""

    what: str
    since: float  # s, on the event loop's clock


class Waiter(Protocol):
    """What a watchdog looks at."""

    def waits(self) -> list[Wait]:
        """Everything it waits for now; [] when it waits for nothing that is known."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiter for one thing."""

    wait: Wait

    def waits(self) -> list[Wait]:
        """The one thing."""
        return [self.wait]


class Watchdog:
    """Looks at all collections of a run at once: one that queues behind another is no stall.

    A call, a tool or a trajectory that ends is progress. After `quiet_s` without any, one line for each of the `shown`
    that have waited longest goes to `say`, again after twice the time, four times, and so on until something ends.
    An event loop that is blocked for as long is told of from another thread.
    """

    def __init__(self, quiet_s: float, say: Callable[[str], None], *, shown: int = 5) -> None:
        self._quiet_s = quiet_s
        self._say = say
        self._shown = shown
        self._watched: dict[object, tuple[str, Waiter]] = {}
        self._pulse: EventLoopMonitor | None = None
        self._progress = 0.0  # when something began or ended last, as far as was seen
        self._patience = quiet_s
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def over(self, name: str, waiter: Waiter) -> Iterator[None]:
        """Watch `waiter` for the block."""
        loop = asyncio.get_running_loop()
        key = object()  # two may have one name
        self._watched[key] = name, waiter
        self._stir(loop.time())
        if self._timer is None:
            self._timer = loop.call_later(self._quiet_s / 4, self._look)
            self._pulse = EventLoopMonitor(self._quiet_s, self._say)
        try:
            yield
        finally:
            del self._watched[key]
            self._stir(loop.time())
            if not self._watched and self._timer is not None and self._pulse is not None:
                self._timer.cancel()
                self._pulse.end()
                self._timer = self._pulse = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._pulse is not None:
            self._pulse.beat()
        found = [(name, waiter.waits()) for name, waiter in self._watched.values()]
        # whoever waits for something new has got what it waited for before
        begun = max((wait.since for _, waits in found for wait in waits), default=0.0)
        self._stir(begun)
        quiet = now - self._progress
        if quiet >= self._patience:
            self._tell(found, quiet, now)
            self._patience = 2 * quiet
        self._timer = loop.call_later(self._quiet_s / 4, self._look)

    def _stir(self, at: float) -> None:
        if at > self._progress:
            self._progress, self._patience = at, self._quiet_s

    def _tell(self, found: list[tuple[str, list[Wait]]], quiet: float, now: float) -> None:
        def since(one: tuple[str, list[Wait]]) -> float:
            return min((wait.since for wait in one[1]), default=now)

        self._say(f"nothing has finished for {quiet:.0f} s; {len(found)} wait, those that have waited longest:")
        for name, waits in sorted(found, key=since)[: self._shown]:
            what = ", ".join(f"{wait.what} for {now - wait.since:.0f} s" for wait in waits)
            self._say(f"  {name}: {what or 'the orchestra itself'}")
        if len(found) > self._shown:
            self._say(f"  and {len(found) - self._shown} more")


_FRAMES = 4  # of the code that blocks, the innermost last


class EventLoopMonitor:
    """Watches the thread that made it, until `end`.

    After `quiet_s` without a `beat` one line goes to `say`, again after twice the time, four times, and so on.
    """

    def __init__(self, quiet_s: float, say: Callable[[str], None]) -> None:
        self._quiet_s = quiet_s
        self._say = say
        self._watched = threading.get_ident()
        self._last = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    def beat(self) -> None:
        """The event loop is alive."""
        self._last = time.monotonic()

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _watch(self) -> None:
        patience = self._quiet_s
        while not self._ended.wait(self._quiet_s / 4):
            quiet = time.monotonic() - self._last
            if quiet < self._quiet_s:
                patience = self._quiet_s
            elif quiet >= patience:
                patience = 2 * quiet
                self._say(
                    f"the event loop has been blocked for {quiet:.0f} s, so that no deadline holds and nobody goes on, "
                    f"in {_where(self._watched)}"
                )


def _where(thread: int) -> str:
    frames = traceback.extract_stack(sys._current_frames().get(thread))[-_FRAMES:]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
