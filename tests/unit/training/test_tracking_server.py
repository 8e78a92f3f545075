"""A run's steps are in MLflow's real server once each, however the server fails in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.server import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR, app, handlers
from mlflow.tracking import MlflowClient
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from mcore_mas.rollout.base.processes import free_port
from mcore_mas.training.tracking import CLOCK, TrackedRun, Tracker
from mcore_mas.training.tracking_store import Store

STEPS = range(-1, 6)
WANTED = [(step + 1, float(step)) for step in STEPS]


class Server:
    """MLflow's tracking server on a port of its own, which can be told to fail."""

    def __init__(self, port: int) -> None:
        self.uri, self._port = f"http://127.0.0.1:{port}", port
        self.fail = ""  # or "500": refuse, "late": do what is asked and then say 500, "hang": do it and say nothing
        self.asked = 0
        self.go = threading.Event()
        self._server: BaseWSGIServer | None = None

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self._port, self, threaded=True, request_handler=_Quiet)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
        self._server = None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        fail = self.fail if environ["REQUEST_METHOD"] == "POST" else ""
        self.asked += 1
        if fail != "500":
            if not fail:
                answer: Iterable[bytes] = app(environ, start_response)
                return answer
            list(app(environ, lambda *_: lambda _: None))
        if fail == "hang":
            self.go.wait(60)
        start_response("500 Internal Server Error", [])
        return [b""]


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv(BACKEND_STORE_URI_ENV_VAR, f"sqlite:///{tmp_path / 'server.db'}")
    monkeypatch.setenv(ARTIFACT_ROOT_ENV_VAR, str(tmp_path / "artifacts"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(handlers, "_tracking_store", None)
    monkeypatch.setattr(handlers, "_job_store", None, raising=False)
    handlers._get_tracking_store()  # makes its tables, which takes seconds
    made = Server(free_port("127.0.0.1"))
    yield made
    made.go.set()
    made.stop()
    monkeypatch.setattr(handlers, "_tracking_store", None)


def write(path: Path, steps: Iterable[int]) -> None:
    lines = [f'{{"step": {step}, "x": {step}.0, "never": 0.0, "{CLOCK}": {1e9 + step}}}\n' for step in steps]
    with path.open("a") as file:
        file.write("".join(lines))


def opened(folder: Path, uri: str, said: list[str], **run: Any) -> Tracker:
    path = folder / "metrics.jsonl"
    path.touch()
    return Tracker(
        Store(uri, "e", folder), TrackedRun(name="r", params={"a": 1}, tags={"t": "1"}, **run), path, said.append
    )


def idle(tracker: Tracker) -> None:
    """Wait until its thread has done what it was asked for, however often."""
    done = threading.Event()
    tracker.sink.put(done.set)
    assert done.wait(60)


def everything(uri: str, run_id: str | None) -> list[tuple[int, float]]:
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])  # made once
    assert (run.info.run_id, run.info.status, run.data.params, run.data.tags["t"]) == (
        run_id,
        "FINISHED",
        {"a": "1"},
        "1",
    )
    assert "never" not in run.data.metrics
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "x")]


@pytest.mark.parametrize("fail", ["500", "late", "hang"])
def test_what_a_failing_server_did_not_confirm_is_there_once(tmp_path: Path, server: Server, fail: str) -> None:
    said: list[str] = []
    server.start()
    server.fail = fail  # from the first request that writes
    tracker = opened(tmp_path, server.uri, said)
    idle(tracker)
    for at in (1, 4):
        write(tmp_path / "metrics.jsonl", STEPS[at - 1 : at + 2])
        began = time.monotonic()
        tracker.log()
        assert time.monotonic() - began < 0.5  # a step waits for nothing
        idle(tracker)
        server.fail, tracker._again = "", 0.0
        tracker.log()
        idle(tracker)
        server.fail = fail
    write(tmp_path / "metrics.jsonl", STEPS[6:])
    server.fail = ""
    assert tracker.finish("FINISHED"), said
    assert said[0].startswith("MLflow does not take metrics (") and "works again" in said[1]
    assert everything(server.uri, tracker.run_id) == WANTED


def test_a_server_that_refuses_and_comes_up_in_mid_run_gets_all(tmp_path: Path, server: Server) -> None:
    said: list[str] = []
    tracker = opened(tmp_path, server.uri, said)  # refused
    write(tmp_path / "metrics.jsonl", STEPS[:3])
    tracker.log()
    idle(tracker)
    assert tracker.run_id is None and "Connection" in said[0]
    server.start()
    tracker._again = 0.0
    tracker.log()
    idle(tracker)
    server.stop()  # and goes again
    write(tmp_path / "metrics.jsonl", STEPS[3:5])
    tracker._again = 0.0
    tracker.log()
    idle(tracker)
    server.start()
    write(tmp_path / "metrics.jsonl", STEPS[5:])
    assert tracker.finish("FINISHED")
    assert everything(server.uri, tracker.run_id) == WANTED


def test_what_a_run_could_not_send_another_process_sends(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    write(tmp_path / "metrics.jsonl", STEPS)
    assert not opened(tmp_path, server.uri, said, zeros=True).finish("FINISHED")  # refused until its end
    server.start()
    other = opened(tmp_path, server.uri, said, first=6, ended=True)
    assert other.finish("FINISHED")
    assert everything(server.uri, other.run_id) == WANTED
    (tmp_path / "mlflow.json").unlink()  # as if both had begun at once
    again = opened(tmp_path, server.uri, said, first=6, ended=True)
    assert again.finish("FINISHED")
    assert again.run_id == other.run_id
    assert everything(server.uri, other.run_id) == WANTED


def test_a_resumed_run_goes_on_in_its_own_while_the_server_fails(tmp_path: Path, server: Server) -> None:
    said: list[str] = []
    server.start()
    write(tmp_path / "metrics.jsonl", STEPS[:4])
    before = opened(tmp_path, server.uri, said)
    before.finish("KILLED")
    server.fail = "late"
    after = opened(tmp_path, server.uri, said, id=before.run_id, first=2)  # step 2 is taken again
    idle(after)
    write(tmp_path / "metrics.jsonl", STEPS[4:])
    server.fail = ""
    assert after.finish("FINISHED")
    assert after.run_id == before.run_id
    assert everything(server.uri, before.run_id) == WANTED
