"""Sinks never stop a run: what MLflow does not take waits in metrics.jsonl and is sent when it does."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from requests.utils import get_environ_proxies

from mcore_mas.reports.study import MetricsError, read_metrics
from mcore_mas.tracking import feed as tracking
from mcore_mas.tracking.feed import CLOCK, Sink, Tracker, noted
from mcore_mas.tracking.logbook import Journal
from mcore_mas.tracking.store import MetricRow, Store, unfinished
from tests.support.trackable import opened_tracker


def opened(
    folder: Path, uri: str, warn: Callable[[str], None], **run: object
) -> tuple[Journal, Tracker]:
    path = folder / "train" / "metrics.jsonl"
    path.parent.mkdir(exist_ok=True)
    journal = Journal(path, int(str(run.get("first", 0))), warn)
    return journal, opened_tracker(folder, uri, warn, params={"a": {"b": 1}}, zeros=True, **run)  # type: ignore[arg-type]


def step(journal: Journal, tracker: Tracker, number: int) -> float:
    """Report a step; seconds that it takes."""
    began = time.monotonic()
    journal.log(number, {"x": float(number), CLOCK: 1e9 + number})
    tracker.log()
    return time.monotonic() - began


def history(uri: str, run_id: str | None) -> list[tuple[int, float]]:
    return [
        (m.step, m.value)
        for m in MlflowClient(tracking_uri=uri).get_metric_history(run_id or "", "x")
    ]


def test_an_experiment_that_was_deleted_is_told_and_filled_once_it_is_back(tmp_path: Path) -> None:
    uri, said = f"sqlite:///{tmp_path / 'mlflow.db'}", list[str]()
    first = Store(uri, "e", tmp_path)
    first.connect()
    first.client.delete_experiment(first.experiment_id)
    journal, tracker = opened(tmp_path, uri, said.append)
    step(journal, tracker, 0)
    tracker.finish("FINISHED")
    assert (
        f"'e' was deleted; restore it (mlflow experiments restore -x {first.experiment_id})"
        in said[0]
    )
    first.client.restore_experiment(first.experiment_id)
    _, tracker = opened(tmp_path, uri, said.append, first=1)
    tracker.finish("FINISHED")
    assert history(uri, tracker.run_id) == [(1, 0.0)]


def test_a_server_on_this_machine_is_asked_through_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "*" if name == "no_proxy" else "")
    Store("http://127.0.0.1:1", "e", tmp_path)
    assert os.environ["NO_PROXY"] == "*"
    monkeypatch.setenv("no_proxy", "example.org")
    Store("http://127.0.0.1:1", "e", tmp_path)
    assert get_environ_proxies("http://127.0.0.1:1/api") == {}
    assert "http" in get_environ_proxies("http://elsewhere:5000/api")


def test_a_broken_store_stops_nothing_and_is_filled_when_it_works(tmp_path: Path) -> None:
    store = tmp_path / "mlflow.db"
    store.write_bytes(b"this is no database" * 1000)
    said: list[str] = []
    journal, tracker = opened(tmp_path, f"sqlite:///{store}", said.append)
    assert max(step(journal, tracker, number) for number in range(-1, 2)) < 1.0
    tracker.finish("KILLED")
    assert said[0].startswith("MLflow does not take metrics (") and said[0].endswith(
        "metrics.jsonl has them for later"
    )
    assert "\n" not in "".join(said)
    assert tracker.run_id is None
    uri = f"sqlite:///{tmp_path / 'whole.db'}"  # not in place of the other: MLflow has that open until a process ends
    said.clear()
    journal, tracker = opened(tmp_path, uri, said.append, first=2)  # resumed
    step(journal, tracker, 2)
    tracker.finish("FINISHED")
    assert said == []
    assert history(uri, tracker.run_id) == [(0, -1.0), (1, 0.0), (2, 1.0), (3, 2.0)]
    first_run = tracker.run_id
    journal, tracker = opened(tmp_path, uri, said.append, first=3, id=first_run)
    step(journal, tracker, 3)
    tracker.finish("FINISHED")
    assert history(uri, first_run) == [
        (0, -1.0),
        (1, 0.0),
        (2, 1.0),
        (3, 2.0),
        (4, 3.0),
    ]  # each once
    run = MlflowClient(tracking_uri=uri).get_run(str(first_run))
    assert (run.info.status, run.data.params) == ("FINISHED", {"a.b": "1"})


KILLED_IN_ITS_FIRST_MIGRATION = """
import os, sys
from alembic.runtime.migration import HeadMaintainer
from mlflow.tracking import MlflowClient
HeadMaintainer.update_to_step = lambda *_: os._exit(9)
MlflowClient(tracking_uri=sys.argv[1]).search_experiments()
"""


def test_a_store_that_was_never_finished_is_made_anew(tmp_path: Path) -> None:
    """MLflow says 'duplicate column name: step' of it, in every process from then on."""
    uri = f"sqlite:///{(store := tmp_path / 'mlflow.db')}"
    assert (
        subprocess.run(
            [sys.executable, "-c", KILLED_IN_ITS_FIRST_MIGRATION, uri], check=False
        ).returncode
        == 9
    )
    made = hashlib.sha256(store.read_bytes()).hexdigest()
    assert unfinished(store)
    said: list[str] = []
    journal, tracker = opened(tmp_path, uri, said.append)
    step(journal, tracker, 0)
    tracker.finish("FINISHED")
    assert said == []
    assert history(uri, tracker.run_id) == [(1, 0.0)]
    assert not unfinished(store)
    assert hashlib.sha256((tmp_path / "mlflow.db.unfinished").read_bytes()).hexdigest() == made


def test_a_store_that_somebody_else_is_making_stays(tmp_path: Path) -> None:
    """As MLflow's own server does, which asks for no lock."""
    uri = f"sqlite:///{(store := tmp_path / 'mlflow.db')}"
    with closing(sqlite3.connect(store)) as database:
        database.execute("CREATE TABLE experiments (name TEXT)")
        assert unfinished(store)
        with pytest.raises(MlflowException):
            Store(uri, "math", tmp_path).connect()
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_store_that_breaks_in_mid_run_is_sent_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    journal, tracker = opened(tmp_path, uri := f"sqlite:///{tmp_path / 'mlflow.db'}", said.append)
    step(journal, tracker, 0)
    connected = threading.Event()
    tracker.sink.put(connected.set)
    assert connected.wait(120)
    log_batch = tracker.store.client.log_batch

    def broken(*_: object, **__: object) -> None:
        raise OSError("malformed")

    monkeypatch.setattr(tracker.store.client, "log_batch", broken)
    for number in (1, 2):
        step(journal, tracker, number)
    failed = threading.Event()
    tracker.sink.put(failed.set)
    assert failed.wait(60)
    monkeypatch.setattr(tracker.store.client, "log_batch", log_batch)
    tracker.finish("FINISHED")
    assert [line.split(" (")[0] for line in said] == [
        "MLflow does not take metrics", "MLflow works again and has all steps up to 2",
    ]  # fmt: skip
    assert history(uri, tracker.run_id) == [(1, 0.0), (2, 1.0), (3, 2.0)]


