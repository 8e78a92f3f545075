"""The progress of the runs in a results folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.base.json_files import read_json_lines, read_record
from rollout.base.ownership import FolderError
from rollout.base.yaml_files import read_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Progress of a run, and its newest reward and accuracy."""

    run: str
    steps: int  # finished training steps
    total_steps: int
    done: bool
    reward: float | None  # of the last step that has one
    accuracy: float | None  # of the last validation
    scores: Mapping[str, float]  # avg@k of each evaluation, by state


def run_folders(results: Path) -> list[Path]:
    """Return the folders of the runs in a results folder, by name.

    Raises:
        FolderError: there is no such folder.
    """
    if not results.is_dir():
        raise FolderError(f"{results}: no such folder; name the folder of the runs")
    return [file.parent for file in sorted(results.glob("*/config.yaml"))]


def read_run_states(results: Path) -> list[RunState]:
    """Return the states of all runs in a results folder, or of one run by its own folder.

    Raises:
        FolderError: there is no such folder.
    """
    if (results / "config.yaml").is_file():
        return [_read_run_state(results)]
    return [_read_run_state(run) for run in run_folders(results)]


def read_run_config(run: Path) -> dict[str, Any]:
    """Read the resolved config in a run's folder, without checking its values.

    Raises:
        FolderError: it is no run's folder.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise FolderError(
            f"{file}: no such file; expected a run's folder, such as results/demo_math"
        )
    return dict(read_yaml(file))


def _read_run_state(run: Path) -> RunState:
    metrics_path = run / "train" / "metrics.jsonl"
    rows = read_json_lines(metrics_path)[0] if metrics_path.is_file() else []
    scores = _read_scores(run)
    return RunState(
        run=run.name,
        steps=1 + max((row["step"] for row in rows), default=-1),
        total_steps=read_run_config(run)["trainer"]["steps"],
        done=(run / "train" / "done.json").is_file(),
        reward=_last_value(rows, "reward/mean"),
        accuracy=_last_value(rows, "validation/accuracy"),
        scores=scores,
    )


def _read_scores(run: Path) -> dict[str, float]:
    """Return avg@k of each evaluation by state; with several data sources, that of all of them."""
    scores = {}
    for file in sorted((run / "evaluation").glob("*.json")):
        for row in read_record(file, "rows")["rows"]:
            if row["metric"].startswith("avg@"):  # the row of all sources is the last
                scores[file.stem] = row["value"]
    return scores


def _last_value(rows: list[dict[str, Any]], name: str) -> float | None:
    for row in reversed(rows):
        if name in row:
            return float(row[name])
    return None
