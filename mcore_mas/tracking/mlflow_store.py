"""The experiment of an MLflow store, where every process finds a run by the same key."""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_mas.config.run import RunConfig
from mcore_mas.tracking.sender import short_text
from rollout.base.files import file_lock
from rollout.base.urls import without_proxy

if TYPE_CHECKING:
    from mlflow.entities import Run

PARENT_TAG = "mlflow.parentRunId"  # MLflow's pages show runs below their parent

# Limits of MLflow's servers: rows of one call, characters of a value.
_METRICS_PER_CALL = 1000
_PARAMS_PER_CALL = 100
_PARAM_LENGTH = 500
_METRIC_NAME_LENGTH = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """Value of a metric at one time and step."""

    name: str
    value: float
    time: float  # in seconds since the epoch
    step: int  # on MLflow's axis: training steps done, 0 before training


class MlflowStore:
    """Client of the experiment of an MLflow store.

    Databases of MLflow recognise a metric by its name, value, time and step, so sending one
    again changes nothing. Errors of MLflow and of its HTTP client pass through all methods.
    """

    def __init__(self, uri: str, experiment: str, results: Path) -> None:
        """Connect to the store; create the experiment if there is none.

        The first call imports MLflow, which takes several seconds.

        Args:
            uri: tracking URI, such as sqlite:///results/mlflow.db or http://host:5000.
            experiment: name of the experiment.
            results: folder of the lock file, for a store that is not a local file.
        """
        set_mlflow_variables()
        from mlflow import MlflowClient

        _configure_mlflow_logs()

        self.uri = uri
        self.experiment = experiment
        database = _sqlite_file(uri)
        self._lock_path = database or results / "mlflow"
        with self._exclusive():
            artifacts = None
            if database:
                # By default MLflow would put artifacts below the current folder.
                artifacts = database.absolute().parent / "mlflow-artifacts"
                artifacts.mkdir(0o700, parents=True, exist_ok=True)
                if not database.exists():
                    _create_database(database)
            self.client = MlflowClient(tracking_uri=uri)
            self.experiment_id = self._find_or_create_experiment(artifacts)

    def find_or_create_run(
        self,
        key: str,
        *,
        name: str,
        tags: Mapping[str, str],
        parent: str | None = None,
        start_time: float | None = None,
    ) -> Run:
        """Return the run whose tag `key` has this value, and set tags; create it if needed.

        Args:
            key: see `run_key`.
            name: shown by MLflow's pages.
            tags: set on the run, also if it existed before.
            parent: id of the run that MLflow's pages show it below.
            start_time: start of a new run, in seconds since the epoch; by default now.
        """
        tags = {**tags, "key": key}
        if parent is not None:
            tags[PARENT_TAG] = parent
        with self._exclusive():
            runs = self.client.search_runs(
                [self.experiment_id], f"tags.key = '{key}'", max_results=1
            )
            if not runs:
                start_ms = None if start_time is None else int(start_time * 1000)
                return self.client.create_run(
                    self.experiment_id, start_time=start_ms, tags=tags, run_name=name
                )
        self.set_tags(runs[0].info.run_id, tags)
        return runs[0]

    def find_or_create_parent(self, config: RunConfig) -> str:
        """Return the id of the run that groups the stages of all seeds of an experiment."""
        tags = config.tracking.tags
        name = tags.get("experiment", config.run)
        run = self.find_or_create_run(
            run_key(config.results, tags.get("suite", ""), name),
            name=name,
            tags={**tags, "stage": "experiment", "results": str(config.results)},
        )
        run_id: str = run.info.run_id
        self.client.update_run(run_id, status="FINISHED")
        return run_id

    def log_params(self, run_id: str, params: Mapping[str, object]) -> None:
        """Log parameters of a run; values are cut at 500 characters."""
        from mlflow.entities import Param

        rows = [
            Param(metric_name(name), str(value)[:_PARAM_LENGTH]) for name, value in params.items()
        ]
        # MLflow fails if two processes log the same parameter at once.
        with self._exclusive():
            for start in range(0, len(rows), _PARAMS_PER_CALL):
                self.client.log_batch(run_id, params=rows[start : start + _PARAMS_PER_CALL])

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Log values of metrics."""
        from mlflow.entities import Metric

        metrics = [
            Metric(metric_name(point.name), point.value, int(point.time * 1000), point.step)
            for point in points
        ]
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            self.client.log_batch(run_id, metrics=metrics[start : start + _METRICS_PER_CALL])

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of a run."""
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def end_run(self, run_id: str, status: str, end_time: float) -> None:
        """Set the final status of a run, and when it ended in seconds since the epoch."""
        self.client.set_terminated(run_id, status, int(end_time * 1000))

    def _find_or_create_experiment(self, artifacts: Path | None) -> str:
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is None:
            location = None if artifacts is None else str(artifacts / self.experiment)
            created: str = self.client.create_experiment(self.experiment, location)
            return created
        if experiment.lifecycle_stage == "deleted":
            raise LookupError(
                f"experiment '{self.experiment}' was deleted; restore it (mlflow experiments "
                f"restore -x {experiment.experiment_id}), or choose another tracking.experiment"
            )
        experiment_id: str = experiment.experiment_id
        return experiment_id

    def _exclusive(self) -> AbstractContextManager[None]:
        """Exclude other users of the same local database, or else of the same results folder."""
        return file_lock(self._lock_path)


