"""Curves of a run: the values of a metric over the training steps, from metrics.jsonl."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from rollout.base.json_files import read_json_lines

# Metrics of a run's steps, in order. A metric that was not measured in a step has no key there.
Metrics = Sequence[Mapping[str, float]]

STEP_LIMIT = 10**12  # larger numbers are damage


class MetricsError(ValueError):
    """The metrics of runs cannot be plotted or compared; the message says what to do."""


def read_metrics(path: Path) -> Metrics:
    """Read the metrics of a run's steps.

    Raises:
        MetricsError: the file cannot be read, a row has no step, or there is no row.
    """
    rows = read_step_rows(path)
    if not rows:
        raise MetricsError(
            f"{path}: expected one JSON object with a 'step' per line; train the run again"
        )
    return rows


def read_step_rows(path: Path) -> Metrics:
    """Read the metrics of the steps that a run has taken so far, which may be none.

    Values that are no numbers are left out.

    Raises:
        MetricsError: the file cannot be read, or a row has no step.
    """
    try:
        if not path.is_file():
            raise MetricsError(f"{path}: no such file; train the run again")
        rows, end = read_json_lines(path)
    except OSError as error:
        raise MetricsError(
            f"{path}: cannot be read ({error.strerror}); train the run again"
        ) from error

    if end and not rows:
        raise MetricsError(
            f"{path}: expected one JSON object with a 'step' per line; train the run again"
        )
    return [_checked_row(path, number, row) for number, row in enumerate(rows, start=1)]


def has_step(row: Mapping[str, Any]) -> bool:
    """Return True if a row has the number of a step, where -1 is the validation before training."""
    step = row.get("step")
    return type(step) is int and -1 <= step < STEP_LIMIT


def _checked_row(path: Path, number: int, row: Mapping[str, Any]) -> dict[str, float]:
    if not has_step(row):
        raise MetricsError(
            f"{path}: row {number} has no whole number from -1 as its 'step'; "
            "remove this row, or train the run again"
        )
    values = {}
    for name, value in row.items():
        if isinstance(value, int | float):
            with suppress(OverflowError):  # raised for an integer above 1e308
                values[name] = float(value)
    return {**values, "step": row["step"]}


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
