"""The writers of TensorBoard and wandb, and their choice in a config."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.tracking import writers
from mcore_mas.tracking.metrics_log import STEP_TIME
from mcore_mas.tracking.writers import WRITERS, TensorBoardWriter, WandbWriter, missing_libraries
from tests.slurm.cluster import wait_until


def config_of(tmp_path: Path, *names: str) -> RunConfig:
    overrides = [
        "experiment=demo_math",
        f"results={tmp_path}",
        f"tracking.further_trackers=[{','.join(names)}]",
    ]
    config = RunConfig.model_validate(resolve(overrides))
    (config.folder / "train").mkdir(parents=True, exist_ok=True)
    return config


def rows_of(steps: Iterable[int]) -> list[dict[str, float]]:
    return [{"step": step, "reward/mean": step / 4, STEP_TIME: 1.0} for step in steps]


def test_tensorboard_has_every_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(tmp_path, "tensorboard")
    for first_step, steps in ((0, range(-1, 3)), (2, range(2, 4))):
        writer = TensorBoardWriter(config, first_step)
        writer.write(rows_of(steps))
        writer.close("FINISHED")
    events = EventAccumulator(str(config.folder / "train" / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(point.step, point.value) for point in events.Scalars("reward/mean")] == [
        (step, step / 4) for step in range(-1, 4)
    ]


def test_wandb_keeps_a_run_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb (pip install wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = config_of(tmp_path, "wandb")
    writer = WandbWriter(config, 0)
    writer.write(rows_of(range(-1, 3)))
    writer.close("FINISHED")
    (file,) = (config.folder / "train" / "wandb").glob("offline-run-*/run-demo_math-*.wandb")
    # Another process writes the file; wait_until raises if the metric does not appear in it.
    wait_until(lambda: b"reward/mean" in file.read_bytes(), 60)
    assert b"reward/mean" in file.read_bytes()


def test_a_training_that_resumes_continues_its_run_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, str]] = []  # id, resume
    logged: list[tuple[dict[str, float], int]] = []
    exit_codes: list[int] = []

    def init(*, id: str, resume: str, **_: object) -> SimpleNamespace:
        started.append((id, resume))
        return SimpleNamespace(
            log=lambda metrics, step: logged.append((metrics, step)),
            finish=lambda exit_code: exit_codes.append(exit_code),
        )

    library = SimpleNamespace(init=init, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", library)
    first = WandbWriter(config_of(tmp_path / "one"), 0)
    first.write(rows_of([-1]))
    first.close("KILLED")
    WandbWriter(config_of(tmp_path / "one"), 3).close("FINISHED")
    WandbWriter(config_of(tmp_path / "other"), 0)
    assert started[0] == started[1] != started[2]
    assert started[0][0].startswith("demo_math-")
    assert started[0][1] == "allow"
    assert logged == [({"training_step": -1, "reward/mean": -0.25}, 0)]
    assert exit_codes == [1, 0]


def test_a_library_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, "wandb")
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    assert list(missing_libraries(config)) == [
        "tracking.further_trackers: wandb is not installed; pip install wandb, or remove it from the list"
    ]


@pytest.mark.parametrize("name", WRITERS)
def test_a_tracker_is_chosen_by_its_name_beside_mlflow(name: str) -> None:
    chosen = resolve(["experiment=demo_math", f"tracking={name}"])["tracking"]
    assert chosen == resolve(["experiment=demo_math"])["tracking"] | {"further_trackers": [name]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "tracking.further_trackers=[tensorbord]",
            "tracking.further_trackers.0: Input should be 'tensorboard' or 'wandb'",
        ),
        ("tracking.also=[wandb]", "tracking.also was removed: write tracking.further_trackers"),
        ("tracking=trackio", "no tracking 'trackio'.*there are: local, tensorboard, wandb"),
        ("+tracking.zeros=true", "tracking.zeros was removed: leave it out"),
    ],
)
def test_an_unknown_tracker_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        resolve(["experiment=demo_math", override])
    assert "\n" not in str(refused.value)
