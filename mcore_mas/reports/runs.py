"""Runs of a results folder: where each stands, and how two of them differ in settings and scores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from mcore_mas.equations.statistics import mean_interval
from mcore_mas.rollout.base.files import FolderError, json_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands."""

    run: str
    steps: int  # taken ...
    of: int  # ... of so many
    done: bool
    reward: float | None  # of the last step that has one
    accuracy: float | None  # of the last validation
    scores: Mapping[str, float]  # avg@k of each evaluation, by state


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDifference:
    """A metric of two runs on the tasks that both have."""

    state: str
    metric: str
    first: float
    second: float
    low: float  # 95 % interval of second - first, paired by task
    high: float
    tasks: int


def run_states(results: Path) -> list[RunState]:
    """The runs of a results folder, by name.

    Raises:
        FolderError: there is no such folder.
    """
    if not results.is_dir():
        raise FolderError(f"{results}: no such folder; name the folder of the runs")
    return [_state(file.parent) for file in sorted(results.glob("*/config.yaml"))]


def _state(run: Path) -> RunState:
    journal = run / "train" / "metrics.jsonl"
    rows = json_lines(journal)[0] if journal.is_file() else []
    scores = {
        file.stem: row["value"]
        for file in sorted((run / "evaluation").glob("*.json"))
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
        if row["metric"].startswith("avg@")  # of several data sources the last, `all`
    }
    return RunState(
        run=run.name,
        steps=1 + max((row["step"] for row in rows), default=-1),
        of=_config(run)["trainer"]["steps"],
        done=(run / "train" / "done.json").is_file(),
        reward=_last(rows, "reward/mean"),
        accuracy=_last(rows, "validation/accuracy"),
        scores=scores,
    )


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((row[name] for row in reversed(rows) if name in row), None)


def _config(run: Path) -> dict[str, Any]:
    file = run / "config.yaml"
    if not file.is_file():
        raise FolderError(f"{file}: no such file; expected a run's folder, such as results/demo_math")
    values: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return values


def config_differences(*runs: Path) -> dict[str, tuple[Any, ...]]:
    """The settings in which runs differ, by dotted key, with the value of each run, None where it has none.

    Raises:
        FolderError: one is no run's folder.
    """
    flat = [dict(_leaves("", _config(run))) for run in runs]
    values = {key: tuple(own.get(key) for own in flat) for own in flat for key in own if key != "run"}
    return {key: own for key, own in values.items() if any(value != own[0] for value in own)}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}".lstrip("."), inner)
    else:
        yield key, value


def score_differences(first: Path, second: Path) -> list[ScoreDifference]:
    """The metrics of evaluations that both runs have, on the tasks that both were asked."""
    found = []
    for file in sorted((first / "evaluation").glob("*.json")):
        other = second / "evaluation" / file.name
        if not other.is_file():
            continue
        tasks = [
            {task["task_id"]: task["metrics"] for task in json.loads(path.read_text(encoding="utf-8"))["tasks"]}
            for path in (file, other)
        ]
        both = [(own, tasks[1][name]) for name, own in tasks[0].items() if name in tasks[1]]
        for metric in dict.fromkeys(name for own, _ in both for name in own):
            pairs = [(own[metric], theirs[metric]) for own, theirs in both if metric in own and metric in theirs]
            if not pairs:
                continue
            low, high = mean_interval([b - a for a, b in pairs], f"{file.stem}/{metric}")
            first_mean, second_mean = fmean(a for a, _ in pairs), fmean(b for _, b in pairs)
            row = ScoreDifference(
                state=file.stem,
                metric=metric,
                first=first_mean,
                second=second_mean,
                low=low,
                high=high,
                tasks=len(pairs),
            )
            found.append(row)
    return found
