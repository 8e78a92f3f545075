"""Metric tracking: the run folder's metrics.jsonl and MLflow."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.base.files import write_text

_LONGEST_PARAM = 500  # characters; MLflow refuses more than 6000
_PARAMS_PER_CALL = 100  # MLflow's limit


class Journal:
    """One JSON object per training step in a file that survives restarts."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Continue `path` at `first_step`; rows of steps that will be taken again are dropped."""
        self._path = path
        self._last = -2  # step of the last row
        kept = []
        if path.is_file():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the line that was being written when the process was killed
                if row["step"] < first_step:
                    kept.append(line)
                    self._last = row["step"]
        write_text(path, "".join(f"{line}\n" for line in kept))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step, once: a run that was stopped right after it had made up a validation makes it up again."""
        if step <= self._last:
            return
        self._last = step
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Tracker:
    """One MLflow run; metrics of each agent are `agent/<name>/<metric>`."""

    def __init__(
        self,
        uri: str,
        experiment: str,
        *,
        run: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        run_id: str | None = None,
    ) -> None:
        """Start a run, or continue `run_id` if the store knows it."""
        # read by MLflow, which has no call for any of them; traces are written from a thread of our own
        os.environ.update(
            MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", MLFLOW_ENABLE_ASYNC_TRACE_LOGGING="false"
        )
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        with _one_at_a_time(uri):  # the first client of a new sqlite store writes its tables
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(experiment)
            experiment_id = (
                found.experiment_id
                if found
                else self._client.create_experiment(experiment, artifact_location=_beside(uri, experiment))
            )
        self.experiment_id: str = experiment_id
        if run_id is not None:
            try:
                self._client.update_run(run_id, status="RUNNING")
            except MlflowException:
                run_id = None  # the store was removed since
        self.run_id: str = run_id or self._client.create_run(experiment_id, run_name=run, tags=dict(tags)).info.run_id
        if run_id is None:
            rows = [(key, str(value)[:_LONGEST_PARAM]) for key, value in _flat(params)]
            for first in range(0, len(rows), _PARAMS_PER_CALL):
                self._log(params=rows[first : first + _PARAMS_PER_CALL])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics in one call."""
        now = int(time.time() * 1000)
        self._log(metrics=[(key, float(value), now, step) for key, value in metrics.items()])

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self.run_id, status)

    def _log(
        self, *, metrics: list[tuple[str, float, int, int]] | None = None, params: list[tuple[str, str]] | None = None
    ) -> None:
        from mlflow.entities import Metric, Param

        self._client.log_batch(
            self.run_id,
            metrics=[Metric(*metric) for metric in metrics or ()],
            params=[Param(*param) for param in params or ()],
        )


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
