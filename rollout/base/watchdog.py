"""Watchdog that reports what a run waits for when nothing has finished for a while."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_FRAMES = 4  # innermost frames that are reported of code that blocks the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A call that has not returned yet.

    Attributes:
        description: description of the call, such as "a (turn 0) waits for policy p".
        since: start of the wait, in seconds on the event loop's clock.
    """

    description: str
    since: float


Waits = Callable[[], list[Wait]]  # returns the current waits


class Watchdog:
    """Watchdog over the trajectories of all collections of a run, and over the coach.

    A collection that queues behind another is not a stall: the end of any call, tool or trajectory
    is progress. After `quiet_s` without progress, the watchdog reports one line for each of the
    `shown` trajectories that have waited longest. It reports again after twice that time, four
    times, and so on, until something ends. If the event loop itself is blocked, a thread reports that,
    at the same intervals.
    """

    def __init__(self, quiet_s: float, report: Callable[[str], None], *, shown: int = 5) -> None:
        self._quiet_s = quiet_s
        self._report = report
        self._shown = shown
        self._watched: dict[object, tuple[str, Waits]] = {}  # (name, waits) of each trajectory
        self._progress = 0.0  # time of the latest progress that was seen
        self._patience = quiet_s  # time between the latest progress and the next report
        self._timer: asyncio.TimerHandle | None = None
        self._loop_ran = 0.0  # when the event loop ran last, on the monotonic clock
        self._ended = threading.Event()  # set when nothing is watched any more

    @contextmanager
    def over(self, name: str, waits: Waits) -> Iterator[None]:
        """Watch a trajectory, or the coach, for this block.

        Args:
            name: name in the reports.
            waits: returns the calls that it waits for at the moment.
        """
        loop = asyncio.get_running_loop()
        key = object()  # two may have one name
        self._watched[key] = name, waits
        self._note_progress(loop.time())
        if self._timer is None:
            self._start(loop)
        try:
            yield
        finally:
            del self._watched[key]
            self._note_progress(loop.time())
            if not self._watched and self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._ended.set()

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._quiet_s / 4, self._check)
        self._loop_ran = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(
            target=self._watch_loop,
            args=(threading.get_ident(), self._ended),
            name="watchdog",
            daemon=True,
        ).start()

    def _check(self) -> None:
        """Report if nothing has finished for long enough, and check again later."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._loop_ran = time.monotonic()
        waiting = [(name, waits()) for name, waits in self._watched.values()]
        # A new wait means that the previous one has ended.
        for _, waits in waiting:
            for wait in waits:
                self._note_progress(wait.since)
        quiet = now - self._progress
        if quiet >= self._patience:
            self._report_waits(waiting, quiet, now)
            self._patience = 2 * quiet
        self._timer = loop.call_later(self._quiet_s / 4, self._check)

    def _note_progress(self, at: float) -> None:
        """Note progress at a time of the event loop's clock.

        If it is the latest progress, the next report is due after `quiet_s` again.
        """
        if at > self._progress:
            self._progress = at
            self._patience = self._quiet_s

    def _report_waits(
        self, waiting: list[tuple[str, list[Wait]]], quiet: float, now: float
    ) -> None:
        def waits_since(entry: tuple[str, list[Wait]]) -> float:
            return min((wait.since for wait in entry[1]), default=now)

        self._report(
            f"nothing has finished for {quiet:.0f} s; {len(waiting)} wait, those that have waited longest:"
        )
        for name, waits in sorted(waiting, key=waits_since)[: self._shown]:
            parts = [f"{wait.description} for {now - wait.since:.0f} s" for wait in waits]
            self._report(f"  {name}: {', '.join(parts) or 'the orchestra itself'}")
        if len(waiting) > self._shown:
            self._report(f"  and {len(waiting) - self._shown} more")

    def _watch_loop(self, thread: int, ended: threading.Event) -> None:
        """Report an event loop that is blocked, until `ended` is set; runs in another thread.

        Args:
            thread: identifier of the thread that runs the event loop.
        """
        patience = self._quiet_s
        while not ended.wait(self._quiet_s / 4):
            quiet = time.monotonic() - self._loop_ran
            if quiet < self._quiet_s:
                patience = self._quiet_s
            elif quiet >= patience:
                patience = 2 * quiet
                frames = traceback.extract_stack(sys._current_frames().get(thread))[-_FRAMES:]
                locations = [
                    f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames
                ]
                self._report(
                    f"the event loop has been blocked for {quiet:.0f} s, so no deadline holds and no trajectory "
                    f"proceeds, in {' > '.join(locations)}"
                )
