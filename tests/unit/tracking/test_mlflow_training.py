"""The MLflow run of a training: one run, and each step once, over restarts and failing stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from mcore_mas.tracking.mlflow_training import load_training_record, start_training_record
from rollout.base.digests import sha256
from tests.support.mlflow_database import write_database
from tests.support.mlflow_server import STEPS, Server, assert_sent_once
from tests.support.tracked_run import config_path_of, open_writer, step_row, write_run


def history(uri: str, run_id: str) -> list[tuple[int, float]]:
    points = MlflowClient(tracking_uri=uri).get_metric_history(run_id, "x")
    return [(point.step, point.value) for point in points]


def test_a_training_that_resumes_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = write_database(tmp_path / "mlflow.db")
    config = write_run(tmp_path, uri, "+tracking.tags.suite=s")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first = open_writer(config)
    first.write([step_row(step) for step in (-1, 0, 1, 2)])
    first.close("KILLED")
    client = MlflowClient(tracking_uri=uri)
    assert client.get_run(first.run_id).info.status == "KILLED"

    monkeypatch.setenv("SLURM_JOB_ID", "78")
    second = open_writer(config, first_step=2)
    second.resume()
    assert client.get_run(first.run_id).info.status == "RUNNING"
    second.write([step_row(step) for step in (-1, 0, 1)])
    taken_again = step_row(2) | {"x": 9.0, "reward/mean": 0.5}
    second.write([taken_again, step_row(3)])
    second.close("FINISHED")

    run = client.get_run(second.run_id)
    assert second.run_id == first.run_id
    assert (run.info.status, run.info.end_time) == ("FINISHED", 1e12 + 3000)
    assert run.info.run_name == "r train"
    tags = run.data.tags
    assert (tags["seed"], tags["stage"], tags["suite"]) == ("1", "train", "s")
    assert tags["slurm_job"] == "77 78"
    assert tags["model.solver"] == config.models["solver"]
    assert run.data.params["trainer.steps"] == str(config.trainer.steps)
    assert history(uri, run.info.run_id) == [(0, -1), (1, 0), (2, 1), (3, 2), (4, 3)]


def test_key_metrics_come_first(tmp_path: Path) -> None:
    uri = write_database(tmp_path / "mlflow.db")
    writer = open_writer(write_run(tmp_path, uri))
    values = {"reward/mean": 0.5, "validation/accuracy": 0.25}
    writer.write([step_row(0) | values | {"never": 0.0}])
    metrics = MlflowClient(tracking_uri=uri).get_run(writer.run_id).data.metrics
    first = {"achieved/reward": 0.5, "achieved/accuracy": 0.25}
    assert metrics == {"x": 0.0, **values, **first, "never": 0.0}
    groups = sorted(
        {name.rpartition("/")[0] for name in [*metrics, "agent/solver/kl"] if "/" in name}
    )
    assert groups[0] == "achieved"
    assert max(map(len, first)) <= 20  # a longer title is cut off in a narrow chart


def test_a_training_that_starts_over_keeps_its_key_unless_its_config_changed(
    tmp_path: Path,
) -> None:
    config = write_run(tmp_path, "http://127.0.0.1:1")
    path = config_path_of(config)
    record = start_training_record(config, path, 0)
    assert start_training_record(config, path, 0).key == record.key
    assert load_training_record(config, path, [step_row(0)]) == record
    write_run(tmp_path, "http://127.0.0.1:1", "seed=2")
    assert start_training_record(config, path, 3).key == record.key
    changed = write_run(tmp_path, "http://127.0.0.1:1", "seed=3")
    started_over = start_training_record(changed, path, 0)
    assert started_over.key != record.key
    assert started_over.tags["config_sha256"] == sha256(path)


@pytest.mark.parametrize("content", [None, '{"run": "abc", "sent": 3, "tags": {}}'])
def test_a_training_without_a_record_starts_at_its_first_step(
    tmp_path: Path, content: str | None
) -> None:
    """The second content is of version 0.1.0."""
    config = write_run(tmp_path, "http://127.0.0.1:1")
    record_path = config.folder / "train" / "mlflow.json"
    if content:
        record_path.write_text(content)
    record = load_training_record(config, config_path_of(config), [step_row(0), step_row(1)])
    assert record.start_time == 1e9
    assert "commit" not in record.tags
    assert json.loads(record_path.read_text())["key"] == record.key


def test_a_store_that_was_removed_is_filled_again(tmp_path: Path) -> None:
    config = write_run(tmp_path, write_database(tmp_path / "one.db"))
    rows = [step_row(step) for step in range(3)]
    open_writer(config).write(rows)
    other_uri = write_database(tmp_path / "other.db")
    write_run(tmp_path, other_uri)
    moved = config.model_copy(
        update={"tracking": config.tracking.model_copy(update={"uri": other_uri})}
    )
    writer = open_writer(moved, first_step=3)
    writer.write([*rows, step_row(3)])
    assert history(other_uri, writer.run_id) == [(1, 0), (2, 1), (3, 2), (4, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("fail", ["500", "late", "hang"])
def test_rows_that_a_failing_server_did_not_confirm_are_there_once(
    tmp_path: Path, mlflow_server: Server, fail: str
) -> None:
    mlflow_server.start()
    config = write_run(tmp_path, mlflow_server.uri)
    rows = [step_row(step) for step in STEPS]

    mlflow_server.fail = fail
    with pytest.raises(Exception, match=r"500|timed out|INTERNAL"):
        open_writer(config)
    mlflow_server.fail = ""
    writer = open_writer(config)

    for start in (0, 3):
        mlflow_server.fail = fail
        with pytest.raises(Exception, match=r"500|timed out|INTERNAL"):
            writer.write(rows[start : start + 3])
        mlflow_server.fail = ""
        writer.write(rows[start : start + 3])

    resumed = open_writer(config, first_step=2)
    resumed.write(rows)
    resumed.close("FINISHED")
    assert resumed.run_id == writer.run_id
    assert_sent_once(mlflow_server.uri, writer.run_id)


@pytest.mark.slow
def test_two_processes_that_send_the_same_rows_add_each_once(
    tmp_path: Path, mlflow_server: Server
) -> None:
    mlflow_server.start()
    config = write_run(tmp_path, mlflow_server.uri)
    first = open_writer(config)
    second = open_writer(config)
    for writer in (first, second):
        writer.write([step_row(step) for step in STEPS])
    assert_sent_once(mlflow_server.uri, first.run_id)
