"""MLflow's real tracking server in this process, which fails on demand.

Functions import MLflow's server when they are called, because the import takes seconds of each process of tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from rollout.base.network import free_port
from tests.support.mlflow_database import write_database

STEPS = range(-1, 6)


class Server:
    """MLflow's tracking server, which can be made to fail requests that write.

    `fail` is "500" to refuse them, "late" to do them and then answer 500, "hang" to do them and not
    answer.
    """

    def __init__(self, application: Any, port: int) -> None:
        self._application = application
        self.uri = f"http://127.0.0.1:{port}"
        self._port = port
        self.fail = ""
        self.released = threading.Event()  # requests that hang end
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
        if not fail:
            response: Iterable[bytes] = self._application(environ, start_response)
            return response
        if fail in ("late", "hang"):
            list(self._application(environ, lambda *_: lambda _: None))
        if fail == "hang":
            self.released.wait(60)
        start_response("500 Internal Server Error", [])
        return [b""]


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Yield a server on a new store, which has not started."""
    from mlflow.server import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR, app, handlers

    monkeypatch.setenv(BACKEND_STORE_URI_ENV_VAR, f"sqlite:///{tmp_path / 'server.db'}")
    monkeypatch.setenv(ARTIFACT_ROOT_ENV_VAR, str(tmp_path / "artifacts"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(handlers, "_tracking_store", None)
    monkeypatch.setattr(handlers, "_job_store", None, raising=False)
    write_database(tmp_path / "server.db")
    handlers._get_tracking_store()
    server = Server(app, free_port("127.0.0.1"))
    yield server
    server.released.set()
    server.stop()
    monkeypatch.setattr(handlers, "_tracking_store", None)


def assert_sent_once(uri: str, run_id: str) -> None:
    """Check that the store has one training and one parent, and each of STEPS once."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, "tags.stage = 'train'")
    (parent,) = client.search_runs(experiments, "tags.stage = 'experiment'")
    assert run.info.run_id == run_id
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert run.data.params["run"] == "r"
    points = client.get_metric_history(run_id, "x")
    assert [(point.step, point.value) for point in points] == [
        (step + 1, float(step)) for step in STEPS
    ]
