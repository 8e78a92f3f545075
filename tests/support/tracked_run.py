"""Folder of a run whose metrics a test sends to MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.tracking.metrics_log import STEP_TIME
from mcore_mas.tracking.mlflow_store import open_store
from mcore_mas.tracking.mlflow_training import MlflowWriter, start_training_record


def write_run(results: Path, uri: str, *overrides: str) -> RunConfig:
    """Write the folder of run `r`, tracked in experiment `e` of the store `uri`; return its config."""
    values = resolve(
        [
            "experiment=demo_math",
            "run=r",
            f"results={results}",
            f"tracking.uri={uri}",
            "tracking.experiment=e",
            *overrides,
        ]
    )
    config = RunConfig.from_values(values, "the config of a test")
    (config.folder / "train").mkdir(parents=True, exist_ok=True)
    config_path_of(config).write_text(yaml.safe_dump(values))
    metrics_path_of(config).touch()
    return config


def config_path_of(config: RunConfig) -> Path:
    return config.folder / "config.yaml"


def metrics_path_of(config: RunConfig) -> Path:
    return config.folder / "train" / "metrics.jsonl"


def step_row(step: int) -> dict[str, float]:
    """Return the metrics of a step; metric `x` is the step's number."""
    return {"step": step, "x": float(step), STEP_TIME: 1e9 + step}


def append_steps(config: RunConfig, steps: Iterable[int]) -> None:
    """Append rows to the run's metrics.jsonl."""
    with metrics_path_of(config).open("a") as file:
        file.writelines(json.dumps(step_row(step)) + "\n" for step in steps)


def open_writer(config: RunConfig, first_step: int = 0) -> MlflowWriter:
    """Connect to MLflow as a training that starts or resumes at `first_step`."""
    record = start_training_record(config, config_path_of(config), first_step)
    return MlflowWriter(open_store(config), config, record)
