"""Reader of the metrics of a run's steps, from metrics.jsonl. It imports no heavy library."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.base.json_files import read_json_lines

# Metrics of a run's steps, in order. A metric that was not measured in a step has no key there.
Metrics = Sequence[Mapping[str, float]]

STEP_LIMIT = 10**12  # larger numbers are damage


class MetricsError(ValueError):
    """The metrics of runs cannot be plotted or compared; the message says what to do."""


def read_metrics(path: Path) -> Metrics:
    """Read the metrics of a run's steps.

    Raises:
        MetricsError: the file cannot be read, it has no row, no line holds a JSON object, or a row has
            no step.
    """
    rows = read_step_rows(path)
    if not rows:
        raise MetricsError(
            f"{path}: expected one JSON object with a 'step' per line; train the run again"
        )
    return rows


def read_step_rows(path: Path) -> Metrics:
    """Read the metrics of the steps that a run has taken so far, which may be none.

    Values that are not numbers are left out.

    Raises:
        MetricsError: the file cannot be read, it has lines but none holds a JSON object, or a row has
            no step.
    """
    try:
        if not path.is_file():
            raise MetricsError(f"{path}: no such file; train the run again")
        rows, end_of_lines = read_json_lines(path)
    except OSError as error:
        raise MetricsError(
            f"{path}: cannot be read ({error.strerror}); train the run again"
        ) from error

    has_lines = end_of_lines > 0
    if has_lines and not rows:
        raise MetricsError(
            f"{path}: expected one JSON object with a 'step' per line; train the run again"
        )
    return [_checked_row(path, number, row) for number, row in enumerate(rows, start=1)]


def has_step(row: Mapping[str, Any]) -> bool:
    """Return True if a row has the number of a step, where -1 is the validation before training."""
    step = row.get("step")
    return type(step) is int and -1 <= step < STEP_LIMIT


def _checked_row(path: Path, number: int, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row; raise MetricsError if it has no step.

    Args:
        path: file of the row, for the error.
        number: number of the row in the file, counted from 1, for the error.
        row: values by name.
    """
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
    return {**values, "step": row["step"]}  # the step remains a whole number
