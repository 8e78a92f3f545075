"""The run folder's metrics.jsonl: one row for every step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mcore_mas.rollout.base.failpoints import failpoint
from mcore_mas.rollout.base.files import check_owner, json_lines, write_text


class Journal:
    """One JSON object per training step in a file that survives restarts."""

    def __init__(self, path: Path, first_step: int, warn: Callable[[str], None] = print) -> None:
        """Continue `path` at `first_step`; rows of steps that will be taken again are dropped."""
        self._path, self._warn = path, warn
        self._waiting = ""  # what could not be written yet
        rows = json_lines(path)[0] if path.is_file() else []
        kept = [row for row in rows if type(row.get("step")) is int and row["step"] < first_step]
        self._last: int = kept[-1]["step"] if kept else -2  # step of the last row
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in kept))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step, once: a run that was stopped right after it had made up a validation makes it up again.

        What cannot be written, because a disk is full, is told of and written with the next step.
        """
        if step <= self._last:
            return
        self._last = step
        self._waiting += json.dumps({"step": step, **metrics}) + "\n"
        check_owner(self._path)
        try:
            failpoint("metrics.begun")
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._waiting)
                file.flush()
                failpoint("metrics.written")
                os.fsync(file.fileno())
            self._waiting = ""
        except OSError as error:
            self._warn(f"{self._path}: the metrics of step {step} wait for the next ({error.strerror})")
            if not self._waiting.startswith("\n"):
                self._waiting = f"\n{self._waiting}"  # part of it may be there
