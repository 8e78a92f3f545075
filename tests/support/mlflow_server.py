"""MLflow's real tracking server in this process, and what a run has sent it."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.server import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR, app, handlers
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from mcore_mas.tracking.feed import CLOCK, Tracker
from rollout.base.processes import free_port
from tests.support.trackable import opened_tracker

STEPS = range(-1, 6)
WANTED = [(step + 1, float(step)) for step in STEPS]


class Server:
    """MLflow's tracking server on a port of its own, which can be told to fail."""

    def __init__(self, port: int) -> None:
        self.uri, self._port = f"http://127.0.0.1:{port}", port
        # or "500": refuse, "late": do it and then say 500, "hang": do it and say nothing, "slow": 2 kB a second
        self.fail = ""
        self.asked = 0
        self.go = threading.Event()
        self._server: BaseWSGIServer | None = None

    def start(self) -> None:
        self._server = make_server(
            "127.0.0.1", self._port, self, threaded=True, request_handler=_Quiet
        )
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
        self._server = None

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        fail = self.fail if environ["REQUEST_METHOD"] == "POST" else ""
        self.asked += 1
        if fail == "slow":
            time.sleep(int(environ["CONTENT_LENGTH"]) / 2000)
        if fail != "500":
            if fail in ("", "slow"):
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


@functools.cache
def _tables() -> bytes:
    """The file of an empty store: MLflow needs a second for its tables."""
    with tempfile.TemporaryDirectory() as folder:
        SqlAlchemyStore(f"sqlite:///{folder}/server.db", folder).engine.dispose()
        return Path(folder, "server.db").read_bytes()


def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on a new store, which has not started."""
    monkeypatch.setenv(BACKEND_STORE_URI_ENV_VAR, f"sqlite:///{tmp_path / 'server.db'}")
    monkeypatch.setenv(ARTIFACT_ROOT_ENV_VAR, str(tmp_path / "artifacts"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(handlers, "_tracking_store", None)
    monkeypatch.setattr(handlers, "_job_store", None, raising=False)
    (tmp_path / "server.db").write_bytes(_tables())
    handlers._get_tracking_store()
    made = Server(free_port("127.0.0.1"))
    yield made
    made.go.set()
    made.stop()
    monkeypatch.setattr(handlers, "_tracking_store", None)


def write(path: Path, steps: Iterable[int]) -> None:
    lines = [
        f'{{"step": {step}, "x": {step}.0, "never": 0.0, "{CLOCK}": {1e9 + step}}}\n'
        for step in steps
    ]
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("".join(lines))


def tracked(folder: Path, uri: str, said: list[str], **run: Any) -> Tracker:
    write(folder / "train" / "metrics.jsonl", ())
    return opened_tracker(folder, uri, said.append, params={"a": 1}, tags={"t": "1"}, **run)


def idle(tracker: Tracker) -> None:
    """Wait until its thread has done what it was asked for, however often."""
    done = threading.Event()
    tracker.sink.put(done.set)
    assert done.wait(60)


def everything(uri: str, run_id: str | None) -> list[tuple[int, float]]:
    client = MlflowClient(tracking_uri=uri)
    everywhere = [e.experiment_id for e in client.search_experiments()]
    (run,) = client.search_runs(
        everywhere, "tags.stage = 'train'"
    )  # made once, as is what it is of
    (_,) = client.search_runs(everywhere, "tags.stage = 'experiment'")
    assert (run.info.run_id, run.info.status, run.data.params, run.data.tags["t"]) == (
        run_id,
        "FINISHED",
        {"a": "1"},
        "1",
    )
    assert "never" not in run.data.metrics
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "x")]
