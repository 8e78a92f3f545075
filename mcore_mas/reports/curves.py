"""Curves of a run: the values of a metric over the training steps, from metrics.jsonl."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from rollout.base.json_files import read_json_lines

# Metrics of a run's steps, in order. A metric that was not measured in a step has no key there.
Metrics = Sequence[Mapping[str, float]]


class MetricsError(ValueError):
    """The metrics of runs cannot be plotted or compared; the message says what to do."""


def read_metrics(path: Path) -> Metrics:
    """Read the metrics of a run's steps.

    Raises:
        MetricsError: the file cannot be read, or has no metrics of a step.
    """
    try:
        rows = read_json_lines(path)[0]
    except OSError as error:
        raise MetricsError(
            f"{path}: cannot be read ({error.strerror}); train the run again"
        ) from error
    rows = [row for row in rows if "step" in row]
    if not rows:
        raise MetricsError(
            f"{path}: expected one JSON object with a 'step' per line; train the run again"
        )
    return rows


def curve(metrics: Metrics, key: str) -> pd.Series:
    """Return the values of a metric by the number of updates, for the steps that have it.

    Step s is the update s + 1, and the values before training are those of update 0.
    """
    values = {int(row["step"]) + 1: float(row[key]) for row in metrics if key in row}
    return pd.Series(values, dtype=float)


def curves_of(metrics: Metrics, group: str, name: str) -> dict[str, pd.Series]:
    """Return the curves of the metrics `group`/<agent or data source>/`name`, sorted by the middle."""
    keys = {key for row in metrics for key in row}
    key_by_member = {}
    for key in keys:
        match = re.fullmatch(rf"{group}/(.+)/{name}", key)
        if match:
            key_by_member[match[1]] = key
    return {member: curve(metrics, key_by_member[member]) for member in sorted(key_by_member)}
