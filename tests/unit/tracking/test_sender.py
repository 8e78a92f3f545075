"""The thread that sends metrics.jsonl to a tracker, whatever the tracker does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from mcore_mas.tracking import sender
from mcore_mas.tracking.metrics_log import MetricsRow
from mcore_mas.tracking.sender import MetricsSender, short_error, short_text


class RecordingWriter:
    """Records the steps that it is sent; fails while `down`."""

    def __init__(self) -> None:
        self.down = False
        self.steps: list[int] = []
        self.calls = 0
        self.status = ""

    def write(self, rows: Sequence[MetricsRow]) -> None:
        if self.down:
            raise OSError("disk full")
        self.calls += 1
        self.steps += [row["step"] for row in rows]

    def close(self, status: str) -> None:
        if self.down:
            raise OSError("disk full")
        self.status = status


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    return path


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let senders look for rows every millisecond."""
    monkeypatch.setattr(sender, "SEND_INTERVAL_S", 0.001)
    monkeypatch.setattr(sender, "RETRY_INTERVAL_S", 0.001)


def append(path: Path, steps: Iterable[int]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step}) + "\n" for step in steps)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.usefixtures("fast")
def test_rows_are_sent_as_they_are_written(path: Path) -> None:
    writer = RecordingWriter()
    append(path, [0])
    thread = MetricsSender("T", lambda: writer, path, pytest.fail)
    wait_for(lambda: writer.steps == [0])
    append(path, [1, 2])
    wait_for(lambda: writer.steps == [0, 1, 2])
    thread.close("KILLED")
    thread.join(60)
    assert writer.status == "KILLED"


def test_the_rest_is_sent_at_the_end_without_waiting_for_the_interval(path: Path) -> None:
    writer = RecordingWriter()
    append(path, [0])
    offset = path.stat().st_size
    thread = MetricsSender("T", lambda: writer, path, pytest.fail, offset=offset)
    append(path, range(1, 300))
    with path.open("a") as file:
        file.write('{"x": 1}\n{"step": "5"}\n')  # rows without a step
    thread.close("FINISHED")
    thread.join(60)
    assert writer.steps == [*range(1, 300)]
    assert writer.calls == 3
    assert writer.status == "FINISHED"


@pytest.mark.usefixtures("fast")
def test_a_tracker_that_fails_gets_every_row_when_it_works_again(path: Path) -> None:
    writer = RecordingWriter()
    writer.down = True
    warnings: list[str] = []
    append(path, [0, 1])
    thread = MetricsSender("T", lambda: writer, path, warnings.append)
    wait_for(lambda: len(warnings) == 1)
    append(path, [2])
    writer.down = False
    wait_for(lambda: writer.steps == [0, 1, 2])
    thread.close("FINISHED")
    thread.join(60)
    assert warnings == [
        f"T does not take metrics (OSError: disk full); "
        f"they are sent from {path} when it works again",
        "T works again and has all metrics so far",
    ]


def test_a_tracker_that_fails_until_the_end_costs_one_line(path: Path) -> None:
    warnings: list[str] = []

    def refuse() -> RecordingWriter:
        raise ConnectionError("refused")

    thread = MetricsSender("T", refuse, path, warnings.append, advice=", and `x` sends them")
    thread.close("FINISHED")
    thread.join(60)
    assert warnings == [
        f"T does not take metrics (ConnectionError: refused); {path} has all metrics, "
        "and `x` sends them"
    ]


def test_a_tracker_that_hangs_holds_nothing_up(path: Path) -> None:
    released = threading.Event()
    warnings: list[str] = []

    def hang() -> RecordingWriter:
        released.wait(60)
        return RecordingWriter()

    thread = MetricsSender("T", hang, path, warnings.append)
    thread.close("FINISHED")
    thread.join(0.05)
    released.set()
    assert warnings == [f"T does not answer; {path} has all metrics"]


def test_the_statement_of_a_database_error_is_left_out() -> None:
    message = (
        "(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT INTO t VALUES (?)]\n"
        "[parameters: ('text of a model',)]\n(Background on this error at: https://sqlalche.me/e)"
    )
    error = ValueError(message)
    reason = "(sqlite3.OperationalError) database or disk is full"
    assert short_error(error) == f"ValueError: {reason}"
    assert short_text("locked\n(Background on this error at: https://sqlalche.me/e)") == "locked"


def test_a_long_error_keeps_its_start_and_its_end() -> None:
    error = ValueError("a\n" + 500 * "x" + "z")
    assert short_error(error) == f"ValueError: a {'x' * 146} ... {'x' * 159}z"
