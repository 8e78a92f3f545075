"""Progress of the runs in a results folder, with the problems of files that cannot be read."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mcore_mas.reports.evaluation_files import read_score_rows
from mcore_mas.reports.job_failures import failure_cause
from mcore_mas.reports.step_metrics import STEP_LIMIT, Metrics, MetricsError, read_step_rows
from rollout.base.ownership import FolderError, private_folder_error
from rollout.base.yaml_files import read_yaml
from rollout.records.files import RecordError

_MLFLOW_ARTIFACTS = "mlflow-artifacts"  # folder beside the runs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Progress of a run, and its newest reward and accuracy."""

    run: str
    steps: int  # finished training steps
    total_steps: int | None  # None if the config has no valid trainer.steps or cannot be read
    done: bool
    failure: str  # job, cause and log of the newest failure of an unfinished run, or ""
    reward: float | None  # that of the last step with a reward
    accuracy: float | None  # that of the last validation
    scores: Mapping[str, float]  # avg@k of each evaluation, by state
    problems: tuple[str, ...]  # a line on each file that cannot be read
    # Time of the last change of its metrics or trajectories, or else of its config, in seconds since
    # the epoch; 0 if it has none of them.
    changed_s: float = field(default=0.0, compare=False)


def run_folders(results: Path) -> list[Path]:
    """Return the folders of the runs in a results folder, sorted by name.

    Raises:
        FolderError: there is no such folder.
    """
    if not results.is_dir():
        raise FolderError(f"{results}: no such folder; name the folder of the runs")
    # A config that is a broken link counts too, so that the run is shown with its problem.
    return [
        folder for folder in sorted(results.iterdir()) if os.path.lexists(folder / "config.yaml")
    ]


def private_run_errors(results: Path) -> list[str]:
    """Return a line for each folder in a results folder that only another user can read.

    Runs are private to the user who made them.
    """
    errors = [
        private_folder_error(folder)
        for folder in sorted(results.iterdir())
        if folder.name != _MLFLOW_ARTIFACTS  # private too, and no run
    ]
    return [error for error in errors if error]


def read_run_states(results: Path) -> list[RunState]:
    """Return the states of all runs in a results folder, or of one run by its own folder.

    Raises:
        FolderError: there is no such folder.
    """
    if os.path.lexists(results / "config.yaml"):
        return [_read_run_state(results)]
    return [_read_run_state(run) for run in run_folders(results)]


@contextmanager
def collecting_problems(problems: list[str]) -> Iterator[None]:
    """Append the error of a block that reads a run to `problems`, so that other runs are read."""
    try:
        yield
    except (FolderError, MetricsError, RecordError) as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(
            f"{error.filename}: cannot be read ({error.strerror}); check its permissions"
        )


def read_run_config(run: Path) -> dict[str, Any]:
    """Read the resolved config in a run's folder, without checking its values.

    Raises:
        FolderError: it is not a run's folder, or its config is damaged or cannot be read.
    """
    file = run / "config.yaml"
    if not os.path.lexists(file):
        raise FolderError(
            f"{file}: no such file; expected a run's folder, such as results/demo_math"
        )
    if not file.is_file():
        raise FolderError(f"{file}: expected a file with the run's settings; make it again")
    try:
        values = read_yaml(file)
    except OSError as error:
        raise FolderError(
            f"{file}: cannot be read ({error.strerror}); check its permissions, or make it again"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise FolderError(f"{file}: not YAML ({reason}); make it again") from error
    if not isinstance(values, dict):
        raise FolderError(
            f"{file}: holds a {type(values).__name__}; expected a mapping; make it again"
        )
    return values


def _read_run_state(run: Path) -> RunState:
    problems: list[str] = []
    total_steps = None
    with collecting_problems(problems):
        total_steps = _read_total_steps(run)

    rows: Metrics = []
    with collecting_problems(problems):
        metrics_path = run / "train" / "metrics.jsonl"
        if os.path.lexists(metrics_path):
            rows = read_step_rows(metrics_path)

    scores: dict[str, float] = {}
    for file in sorted((run / "evaluation").glob("*.json")):
        with collecting_problems(problems):
            score = _read_score(file)
            if score is not None:
                scores[file.stem] = score

    is_done = False
    with collecting_problems(problems):
        is_done = (run / "train" / "done.json").is_file()

    failure = ""
    if not is_done:
        with collecting_problems(problems):
            failure = _read_failure(run)

    return RunState(
        run=run.name,
        steps=1 + max((int(row["step"]) for row in rows), default=-1),
        total_steps=total_steps,
        done=is_done,
        failure=failure,
        reward=_last_value(rows, "reward/mean"),
        accuracy=_last_value(rows, "validation/accuracy"),
        scores=scores,
        problems=tuple(problems),
        changed_s=_last_change(run),
    )


def _read_total_steps(run: Path) -> int:
    trainer = read_run_config(run).get("trainer")
    steps = trainer.get("steps") if isinstance(trainer, dict) else None
    if type(steps) is not int or not 0 <= steps < STEP_LIMIT:
        raise FolderError(
            f"{run / 'config.yaml'}: expected a whole number at trainer.steps; make it again"
        )
    return steps


def _last_change(run: Path) -> float:
    """Return the time of the last change of a run's metrics or trajectories, or else of its config."""
    times = {}
    for name in ("train/metrics.jsonl", "train/trajectories", "config.yaml"):
        with suppress(OSError):
            times[name] = (run / name).stat().st_mtime
    config_time = times.pop("config.yaml", 0.0)
    return max(times.values(), default=config_time)


def _read_failure(run: Path) -> str:
    """Return job, cause and log of the newest failure of a run's jobs, or "" if no job has failed.

    Only a failure whose log is newer than that of the training is returned: a training that has
    written since then goes on in spite of the failure.
    Logs that are links to files outside of the run's folder are not read.
    """
    folder = run.resolve()
    logs = [log for log in run.glob("logs/*.log") if log.is_file()]
    logs = [log for log in logs if log.resolve().is_relative_to(folder)]
    for log in sorted(logs, key=lambda log: log.stat().st_mtime, reverse=True):
        cause = failure_cause(log)
        if cause:
            return f"{log.stem}: {cause} ({log})"
        if log.stem == "train":
            return ""
    return ""


def _read_score(evaluation: Path) -> float | None:
    """Return avg@k of an evaluation over all data sources, or None if it has none."""
    averages = [row.value for row in read_score_rows(evaluation) if row.metric.startswith("avg@")]
    # With several data sources, the mean over all of them comes last.
    return averages[-1] if averages else None


def _last_value(rows: Metrics, name: str) -> float | None:
    for row in reversed(rows):
        if name in row:
            return row[name]
    return None
