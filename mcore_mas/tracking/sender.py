"""Threads that send metrics.jsonl to trackers, so that no step of a training waits for a tracker."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mcore_mas.tracking.metrics_log import MetricsRow
from rollout.base.json_files import read_json_lines

SEND_INTERVAL_S = 2.0
RETRY_INTERVAL_S = 15.0  # after a failure
ROWS_PER_WRITE = 100
# Beginnings of the parts that SQLAlchemy adds to the message of a database.
_SQLALCHEMY_DETAILS = ("[SQL: ", "(Background on this error at: ")


class MetricsWriter(Protocol):
    """Connection to the run of one tracker, used by one thread."""

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Send rows of metrics.jsonl. After an error it is called again with the same rows."""

    def close(self, status: str) -> None:
        """End the tracker's run as FINISHED, FAILED or KILLED."""


class MetricsSender:
    """A thread that reads metrics.jsonl from an offset and sends new rows to one tracker.

    If the tracker fails, the thread warns, keeps its offset and tries again. It does not warn again
    before the tracker has worked, except at the end.
    """

    def __init__(
        self,
        tracker: str,
        open_writer: Callable[[], MetricsWriter],
        path: Path,
        warn: Callable[[str], None],
        *,
        offset: int = 0,
        advice: str = "",
    ) -> None:
        """Start the thread.

        Args:
            tracker: its name, for warnings.
            open_writer: connects to the tracker; called by the thread until it succeeds.
            path: the metrics.jsonl to send.
            offset: first byte of the file to send.
            advice: end of the warning that the tracker may lack metrics; it says how to send them.
        """
        self._tracker = tracker
        self._open_writer = open_writer
        self._path = path
        self._warn = warn
        self._offset = offset
        self._advice = advice
        self._writer: MetricsWriter | None = None
        self._failing = False
        self._status = "FINISHED"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{tracker} sender", daemon=True)
        self._thread.start()

    def close(self, status: str) -> None:
        """Ask the thread to send the remaining rows and to end the tracker's run."""
        self._status = status
        self._closing.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to stop; warn if it does not stop in time."""
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            self._warn(
                f"{self._tracker} does not answer; {self._path} has all metrics{self._advice}"
            )

    def _run(self) -> None:
        closing = False
        while not closing:
            interval = RETRY_INTERVAL_S if self._failing else SEND_INTERVAL_S
            closing = self._closing.wait(interval)
            try:
                self._send(closing=closing)
            except Exception as error:  # trackers raise errors of any type
                self._report_failure(error, closing=closing)
            else:
                if self._failing:
                    self._warn(f"{self._tracker} works again and has all metrics so far")
                self._failing = False

    def _send(self, *, closing: bool) -> None:
        if self._writer is None:
            self._writer = self._open_writer()
        rows, end = read_json_lines(self._path, self._offset)
        write_rows(self._writer, rows)
        self._offset = end
        if closing:
            self._writer.close(self._status)

    def _report_failure(self, error: Exception, *, closing: bool) -> None:
        problem = f"{self._tracker} does not take metrics ({short_error(error)})"
        if closing:
            self._warn(f"{problem}; {self._path} has all metrics{self._advice}")
        elif not self._failing:
            self._warn(f"{problem}; they are sent from {self._path} when it works again")
        self._failing = True


def write_rows(writer: MetricsWriter, rows: Sequence[MetricsRow]) -> None:
    """Write the rows that have a step, in calls of at most ROWS_PER_WRITE rows."""
    rows = [row for row in rows if type(row.get("step")) is int]
    for start in range(0, len(rows), ROWS_PER_WRITE):
        writer.write(rows[start : start + ROWS_PER_WRITE])


def short_error(error: BaseException) -> str:
    """Return an error's type and message as `short_text`."""
    return short_text(f"{type(error).__name__}: {error}")


def short_text(text: str) -> str:
    """Return the text of an error on one line of at most 325 characters.

    The middle of a longer text is left out: libraries put the request at the start, and the
    reason at the end. SQLAlchemy puts the reason first; its statement, in which there may be text
    of models, is left out.
    """
    for detail in _SQLALCHEMY_DETAILS:
        text = text.partition(detail)[0]
    text = " ".join(text.split())
    if len(text) <= 320:
        return text
    return f"{text[:160]} ... {text[-160:]}"
