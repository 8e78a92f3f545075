"""Differences between runs: in their settings, and in their scores task by task."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mcore_mas.equations.statistics import score_interval
from mcore_mas.reports.evaluation_files import read_task_metrics
from mcore_mas.reports.run_states import read_run_config
from rollout.base.nested import dotted_items


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDifference:
    """Means of a metric in two runs, over the tasks for which both have it."""

    state: str  # "base", "trained", or the name of an evaluation with other models
    metric: str
    first: float
    second: float
    low: float  # 95 % interval of second - first, paired by task
    high: float
    tasks: int  # number of tasks for which both runs have the metric


def config_differences(*runs: Path) -> dict[str, tuple[Any, ...]]:
    """Return the settings in which runs differ, with the value of each run or None.

    Settings that differ only by the run's name or folder, and empty sections that other runs lack,
    are left out. A section that a run lacks as a whole, such as an agent, is listed as one setting.

    Args:
        runs: folders of the runs.

    Returns:
        The runs' values by dotted key, in the order of `runs`. The value of a section that a run lacks
        is None for this run, and its size for the others, such as "3 settings".

    Raises:
        FolderError: one is not a run's folder, or its config is damaged.
    """
    configs = [_read_settings(run) for run in runs]
    run_names = tuple(config.get("run") for config in configs)
    keys: list[str] = []
    for config in configs:
        keys += [key for key, value in config.items() if value != {}]
    differences: dict[str, tuple[Any, ...]] = {}
    for key in dict.fromkeys(keys):
        section = _missing_section(key, configs)
        if section is not None:
            differences[section] = tuple(_section_size(section, config) for config in configs)
            continue
        values_of_key = tuple(config.get(key) for config in configs)
        differs = any(value != values_of_key[0] for value in values_of_key)
        # The setting `run` holds the names of the runs, and others may hold them too.
        are_run_names = values_of_key == run_names
        if differs and not are_run_names and key != "results":
            differences[key] = values_of_key
    return differences


def _read_settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run by dotted key, with `<run>` in place of the run's folder."""
    values = read_run_config(run)
    folder = f"{values.get('results')}/{values.get('run')}"
    return dict(dotted_items(_without_folder(values, folder)))


def _without_folder(value: Any, folder: str) -> Any:
    """Return nested values with a run's folder replaced by `<run>` in every path."""
    if isinstance(value, str):
        return "<run>" + value.removeprefix(folder) if value.startswith(f"{folder}/") else value
    if isinstance(value, Mapping):
        return {key: _without_folder(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folder(item, folder) for item in value]
    return value


def _missing_section(key: str, configs: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the outermost section around a key that a config lacks; None if each config has all of them."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        section = ".".join(parts[:depth])
        if not all(_section_size(section, config) for config in configs):
            return section
    return None


def _section_size(section: str, config: Mapping[str, Any]) -> str | None:
    """Return the size of a section, such as "3 settings"; None if the config lacks the section."""
    keys = [key for key in config if key == section or key.startswith(f"{section}.")]
    if not keys:
        return None
    return "1 setting" if len(keys) == 1 else f"{len(keys)} settings"


def score_differences(first: Path, second: Path) -> list[ScoreDifference]:
    """Return the scores of evaluations that both runs have, on the tasks of both.

    Raises:
        FolderError: an evaluation is damaged.
    """
    differences: list[ScoreDifference] = []
    for file in sorted((first / "evaluation").glob("*.json")):
        other_file = second / "evaluation" / file.name
        if other_file.is_file():
            differences += _evaluation_differences(file, other_file)
    return differences


def _evaluation_differences(first: Path, second: Path) -> Iterator[ScoreDifference]:
    """Yield the difference of each metric of two evaluations of the same state, over the tasks of both."""
    first_metrics = read_task_metrics(first)
    second_metrics = read_task_metrics(second)
    common_tasks = [task for task in first_metrics if task in second_metrics]
    metrics = [metric for task in common_tasks for metric in first_metrics[task]]
    for metric in dict.fromkeys(metrics):
        pairs = [
            (first_metrics[task][metric], second_metrics[task][metric])
            for task in common_tasks
            if metric in first_metrics[task] and metric in second_metrics[task]
        ]
        if not pairs:
            continue
        gains = [second_score - first_score for first_score, second_score in pairs]
        low, high = score_interval(gains, f"{first.stem}/{metric}", lowest=-1.0)
        yield ScoreDifference(
            state=first.stem,
            metric=metric,
            first=fmean(pair[0] for pair in pairs),
            second=fmean(pair[1] for pair in pairs),
            low=low,
            high=high,
            tasks=len(pairs),
        )
