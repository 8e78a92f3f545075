"""Runs of an MLflow store by key: an experiment's, its trainings' and evaluations', made once, never twice."""

import hashlib
import json
import logging
import os
import posixpath
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any

import psutil

from mcore_mas.config.run import RunConfig
from rollout.base.files import waited_for
from rollout.base.http import without_proxy

PARENT = "mlflow.parentRunId"  # MLflow's tag of a child
_METRICS_PER_CALL = 1000  # MLflow's limit
_DIGEST = 36  # characters of a data set's digest that MLflow keeps
_GONE = (
    "RESOURCE_DOES_NOT_EXIST",
    "INVALID_PARAMETER_VALUE",
)  # MLflow's words for a run it has not

MetricRow = tuple[
    str, float, float, int
]  # name, value, seconds since the epoch, step counted from 0


class Store:
    """The experiment of one MLflow store, in which a run has a key: asked for twice, it is made once."""

    def __init__(self, uri: str, experiment: str, results: Path) -> None:
        """`results` has the lock that keeps two processes from making the same run."""
        # read by MLflow, which has no call for any of them; a server that hangs is given up, and asked again later
        os.environ.update(
            MLFLOW_DISABLE_TELEMETRY="true",
            DO_NOT_TRACK="true",
            MLFLOW_ENABLE_ASYNC_TRACE_LOGGING="false",
        )
        os.environ.update(without_proxy("127.0.0.1", "localhost"))
        for name, value in (("TIMEOUT", "10"), ("MAX_RETRIES", "1")):
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
        self.uri, self.experiment, self._results = uri, experiment, results
        self.client: Any = None
        self.entities: Any = None  # the module of MLflow, which takes seconds to import
        self.experiment_id = ""  # all three, once it is connected

    def connect(self) -> None:
        """Find or make the experiment; whatever a store may raise comes through, here and below."""
        if self.client is not None:
            return
        from mlflow import entities  # which sets levels of its own
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)

        with self.alone():  # the first client of a new sqlite store writes its tables
            place = None
            if path := _sqlite(
                self.uri
            ):  # artifacts lie beside it, not where the process was started; they have chats
                if unfinished(path) and not _used(path):  # who made it was ended
                    path.replace(path.with_name(f"{path.name}.unfinished"))
                artifacts = path.absolute().parent / "mlflow-artifacts"
                artifacts.mkdir(0o700, parents=True, exist_ok=True)
                path.touch(0o600)
                place = str(artifacts / self.experiment)
            client = MlflowClient(tracking_uri=self.uri)
            found = client.get_experiment_by_name(self.experiment)
            if (
                found and found.lifecycle_stage == "deleted"
            ):  # MLflow makes no other one of this name
                restore = f"restore it (mlflow experiments restore -x {found.experiment_id})"
                raise LookupError(
                    f"'{self.experiment}' was deleted; {restore}, or name another tracking.experiment"
                )
            self.experiment_id = (
                found.experiment_id
                if found
                else client.create_experiment(self.experiment, artifact_location=place)
            )
        self.client, self.entities = client, entities

    def knows(self, run_id: str) -> bool:
        """Whether the store has a run, which was not deleted there."""
        from mlflow.exceptions import MlflowException

        try:
            return bool(self.client.get_run(run_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code in _GONE:
                return False
            raise

    def run(
        self,
        key: str,
        name: str,
        tags: Mapping[str, str],
        parent: str | None = None,
        began: float | None = None,
    ) -> str:
        """The run with this key, with these tags; made where there is none, as of `began`, by default now."""
        tags = {**tags, "key": key} | ({PARENT: parent} if parent else {})
        with self.alone():
            found = self.client.search_runs(
                [self.experiment_id], f"tags.key = '{key}'", max_results=1
            )
            start = None if began is None else int(began * 1000)
            run = (
                found[0]
                if found
                else self.client.create_run(self.experiment_id, start, run_name=name)
            )
            run_id: str = run.info.run_id
            self.tag(run_id, tags)
        return run_id

    def parent(self, config: RunConfig) -> str:
        """The run of an experiment, whose trainings and evaluations, of all its seeds, are its children."""
        own = config.tracking.tags
        name = own.get("experiment", config.run)
        tags = {**own, "stage": "experiment", "results": str(config.results)}
        run_id = self.run(key_of(config.results, own.get("suite", ""), name), name, tags)
        self.client.update_run(run_id, status="FINISHED")  # it takes no time of its own
        return run_id

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of a run."""
        self.client.log_batch(
            run_id, tags=[self.entities.RunTag(name, value) for name, value in tags.items()]
        )

    def metrics(self, run_id: str, rows: Sequence[MetricRow]) -> None:
        """Send metrics."""
        one = self.entities.Metric  # training counts from 0, MLflow's axis from 1
        metrics = [
            one(metric_name(name), value, int(at * 1000), step + 1)
            for name, value, at, step in rows
        ]
        for first in range(0, len(metrics), _METRICS_PER_CALL):
            self.client.log_batch(run_id, metrics=metrics[first : first + _METRICS_PER_CALL])

    def models(self, run_id: str, folders: Mapping[str, str]) -> list[str]:
        """Say which models a run has written, by policy and folder; the store gets no copy. Their ids, once each.

        A server before MLflow 3 knows no models; the run's tags have the folders there.
        """
        from mlflow.exceptions import MlflowException

        with self.alone():
            try:
                found = self.client.search_logged_models(
                    [self.experiment_id], f"source_run_id = '{run_id}'"
                )
            except MlflowException as error:
                if error.error_code != "ENDPOINT_NOT_FOUND":
                    raise
                return []
            ids = {model.name: model.model_id for model in found}
            for policy, folder in folders.items():
                name = re.sub(r"[/:.%\"']", "_", policy)  # MLflow refuses these
                if name in ids:
                    continue
                tags = {"folder": folder, "mlflow.model.isExternal": "true"}
                ids[name] = self.client.create_logged_model(
                    self.experiment_id, name, run_id, tags
                ).model_id
                self.client.finalize_logged_model(ids[name], self.entities.LoggedModelStatus.READY)
                self.client.log_outputs(run_id, [self.entities.LoggedModelOutput(ids[name], 0)])
        return list(ids.values())

    def inputs(
        self, run_id: str, inputs: Mapping[str, tuple[str, str]], models: Sequence[str] = ()
    ) -> None:
        """Say which data sets a run reads, by digest and place, and which `models` by id; the store gets no copy."""
        of = self.entities
        data = [
            of.DatasetInput(
                of.Dataset(
                    name, digest[:_DIGEST], source_type="local", source=json.dumps({"uri": where})
                ),
                [of.InputTag("mlflow.data.context", name.rpartition("/")[2])],
            )
            for name, (digest, where) in inputs.items()
        ]
        if data or models:
            self.client.log_inputs(
                run_id, datasets=data, models=[of.LoggedModelInput(model) for model in models]
            )

    def alone(self) -> AbstractContextManager[None]:
        """Exclusive access, across processes: to a local sqlite store, or to what runs of these results make."""
        return waited_for(_sqlite(self.uri) or self._results / "mlflow")


def key_of(*parts: Path | str) -> str:
    """A key that names the same everywhere on the machines that share these paths."""
    text = "\0".join(str(part.absolute() if isinstance(part, Path) else part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def metric_name(name: str) -> str:
    """`name` as MLflow takes it: of letters, digits and _-./: and blanks, as `avg_at_4/gsm8k`."""
    return posixpath.normpath(re.sub(r"[^\w.\-/ :]", "_", name.replace("@", "_at_"))).lstrip("/")[
        :250
    ]


def one_line(error: BaseException) -> str:
    """What a store said, short: libraries say at its start what was asked, and at its end what was wrong."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 320 else f"{text[:160]} ... {text[-160:]}"


def unfinished(path: Path) -> bool:
    """Whether the sqlite file of a store was begun and not finished; there is nothing in it, and MLflow cannot open it.

    MLflow makes the table of experiments first and its first experiment last.
    """
    try:  # "rw": what a killed process has not committed is rolled back, as whoever opens the file does
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as database:
            return database.execute("SELECT 1 FROM experiments").fetchone() is None
    except sqlite3.Error:  # it is not there, or MLflow says what is wrong with it
        return False


def _used(path: Path) -> bool:
    """Whether a process of this user has a file open, this one too. MLflow makes its stores without a lock."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or gone by now
            if any(file.path == str(path.resolve()) for file in process.open_files()):
                return True
    return False


def _sqlite(uri: str) -> Path | None:
    """The file of a local sqlite store, None of any other."""
    scheme, _, path = uri.partition(":///")
    return Path(path) if scheme == "sqlite" else None
