"""Trackers beside MLflow: they draw what metrics.jsonl has, and whatever they do, a training does not wait or end."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.tracking import feed as tracking
from mcore_mas.tracking import trackers
from mcore_mas.tracking.trackers import TRACKERS, open_trackers
from tests.slurm.cluster import wait_until


def config_of(tmp_path: Path, *names: str) -> RunConfig:
    words = ["experiment=demo_math", f"results={tmp_path}", f"tracking.also=[{','.join(names)}]"]
    return RunConfig.model_validate(resolve(words))


def fed(config: RunConfig, first: int, steps: Iterable[int], said: list[str]) -> None:
    """Trackers of a start that goes on at step `first` and writes rows of these steps."""
    path = config.folder / "train" / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = open_trackers(config, first, said.append)
    for step in steps:
        write_row(path, step)
        for tracker in opened:
            tracker.log()
    for tracker in opened:
        tracker.finish("FINISHED")


def write_row(path: Path, step: int) -> None:
    with path.open("a") as file:
        file.write(
            json.dumps({"step": step, "reward/mean": step / 4, "time/unix_s": 1.0, "epoch": 7})
            + "\n"
        )


def test_tensorboard_has_every_step_and_after_a_resume_none_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, said = config_of(tmp_path, "tensorboard"), []
    for first, steps in ((0, range(-1, 3)), (2, range(2, 4))):  # the second start goes on at step 2
        fed(config, first, steps, said)
    found = EventAccumulator(str(config.folder / "train" / "tensorboard"))
    found.Reload()
    assert [(point.step, point.value) for point in found.Scalars("reward/mean")] == [
        (n, n / 4) for n in range(-1, 4)
    ]
    assert said == []


def test_wandb_keeps_a_run_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb (pip install wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config, said = config_of(tmp_path, "wandb"), []
    fed(config, 0, range(-1, 3), said)
    assert said == []
    (file,) = (config.folder / "train" / "wandb").glob("offline-run-*/run-demo_math-*.wandb")
    wait_until(lambda: b"reward/mean" in file.read_bytes(), 60)  # which a process of wandb writes


def test_a_training_that_goes_on_is_one_run_and_another_of_its_name_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, str]] = []  # id, resume
    made = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    def init(*, resume: str, id: str = "", **_: object) -> SimpleNamespace:
        begun.append((id, resume))
        return made

    library = SimpleNamespace(init=init, Settings=lambda **_: None)
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, library)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    for folder in ("one", "one", "other"):  # the second goes on
        for name in ("wandb", "trackio"):
            fed(config_of(tmp_path / folder, name), 0, [0], [])
    (first, other), (again, _), (third, anew) = zip(begun[::2], begun[1::2], strict=True)
    assert first == again != third and first[0].startswith("demo_math-") and first[1] == "allow"
    assert [other[1], begun[3][1], anew[1]] == ["never", "allow", "never"]


def test_trackio_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs Trackio (pip install trackio)")
    config, said = config_of(tmp_path, "trackio"), []
    fed(config, 0, range(-1, 3), said)
    assert said == []
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(config.tracking.experiment, config.run)
    assert [row["reward/mean"] for row in rows] == [step / 4 for step in range(-1, 3)]


class Flaky:
    """A tracker that takes nothing while `down`."""

    def __init__(self) -> None:
        self.down, self.opened, self.drawn = True, [], {}

    def open(self, config: RunConfig, first: int) -> Flaky:
        self.opened.append(first)
        return self

    def log(self, step: int, metrics: object) -> None:
        if self.down and step:
            raise OSError(f"disk full at {step}")
        self.drawn[step] = metrics

    def close(self) -> None:
        if self.down:
            raise OSError("disk full")


def test_a_tracker_that_breaks_has_every_step_once_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky, said = Flaky(), []
    monkeypatch.setitem(TRACKERS, "tensorboard", flaky.open)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    monkeypatch.setattr(tracking, "_FIRST_S", 0.0)
    config = config_of(tmp_path, "tensorboard")
    path = config.folder / "train" / "metrics.jsonl"
    fed(config, 0, range(3), said)
    why = f"does not take metrics (OSError: disk full at 1); {path} has them for later"
    assert said == [f"tracker tensorboard {why}"] * 2  # when it broke, and at the end
    assert flaky.drawn == {0: {"reward/mean": 0.0}}
    (opened,) = open_trackers(config, 3, said.append)
    for step in (3, 4, 5):
        write_row(path, step)
        opened.log()
        while step == 3 and len(said) < 3:
            time.sleep(0.01)
        flaky.down = False
    opened.finish("FINISHED")
    assert said[2] == f"tracker tensorboard {why}"
    works = [
        f"tracker tensorboard works again and has all steps up to {step}" for step in (3, 4, 5)
    ]
    assert said[3] in works and len(said) == 4  # whichever step it meets first
    assert flaky.drawn == {step: {"reward/mean": step / 4} for step in range(6)}
    assert flaky.opened[-1] == 1  # opened anew at the step that it lacked


def test_a_tracker_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, said = threading.Event(), []
    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: free.wait())
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    monkeypatch.setattr(tracking, "_PATIENCE_S", 0.2)
    config = config_of(tmp_path, "wandb")
    path = config.folder / "train" / "metrics.jsonl"
    fed(config, 0, range(1000), said)  # more than may wait
    free.set()
    assert said == [f"tracker wandb hangs: steps from -1 on are in {path} alone"]


def test_a_library_that_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"tracking.also: trackio is not installed; pip install trackio"
    ):
        open_trackers(config_of(tmp_path, "trackio"), 0, print)
    with pytest.raises(ConfigError, match=r"tracking.also.*'tensorbord'"):
        config_of(tmp_path, "tensorbord")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_is_chosen_by_its_name_beside_mlflow(name: str) -> None:
    chosen = resolve(["experiment=demo_math", f"tracking={name}"])["tracking"]
    assert chosen == resolve(["experiment=demo_math"])["tracking"] | {"also": [name]}
