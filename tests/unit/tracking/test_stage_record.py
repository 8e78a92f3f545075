"""The records of a run's stages, and the tags that jobs add up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_mas.tracking import stage_record as stage_records
from mcore_mas.tracking.stage_record import stage_record


def test_a_stage_that_was_interrupted_continues_its_record_and_one_that_ended_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "logs" / "bootstrap.log"
    path = log.with_suffix(".json")
    clock = iter([100.0, 150.0, 175.0, 300.0, 301.0])
    # Only the clock of this module, because threads of other tests read that of the process.
    monkeypatch.setattr(stage_records, "time", SimpleNamespace(time=lambda: next(clock)))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(KeyboardInterrupt), stage_record(log):
        raise KeyboardInterrupt
    assert json.loads(path.read_text()).keys() == {"began", "tags"}

    monkeypatch.setenv("SLURM_JOB_ID", "9")
    with stage_record(log):
        pass
    record = json.loads(path.read_text())
    assert (record["began"], record["ended"]) == (100.0, 175.0)
    assert (record["tags"]["slurm_job"], record["tags"]["machines"]) == ("7 9", "n0")

    with stage_record(log):
        pass
    record = json.loads(path.read_text())
    assert (record["began"], record["ended"]) == (300.0, 301.0)
    assert record["tags"]["slurm_job"] == "9"
