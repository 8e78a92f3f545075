"""Trackers beside MLflow: they draw what metrics.jsonl has, and whatever they do, a training does not wait or end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.training import trackers
from mcore_mas.training.trackers import TRACKERS, Trackers


def config_of(tmp_path: Path, *names: str) -> RunConfig:
    words = ["experiment=demo_math", f"results={tmp_path}", f"tracking.also=[{','.join(names)}]"]
    return RunConfig.model_validate(resolve(words))


def test_tensorboard_has_every_step_and_after_a_resume_none_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, said = config_of(tmp_path, "tensorboard"), []
    for first, steps in ((0, range(-1, 3)), (2, range(2, 4))):  # the second start goes on at step 2
        trackers = Trackers(config, first, said.append)
        for step in steps:
            trackers.log(step, {"reward/mean": step / 4})
        trackers.close()
    found = EventAccumulator(str(config.folder / "train" / "tensorboard"))
    found.Reload()
    assert [(point.step, point.value) for point in found.Scalars("reward/mean")] == [(n, n / 4) for n in range(-1, 4)]
    assert said == []


def test_wandb_keeps_a_run_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb (pip install wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config, said = config_of(tmp_path, "wandb"), []
    trackers = Trackers(config, 0, said.append)
    for step in range(-1, 3):
        trackers.log(step, {"reward/mean": step / 4})
    trackers.close()
    assert said == []
    (file,) = (config.folder / "train" / "wandb").glob("offline-run-*/run-demo_math.wandb")
    assert b"reward/mean" in file.read_bytes()


def test_trackio_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs Trackio (pip install trackio)")
    config, said = config_of(tmp_path, "trackio"), []
    trackers = Trackers(config, 0, said.append)
    for step in range(-1, 3):
        trackers.log(step, {"reward/mean": step / 4})
    trackers.close()
    assert said == []
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(config.tracking.experiment, config.run)
    assert [row["reward/mean"] for row in rows] == [step / 4 for step in range(-1, 3)]


class Broken:
    def __init__(self, *_: object) -> None:
        self.drawn = 0

    def log(self, step: int, metrics: object) -> None:
        self.drawn += 1
        raise OSError(f"disk full at {step}")

    def close(self) -> None:
        raise AssertionError("what is lost is left alone")


def test_a_tracker_that_breaks_is_said_once_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, said = Broken(), []
    monkeypatch.setitem(TRACKERS, "tensorboard", lambda *_: broken)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    opened = Trackers(config_of(tmp_path, "tensorboard"), 0, said.append)
    for step in range(3):
        opened.log(step, {"reward/mean": 0.0})
    opened.close()
    assert broken.drawn == 1
    assert said == [
        "tracker tensorboard draws no more of this run (OSError: disk full at 0); metrics.jsonl has everything"
    ]


def test_a_tracker_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, said = threading.Event(), []
    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: free.wait())
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    monkeypatch.setattr(trackers, "_PATIENCE_S", 0.2)
    opened = Trackers(config_of(tmp_path, "wandb"), 0, said.append)
    for step in range(1000):  # more than may wait
        opened.log(step, {"reward/mean": 0.0})
    opened.close()
    free.set()
    assert said == ["tracker wandb draws no more of this run (it is too slow); metrics.jsonl has everything"]


def test_a_library_that_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracking.also: trackio is not installed; pip install trackio"):
        Trackers(config_of(tmp_path, "trackio"), 0, print)
    with pytest.raises(ConfigError, match=r"tracking.also.*'tensorbord'"):
        config_of(tmp_path, "tensorbord")
