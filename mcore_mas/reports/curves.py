"""Curves of a run: the values of a metric over the training steps."""

import re

import pandas as pd

from mcore_mas.reports.step_metrics import Metrics


def curve(metrics: Metrics, key: str) -> pd.Series:
    """Return the values of a metric by the number of the step, for the steps that have the metric.

    Metrics count steps from 0, and curves from 1. The validation before training has the number 0.
    """
    values = {int(row["step"]) + 1: float(row[key]) for row in metrics if key in row}
    return pd.Series(values, dtype=float)


def curves_of(metrics: Metrics, group: str, name: str) -> dict[str, pd.Series]:
    """Return the curves of the metrics GROUP/MEMBER/NAME by member, sorted by member.

    Args:
        metrics: rows of a run.
        group: such as "agent" or "validation".
        name: name of the metric of each member, which is an agent, a policy or a data source.
    """
    keys = {key for row in metrics for key in row}
    key_by_member = {}
    for key in keys:
        match = re.fullmatch(rf"{group}/(.+)/{name}", key)
        if match:
            key_by_member[match[1]] = key
    return {member: curve(metrics, key_by_member[member]) for member in sorted(key_by_member)}
