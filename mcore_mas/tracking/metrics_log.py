"""The file metrics.jsonl of a training: one JSON object per step, kept over restarts."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollout.base.failpoints import failpoint
from rollout.base.files import write_text
from rollout.base.json_files import read_json_lines
from rollout.records.trajectory import step_label

MetricsRow = Mapping[str, Any]  # one line of metrics.jsonl

STEP_TIME = "time/unix_s"  # when the step ended, in seconds since the epoch
_NOT_METRICS = frozenset({"step", STEP_TIME})
_NO_STEP = -2  # before the first validation, which is step -1


class MetricsLog:
    """The metrics.jsonl that a training appends to.

    Training steps count from 0; the validation before training is step -1.
    """

    def __init__(self, path: Path, first_step: int, warn: Callable[[str], None] = print) -> None:
        """Open the log to continue at `first_step`; drop the rows from that step on."""
        self._path = path
        self._warn = warn
        self._unwritten = ""  # rows that could not be written yet
        self._retry_at: int | None = None  # size of the file before a write that failed

        rows = read_json_lines(path)[0] if path.is_file() else []
        retained = [row for row in rows if _is_step_before(row, first_step)]
        self._last_step: int = retained[-1]["step"] if retained else _NO_STEP
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in retained))

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the row of a step, unless the log has it already.

        A run that was stopped between the first validation and the first checkpoint validates
        again; the row of its first validation stays. A row that cannot be written, because the disk
        is full, is written with the next step.
        """
        if step <= self._last_step:
            return
        self._last_step = step
        self._unwritten += json.dumps({"step": step, **metrics}) + "\n"
        self.flush()

    def flush(self) -> None:
        """Write the rows that are not on disk yet; warn if that fails."""
        if not self._unwritten:
            return
        try:
            failpoint("metrics.begun")
            with self._path.open("ab") as file:
                if self._retry_at is not None:
                    # The write that failed may have left some or all of the rows in the file.
                    file.truncate(self._retry_at)
                self._retry_at = file.seek(0, os.SEEK_END)
                file.write(self._unwritten.encode())
                file.flush()
                failpoint("metrics.written")
                os.fsync(file.fileno())
            self._unwritten = ""
            self._retry_at = None
        except OSError as error:
            self._warn(
                f"{self._path}: the metrics of {step_label(self._last_step)} cannot be written yet "
                f"({error.strerror}); they are written with the next step"
            )


def step_metrics(row: MetricsRow) -> dict[str, float]:
    """Return the metrics of a row, without its step and time."""
    return {
        name: float(value)
        for name, value in row.items()
        if name not in _NOT_METRICS and isinstance(value, int | float)
    }


def _is_step_before(row: MetricsRow, first_step: int) -> bool:
    step = row.get("step")
    return type(step) is int and step < first_step
