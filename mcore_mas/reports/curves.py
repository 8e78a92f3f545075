"""Curves of a run: the values of a metric over the training steps."""

import re

import pandas as pd

from mcore_mas.reports.step_metrics import Metrics


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
