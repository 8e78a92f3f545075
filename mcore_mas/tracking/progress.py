"""Progress of a job in steps: a bar on a terminal, or lines in the job's log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mcore_mas.runtime.user_terminal import user_terminal
from rollout.base.terminal import say

_SECONDS_BETWEEN_LINES = 5.0  # on an output that several jobs share


class ProgressReporter:
    """Reports finished steps and notes of a job.

    A process whose stderr is a terminal draws a bar there. A job whose stderr is its log writes one
    line per step to the log, and at most every 5 seconds one line to the terminal or pipe of the
    pipeline, where other jobs may be writing too. Bar and shared lines show the newest value of each
    metric, such as the accuracy of the latest validation.
    """

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        """Begin with `done` of `total` steps done.

        Args:
            title: beginning of each line, such as "demo_math train".
        """
        self._title = title
        self._total = total
        self._last_shared_line = time.monotonic()
        self._first_report: tuple[int, float] | None = None  # steps done, time
        self._newest: dict[str, float] = {}  # metrics by label
        self._shared_terminal = None if sys.stderr.isatty() else user_terminal()
        # A notebook cell shows the last line only.
        self._line_end = "\r" if Console(stderr=True).is_jupyter else "\n"
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(title, total=total, completed=done, status="")

    def __enter__(self) -> ProgressReporter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            with suppress(OSError):  # the terminal may be gone
                self._bar.stop()

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        """Report that `done` steps are finished, with metrics by the labels to show."""
        self._newest = {**self._newest, **metrics}
        if self._bar:
            self._bar.update(self._task, completed=done, status=_status(self._newest))
            return

        now = time.monotonic()
        finished = done == self._total
        remaining = self._remaining_time(done, now)
        start = f"{self._title}: {done}/{self._total}"
        line = f"{start}  {_status(metrics)}{remaining}"
        say(line, end="\n" if finished else self._line_end)
        due = now - self._last_shared_line > _SECONDS_BETWEEN_LINES
        if self._shared_terminal and (finished or due):
            self._last_shared_line = now
            say(f"{start}  {_status(self._newest)}{remaining}", self._shared_terminal)

    def note(self, text: str) -> None:
        """Print one line of text, above the bar if there is one."""
        line = f"{self._title}: {text}"
        say(line)
        if self._shared_terminal:
            say(line, self._shared_terminal)

    def _remaining_time(self, done: int, now: float) -> str:
        """Estimate the remaining time from the steps since the first report.

        The time before that report includes the start of engines.
        """
        if self._first_report is None:
            self._first_report = (done, now)
        first_done, first_time = self._first_report
        if done == first_done:
            return ""
        seconds_per_step = (now - first_time) / (done - first_done)
        seconds = seconds_per_step * (self._total - done)
        return f"  left {int(seconds // 60)}:{int(seconds % 60):02d}"


def _status(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{label} {value:.4g}" for label, value in metrics.items())
