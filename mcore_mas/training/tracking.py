"""Metric tracking in MLflow: a run's metrics.jsonl, sent from a thread of its own.

MLflow may be slow, broken or gone: nothing waits for it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.base.files import json_lines, write_json

_LONGEST_PARAM = 500  # characters; MLflow refuses more than 6000
_PARAMS_PER_CALL = 100  # MLflow's limit
_DIGEST = 36  # characters of a data set's digest that MLflow keeps
_PATIENCE_S = 30.0  # at the end of a run, for MLflow to take what is left


class Sink:
    """A thread for work that may fail or hang and that nobody waits for."""

    def __init__(self, name: str, most: int = 256) -> None:
        """At most `most` jobs wait."""
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object]) -> bool:
        """Have `job`, which handles its own errors, done after those before it; False where too many wait."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, patience_s: float) -> bool:
        """Do what waits and end; whether it was all done in time. What was not is given up."""
        deadline = time.monotonic() + patience_s
        try:
            self._jobs.put(None, timeout=patience_s)
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What MLflow is told of a run."""

    name: str
    params: Mapping[str, Any]
    tags: Mapping[str, str]
    inputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # of a data set by name: digest, where it lies
    id: str | None = None  # of the MLflow run to go on in, if the store knows it
    first: int = 0  # step at which it goes on


class Tracker:
    """One MLflow run, written from a thread of its own; metrics of each agent are `agent/<name>/<metric>`.

    It reads what it sends from metrics.jsonl. So what MLflow does not take is sent later, in this process or the next,
    and a store that was removed since is filled again. Beside that file mlflow.json says what was sent.
    """

    def __init__(
        self, uri: str, experiment: str, run: TrackedRun, journal: Path, warn: Callable[[str], None] = print
    ) -> None:
        """Begin to connect; returns at once. `warn` gets a line when MLflow fails, and when it works again."""
        # read by MLflow, which has no call for any of them; a server that hangs is given up, and asked again later
        os.environ.update(
            MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", MLFLOW_ENABLE_ASYNC_TRACE_LOGGING="false"
        )
        for name, value in (("TIMEOUT", "10"), ("MAX_RETRIES", "1")):
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
        self.uri, self._experiment, self._run, self._journal, self._warn = uri, experiment, run, journal, warn
        self.experiment_id = ""  # both, once it is connected
        self.run_id: str | None = run.id
        self.sink = Sink("mlflow")
        self._client: Any = None
        self._sent = run.first - 1  # the last step that MLflow has
        self._read = 0  # bytes of metrics.jsonl
        self._faults = 0  # since it worked
        self._again = 0.0  # when to try again
        self.log()

    def log(self) -> None:
        """Have the steps sent that metrics.jsonl has and MLflow lacks."""
        self.sink.put(self._send)

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED, if MLflow takes that in time."""
        self.sink.put(lambda: self._send(status))
        if not self.sink.close(_PATIENCE_S):
            self._warn(f"MLflow hangs: steps after {self._sent} are in {self._journal} alone")

    def _send(self, status: str | None = None) -> None:
        if time.monotonic() < self._again and status is None:
            return
        try:
            if self._client is None:
                self._connect()
            rows, read = json_lines(self._journal, self._read)
            for row in rows:
                if row["step"] > self._sent:
                    self._log_step(row)
            self._read = read
            if status is not None:
                self._client.set_terminated(self.run_id, status)
        except Exception as error:  # whatever a store may raise: no metric is worth a run
            self._faults += 1
            self._again = time.monotonic() + min(60.0, 2.0**self._faults)
            if self._faults == 1 or status is not None:
                why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._warn(f"MLflow does not take metrics ({why}); they are in {self._journal} and are sent later")
            return
        if self._faults:
            self._warn(f"MLflow works again and has all steps up to {self._sent}")
        self._faults, self._again = 0, 0.0

    def _connect(self) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        with _one_at_a_time(self.uri):  # the first client of a new sqlite store writes its tables
            client = MlflowClient(tracking_uri=self.uri)
            found = client.get_experiment_by_name(self._experiment)
            place = _beside(self.uri, self._experiment)
            experiment_id = (
                found.experiment_id if found else client.create_experiment(self._experiment, artifact_location=place)
            )
        record = self._record()
        run_id = self._run.id or (record.get("run") if self._run.first else None)
        if run_id is not None:
            try:
                client.update_run(run_id, status="RUNNING")
            except MlflowException:
                run_id = None  # the store was removed since
        if run_id is None:
            run_id = client.create_run(experiment_id, run_name=self._run.name, tags=dict(self._run.tags)).info.run_id
            self._sent = -2
            self._log_params(client, run_id)
        elif record.get("run") == run_id:
            self._sent = min(self._sent, int(record["sent"]))
        self._client, self.experiment_id, self.run_id = client, experiment_id, run_id

    def _record(self) -> dict[str, Any]:
        """What mlflow.json says, {} where it says nothing."""
        try:
            record = json.loads(self._journal.with_name("mlflow.json").read_text())
            return {"run": str(record["run"]), "sent": int(record["sent"])}
        except (OSError, ValueError, LookupError, TypeError):
            return {}

    def _log_params(self, client: Any, run_id: str) -> None:
        from mlflow.entities import Dataset, DatasetInput, Param

        data = [
            DatasetInput(Dataset(name, digest[:_DIGEST], source_type="local", source=json.dumps({"uri": where})))
            for name, (digest, where) in self._run.inputs.items()
        ]
        if data:
            client.log_inputs(run_id, datasets=data)
        rows = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in _flat(self._run.params)]
        for first in range(0, len(rows), _PARAMS_PER_CALL):
            client.log_batch(run_id, params=rows[first : first + _PARAMS_PER_CALL])

    def _log_step(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now, step = int(time.time() * 1000), row["step"]
        numbers = {key: value for key, value in row.items() if isinstance(value, float | int) and key != "step"}
        # training counts from 0, MLflow's axis from 1
        self._client.log_batch(self.run_id, metrics=[Metric(k, float(v), now, step + 1) for k, v in numbers.items()])
        self._sent = step
        write_json(self._journal.with_name("mlflow.json"), {"run": self.run_id, "sent": step})


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value))
    return rows


def _beside(uri: str, experiment: str) -> str | None:
    """Where an experiment's artifacts go: next to a local sqlite store, not where the process happens to be started."""
    path = _sqlite(uri)
    return None if path is None else str(path.absolute().parent / "mlflow-artifacts" / experiment)


def _sqlite(uri: str) -> Path | None:
    """The file of a local sqlite store, None of any other."""
    scheme, _, path = uri.partition(":///")
    return Path(path) if scheme == "sqlite" else None


class _one_at_a_time:  # noqa: N801  (used as a `with` verb)
    """Exclusive access to a local sqlite store, across processes; other stores look after themselves."""

    def __init__(self, uri: str) -> None:
        store = _sqlite(uri)
        self._path = store and store.with_name(f"{store.name}.lock")

    def __enter__(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._file.close()