@pytest.fixture
def hanging() -> Iterator[str]:
    """The URL of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_steps_of_a_moment_are_sent_together_and_the_end_waits_for_no_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_EVERY_S", 600.0)
    sent, began, metrics = list[list[int]](), threading.Event(), Store.metrics

    def note(store: Store, run_id: str, rows: Sequence[MetricRow]) -> None:
        sent.append([row[3] for row in rows])
        metrics(store, run_id, rows)
        began.set()

    monkeypatch.setattr(Store, "metrics", note)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    journal, tracker = opened(tmp_path, uri, lambda said: None)
    step(journal, tracker, 0)
    assert began.wait(120)
    for number in range(1, 300):  # more than may wait for a sink
        step(journal, tracker, number)
    assert tracker.finish("FINISHED")
    assert sent == [[0], list(range(1, 300))]
    assert history(uri, tracker.run_id) == [(number + 1, float(number)) for number in range(300)]


def test_a_server_that_hangs_holds_up_neither_start_nor_steps(
    tmp_path: Path, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_PATIENCE_S", 1.0)
    said: list[str] = []
    began = time.monotonic()
    journal, tracker = opened(tmp_path, hanging, said.append)
    assert max(step(journal, tracker, number) for number in range(5)) < 1.0
    tracker.finish("FINISHED")
    assert time.monotonic() - began < 10.0
    assert [row["step"] for row in read_metrics(tmp_path / "train" / "metrics.jsonl")] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert said[-1].startswith("MLflow hangs: steps from 0 on are in ")
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10"


def test_a_sink_refuses_more_than_may_wait() -> None:
    sink, go = Sink("s", most=2), threading.Event()
    done: list[int] = []
    sink.put(lambda: go.wait(60))
    while not sink._jobs.empty():
        time.sleep(0.001)
    assert [sink.put(lambda: done.append(1)) for _ in range(3)] == [True, True, False]
    go.set()
    assert sink.close(60) and done == [1, 1]


BAD = [
    '{"step": 3, "x"',
    "\0" * 50,
    '{"x": 1}',
    "5",
    "null",
    '{"step": "4"}',
    "[" * 9000,
    "\udcff\udcfe",
]


@pytest.mark.parametrize("bad", BAD)
def test_a_torn_line_is_passed_over(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        f'{{"step": 0, "x": 1.0}}\n{bad}\n{{"step": 1, "x": 2.0}}\n{bad}', errors="surrogateescape"
    )
    Journal(path, 2).log(2, {"x": 3.0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "x": 1.0}, {"step": 1, "x": 2.0}, {"step": 2, "x": 3.0, "epoch": 0},
    ]  # fmt: skip
    path.write_text(bad, errors="surrogateescape")
    with pytest.raises(MetricsError, match="expected one JSON object with a 'step' per line"):
        read_metrics(path)


def test_metrics_that_a_full_disk_refuses_are_written_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    journal = Journal(tmp_path / "metrics.jsonl", 0, said.append)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        journal.log(0, {"x": 1.0})
    journal.log(1, {"x": 2.0})
    assert said == [
        f"{tmp_path / 'metrics.jsonl'}: the metrics of step 0 wait for the next (No space left on device)"
    ]
    assert {row["step"]: row["x"] for row in read_metrics(tmp_path / "metrics.jsonl")} == {
        0: 1.0,
        1: 2.0,
    }


def test_a_stage_of_two_tries_is_noted_from_its_first_start_and_one_that_ended_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "logs" / "bootstrap.json"
    clock = iter([100.0, 150.0, 175.0, 300.0, 301.0])
    monkeypatch.setattr(tracking.time, "time", lambda: next(clock))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(KeyboardInterrupt), noted(note.with_suffix(".log")):
        raise KeyboardInterrupt
    assert json.loads(note.read_text()).keys() == {"began", "tags"}
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    with noted(note.with_suffix(".log")):
        pass
    written = json.loads(note.read_text())
    assert (written["began"], written["ended"], written["tags"]["slurm_job"]) == (
        100.0,
        175.0,
        "7 9",
    )
    with noted(note.with_suffix(".log")):
        pass
    written = json.loads(note.read_text())
    assert (written["began"], written["ended"], written["tags"]["slurm_job"]) == (300.0, 301.0, "9")
