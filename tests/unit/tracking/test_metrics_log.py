"""metrics.jsonl has one row per step, over restarts, torn lines and a full disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.reports.step_metrics import MetricsError, read_metrics
from mcore_mas.tracking.metrics_log import STEP_TIME, MetricsLog, step_metrics

BAD_LINES = [
    '{"step": 3, "x"',
    "\0" * 50,
    '{"x": 1}',
    "5",
    "null",
    '{"step": "4"}',
    "[" * 9000,
    "\udcff\udcfe",
]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_has_one_row_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in (-1, 0, 1, 2):
        log.append(step, {"x": step})
    with path.open("a") as file:
        file.write('{"step": 3, "x"')  # as of a process that was killed
    log = MetricsLog(path, 2)  # from the checkpoint after two steps
    log.append(1, {"x": 9.0})  # validated again
    log.append(2, {"x": 5.0})
    assert [(row["step"], row["x"]) for row in rows_of(path)] == [(-1, -1), (0, 0), (1, 1), (2, 5)]


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_damaged_line_is_skipped(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        f'{{"step": 0, "x": 1.0}}\n{bad}\n{{"step": 1, "x": 2.0}}\n{bad}', errors="surrogateescape"
    )
    MetricsLog(path, 2).append(2, {"x": 3.0})
    assert rows_of(path) == [
        {"step": 0, "x": 1.0},
        {"step": 1, "x": 2.0},
        {"step": 2, "x": 3.0},
    ]
    path.write_text(bad, errors="surrogateescape")
    with pytest.raises(MetricsError, match="expected one JSON object with a 'step' per line"):
        read_metrics(path)


@pytest.mark.parametrize("rows_reach_the_file", [True, False])
def test_metrics_that_a_full_disk_refuses_are_written_once_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_reach_the_file: bool
) -> None:
    """The disk is full when the whole row is in the file, or when only its beginning is."""
    path = tmp_path / "metrics.jsonl"
    warnings: list[str] = []
    log = MetricsLog(path, 0, warnings.append)
    log.append(0, {"x": 1.0})

    def fail_fsync(descriptor: int) -> None:
        if not rows_reach_the_file:
            os.truncate(path, path.stat().st_size - 5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_fsync)
        log.append(1, {"x": 2.0})
        log.append(2, {"x": 3.0})
    log.append(3, {"x": 4.0})
    assert warnings == [
        f"{path}: the metrics of step {step + 1} cannot be written yet (No space left on device); "
        "they are written with the next step"
        for step in (1, 2)
    ]
    assert rows_of(path) == [{"step": step, "x": step + 1.0} for step in range(4)]


def test_step_time_and_texts_are_no_metrics() -> None:
    row = {"step": 3, STEP_TIME: 1.7e9, "x": 1, "note": "text"}
    assert step_metrics(row) == {"x": 1.0}
