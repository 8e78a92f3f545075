"""Progress lines estimate the remaining time."""

from __future__ import annotations

import pytest

from mcore_mas.tracking import progress
from mcore_mas.tracking.progress import ProgressReporter


def test_remaining_time_excludes_the_start_of_engines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Times of the start, of the report of the first validation, and of those of two steps.
    clock = iter([0.0, 75.0, 77.0, 79.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    reporter = ProgressReporter("r train", 30)
    for done in (0, 1, 2):
        reporter.step(done, {"reward": 0.5})
    assert capsys.readouterr().err.splitlines() == [
        "r train: 0/30  reward 0.5",
        "r train: 1/30  reward 0.5  left 0:58",
        "r train: 2/30  reward 0.5  left 0:56",
    ]
