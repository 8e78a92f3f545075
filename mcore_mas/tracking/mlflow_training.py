"""The MLflow run of a training: how each process finds it, and the writer of its metrics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_mas.config.run import RunConfig
from mcore_mas.tracking.metrics_log import STEP_TIME, MetricsRow, step_metrics
from mcore_mas.tracking.mlflow_store import MetricPoint, MlflowStore
from mcore_mas.tracking.run_tags import config_tags, merge_tags, process_tags
from rollout.base.files import file_lock
from rollout.base.json_files import read_json, write_json
from rollout.base.nested import dotted_items

if TYPE_CHECKING:
    from mlflow.entities import Run

# MLflow groups charts by the part of the name before the last slash and sorts the groups by name.
# These metrics are sent a second time in a group that comes before "agent", so that they are first.
_KEY_METRICS = {
    "reward/mean": "achieved/reward",
    "validation/accuracy": "achieved/accuracy",
}
_LAST_STEP_TAG = "last_step_sent"  # all steps up to it are in MLflow
_NO_STEP = -2  # before the first validation, which is step -1
_SPLITS = ("train", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """Content of train/mlflow.json, by which every process finds the MLflow run of a training."""

    key: str  # value of the run's tag `key`
    start_time: float  # in seconds since the epoch
    tags: Mapping[str, str]


def start_training_record(config: RunConfig, config_path: Path, first_step: int) -> TrainingRecord:
    """Write the record of a training that starts or resumes in this process, and return it.

    A training continues its MLflow run, under the same key, if it resumes from a checkpoint, or
    starts over with the same config because it was stopped before its first checkpoint. A training
    that starts over with another config gets a new MLflow run, and so does a fork, which drops the
    record (see `fork_if_changed`).
    """
    path = _record_path(config)
    tags = {**config_tags(config, config_path, _SPLITS), **process_tags(), "stage": "train"}
    with file_lock(path):
        record = _read_record(path)
        if record is not None and (
            first_step > 0 or record.tags["config_sha256"] == tags["config_sha256"]
        ):
            record = TrainingRecord(
                key=record.key,
                start_time=record.start_time,
                tags=merge_tags(record.tags, tags),
            )
        else:
            record = TrainingRecord(key=uuid.uuid4().hex, start_time=time.time(), tags=tags)
        write_json(path, asdict(record))
    return record


def load_training_record(
    config: RunConfig, config_path: Path, rows: Sequence[MetricsRow]
) -> TrainingRecord:
    """Return the record of a training that another process runs or ran; write one if there is none.

    Args:
        rows: rows of the run's metrics.jsonl; a new record starts at the time of the first one.
    """
    path = _record_path(config)
    with file_lock(path):
        record = _read_record(path)
        if record is None:
            record = TrainingRecord(
                key=uuid.uuid4().hex,
                start_time=rows[0][STEP_TIME],
                tags={**config_tags(config, config_path, _SPLITS), "stage": "train"},
            )
            write_json(path, asdict(record))
    return record


def find_or_create_training_run(
    store: MlflowStore, config: RunConfig, record: TrainingRecord
) -> Run:
    """Return the MLflow run of a training. Its parameters are the resolved config."""
    run = store.find_or_create_run(
        record.key,
        name=f"{config.run} train",
        tags=record.tags,
        parent=store.find_or_create_parent(config),
        start_time=record.start_time,
    )
    if not run.data.params:
        store.log_params(run.info.run_id, dict(dotted_items(config.model_dump(mode="json"))))
    return run


class MlflowWriter:
    """Writes the rows of a training's metrics.jsonl to its MLflow run.

    A tag of the run has the last step that was sent. Rows up to that step are skipped, so that a
    training that resumes, or a file that is sent twice, adds no second value for a step. A step
    that was taken again after a crash keeps its first values in MLflow.
    """

    def __init__(self, store: MlflowStore, config: RunConfig, record: TrainingRecord) -> None:
        """Find the training's MLflow run, or create it."""
        run = find_or_create_training_run(store, config, record)
        self.run_id: str = run.info.run_id
        self._store = store
        self._last_step = int(run.data.tags.get(_LAST_STEP_TAG, _NO_STEP))
        self._last_time = record.start_time

    def resume(self) -> None:
        """Set the status of the MLflow run to running."""
        self._store.client.update_run(self.run_id, status="RUNNING")

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Send the metrics of the rows whose steps MLflow lacks."""
        if not rows:
            return
        new_rows = [row for row in rows if row["step"] > self._last_step]
        points = [point for row in new_rows for point in _metric_points(row)]
        self._store.log_metrics(self.run_id, points)
        if new_rows:
            self._last_step = new_rows[-1]["step"]
            self._store.set_tags(self.run_id, {_LAST_STEP_TAG: str(self._last_step)})
        self._last_time = rows[-1][STEP_TIME]

    def close(self, status: str) -> None:
        """End the MLflow run at the time of the last row."""
        self._store.end_run(self.run_id, status, self._last_time)


def _metric_points(row: MetricsRow) -> list[MetricPoint]:
    """Return the metrics of a row as points; key metrics also under the names that MLflow lists first."""
    metrics = step_metrics(row)
    for name, leading_name in _KEY_METRICS.items():
        if name in metrics:
            metrics[leading_name] = metrics[name]
    # Training steps count from 0, MLflow's axis from 1.
    return [
        MetricPoint(name=name, value=value, time=row[STEP_TIME], step=row["step"] + 1)
        for name, value in metrics.items()
    ]


def _record_path(config: RunConfig) -> Path:
    return config.folder / "train" / "mlflow.json"


def _read_record(path: Path) -> TrainingRecord | None:
    if not path.is_file():
        return None
    values = read_json(path)
    if "key" not in values:  # a file that version 0.1.0 wrote
        return None
    return TrainingRecord(**values)
