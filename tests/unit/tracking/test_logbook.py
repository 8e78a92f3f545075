"""The logbook of a training: its steps, traces and end come to MLflow, also over a restart."""

from __future__ import annotations

import json
import platform
import threading
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from mcore_mas import code_commit
from mcore_mas.config.run import ConfigError
from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.tracking import logbook, writers
from mcore_mas.tracking.logbook import open_logbook
from rollout.records.files import tasks_digest, write_tasks
from rollout.records.trajectory import Group
from tests.support.mlflow_database import write_database
from tests.support.played import TASK, trajectory, turn
from tests.support.tracked_run import config_path_of, metrics_path_of, write_run


@pytest.mark.slow
def test_steps_traces_and_status_come_to_mlflow_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = write_database(tmp_path / "mlflow.db")
    config = write_run(tmp_path, uri, "trainer.steps=3", "tracking.further_trackers=[tensorboard]")
    path = config_path_of(config)
    write_tasks(config.folder / "tasks" / "train.parquet", [TASK])
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with pytest.raises(Stopped), open_logbook(config, path, 0) as book:
        for step in (-1, 0, 1):
            book.report(step, {"reward/mean": step / 2})
        book.trace([Group(task=TASK, trajectories=(trajectory(turn(0)),))], [])
        raise Stopped
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "tags.stage = 'train'")
    assert run.info.status == "KILLED"

    monkeypatch.setenv("SLURM_JOB_ID", "78")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    with open_logbook(config, path, 1) as book:  # from the checkpoint after one step
        for step in (1, 2):
            book.report(step, {"reward/mean": step / 2})
    (run,) = client.search_runs([experiment.experiment_id], "tags.stage = 'train'")
    assert run.info.status == "FINISHED"
    tags = run.data.tags
    assert (tags["slurm_job"], tags["machines"]) == ("77 78", f"{platform.node()} n[0-1]")
    assert (tags["commit"], tags["data.train"]) == (code_commit(), tasks_digest([TASK]))
    points = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in points] == [
        (0, -0.5),
        (1, 0.0),
        (2, 0.5),
        (3, 1.0),
    ]
    traces = client.search_traces(locations=[experiment.experiment_id], run_id=run.info.run_id)
    assert len(traces) == 1
    assert len(list((config.folder / "train" / "tensorboard").iterdir())) == 2


def test_a_training_whose_server_is_down_ends_in_time_with_its_metrics_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logbook, "CLOSE_TIMEOUT_S", 10.0)
    config = write_run(tmp_path, "http://127.0.0.1:1", "trainer.steps=2")
    began = time.monotonic()
    with open_logbook(config, config_path_of(config), 0) as book:
        for step in (0, 1):
            book.report(step, {"reward/mean": 0.5})
        assert time.monotonic() - began < 5
    assert time.monotonic() - began < 20
    rows = [json.loads(line) for line in metrics_path_of(config).read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert f"`mcore-mas track {tmp_path}` sends them" in capsys.readouterr().err


def test_a_training_that_is_stopped_before_its_first_step_does_not_wait_for_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    released = threading.Event()

    def hang(_: object) -> None:
        released.wait(60)
        raise ConnectionError

    monkeypatch.setattr(logbook, "open_store", hang)
    config = write_run(tmp_path, "http://127.0.0.1:1", "trainer.steps=2")
    with pytest.raises(Stopped), open_logbook(config, config_path_of(config), 0):
        stopped = time.monotonic()
        raise Stopped
    assert time.monotonic() - stopped < 10
    assert capsys.readouterr().err == ""
    released.set()
    for thread in threading.enumerate():
        if thread.name == "MLflow sender":
            thread.join(30)


def test_a_tracker_that_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    config = write_run(tmp_path, "http://127.0.0.1:1", "tracking.further_trackers=[wandb]")
    with (
        pytest.raises(ConfigError, match="wandb is not installed"),
        open_logbook(config, config_path_of(config), 0),
    ):
        pass