def _configure_mlflow_logs() -> None:
    """Let MLflow log warnings and errors only, on one line each. Importing MLflow resets this."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in logging.getLogger("mlflow").handlers:
        handler.addFilter(_shorten_record)
    # It logs the errors of a database, and then raises them.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def _shorten_record(record: logging.LogRecord) -> bool:
    """Cut a record to one line without a traceback, which may hold text of models; pass it on."""
    record.msg = short_text(record.getMessage())
    record.args = None
    record.exc_info = None
    record.exc_text = None
    record.stack_info = None
    return True


def open_store(config: RunConfig) -> MlflowStore:
    """Connect to the MLflow store of a run's config."""
    return MlflowStore(config.tracking.uri, config.tracking.experiment, config.results)


def set_mlflow_variables() -> None:
    """Set environment variables of MLflow, which has no other way to set these.

    Telemetry is off, and a server on this machine is reached without a proxy. Unless the user has set
    other values, a request is tried twice and waits 10 seconds for each answer.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"
    os.environ.update(without_proxy("127.0.0.1", "localhost"))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")


def run_key(*parts: Path | str) -> str:
    """Return a key of 32 hexadecimal digits for a run that is known by paths and names."""
    texts = [str(part.absolute()) if isinstance(part, Path) else part for part in parts]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def metric_name(name: str) -> str:
    """Return a name in MLflow's characters: `avg@4/gsm8k` becomes `avg_at_4/gsm8k`."""
    allowed = re.sub(r"[^\w.\-/ :]", "_", name.replace("@", "_at_"))
    return posixpath.normpath(allowed).lstrip("/")[:_METRIC_NAME_LENGTH]


def _sqlite_file(uri: str) -> Path | None:
    """Return the file of a local sqlite store; None for any other store."""
    scheme, _, path = uri.partition(":///")
    return Path(path) if scheme == "sqlite" else None


def _create_database(path: Path) -> None:
    """Create the tables of a new sqlite store.

    MLflow cannot open a file in which it was killed while it created tables, so they are created in
    another file.
    """
    from mlflow import MlflowClient

    folder = path.absolute().parent
    for abandoned in folder.glob(f".{path.name}.*partial*"):
        abandoned.unlink()
    # A new name each time: after a failure, such as on a full disk, MLflow keeps its connection to
    # the file, and would go on writing to that file after it has been removed.
    partial = folder / f".{path.name}.{secrets.token_hex(4)}.partial"
    partial.touch(0o600)
    MlflowClient(tracking_uri=f"sqlite:///{partial}").search_experiments(max_results=1)
    partial.replace(path)
