"""How far a run is: one living line on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mcore_mas.joblog import terminal

_SECONDS_BETWEEN_LINES = 15.0  # on a terminal that several jobs share


class Reporter:
    """Tells of steps as they finish; `note` is for anything else worth a line.

    A process on a terminal draws a bar. A job whose output goes to a log writes a line per step there, and now and then
    one to the terminal it was started from, where other jobs may be writing too.
    """

    def __init__(self, what: str, total: int, first: int = 0) -> None:
        """`what` is being done in `total` steps, of which `first` are done already."""
        self._what, self._total, self._first = what, total, first
        self._started = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        self._shared = terminal() if not sys.stderr.isatty() else None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[status]}"), console=Console(stderr=True))
            self._task = self._bar.add_task(what, total=total, completed=first, status="")

    def __enter__(self) -> Reporter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        """`done` steps are finished; `metrics` are shown as they are named."""
        status = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        if self._bar:
            self._bar.update(self._task, completed=done, status=status)
            return
        left = ""
        if done > self._first:
            seconds = (time.monotonic() - self._started) / (done - self._first) * (self._total - done)
            left = f"  left {int(seconds // 60)}:{int(seconds % 60):02d}"
        line = f"{self._what}: {done}/{self._total}  {status}{left}"
        print(line, file=sys.stderr, flush=True)
        if self._shared and (done == self._total or time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES):
            self._last_line = time.monotonic()
            print(line, file=self._shared, flush=True)

    def note(self, text: str) -> None:
        """One line of text."""
        line = f"{self._what}: {text}"
        if self._bar:
            self._bar.console.print(line, highlight=False, markup=False)
            return
        print(line, file=sys.stderr, flush=True)
        if self._shared:
            print(line, file=self._shared, flush=True)
