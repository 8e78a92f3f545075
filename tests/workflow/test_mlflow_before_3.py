"""A real tracking server of MLflow 2, from its own environment, takes results and traces."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient

from mcore_mas.tracking.mlflow_training import start_training_record
from mcore_mas.tracking.publish import publish
from mcore_mas.tracking.traces import TracedTrajectory, TraceSender
from rollout.base.files import write_text
from rollout.base.processes import free_port, start_group, stop_group
from tests.support.finished import STEPS, finished
from tests.support.played import TASK, trajectory, turn
from tests.support.tracked_run import config_path_of, write_run

SERVER = Path(__file__).resolve().parents[2] / ".venv-mlflow2/bin/mlflow"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SERVER.exists(), reason="`make test-mlflow` makes MLflow 2"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    stores = [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder),
    ]
    command = [
        str(SERVER),
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        *stores,
    ]
    uri, child = f"http://127.0.0.1:{port}", start_group(command, log=folder / "log")
    deadline = time.monotonic() + 120
    try:
        while True:
            try:
                said = urllib.request.urlopen(f"{uri}/version", timeout=5).read().decode()
                break
            except OSError:
                assert child.poll() is None and time.monotonic() < deadline, (
                    folder / "log"
                ).read_text()
                time.sleep(0.5)
        assert said.startswith("2.")
        yield uri
    finally:
        stop_group(child)


def test_finished_runs_are_there_once(server: str, tmp_path: Path) -> None:
    runs = {"duo": 1, "duo_s2": 2}
    for run, seed in runs.items():
        config = finished(tmp_path, run, seed).folder / "config.yaml"
        values = yaml.safe_load(config.read_text())
        values["tracking"]["uri"] = server
        config.write_text(yaml.safe_dump(values))
    write_text(tmp_path / "tables" / "pages.md", "| a |")
    said: list[str] = []
    link = publish(tmp_path, runs, ["pages"], said.append)
    assert link and link.startswith(f"{server}/#/compare-runs")
    assert publish(tmp_path, runs, ["pages"], said.append) == link
    assert said == []
    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name(values["tracking"]["experiment"]).experiment_id
    there = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert sorted(there) == [
        "duo",
        "duo evaluate trained",
        "duo train",
        "duo_s2 evaluate trained",
        "duo_s2 train",
        "pages",
    ]
    assert there["duo"].data.metrics == pytest.approx(
        {"trained/avg_at_4/all": 0.65}
    )  # of 0.6 and 0.7
    train = there["duo_s2 train"]
    assert train.data.metrics["cost/tokens"] == 20000
    points = client.get_metric_history(train.info.run_id, "reward/mean")
    assert [point.step for point in points] == list(range(1, STEPS + 1))
    assert points[-1].value == pytest.approx(0.78)  # 0.2 + 0.02 * 19 + 0.1 * 2
    assert Path(train.data.tags["trained.solver"]).parts[-3:] == ("duo_s2", "bootstrap", "model")
    assert train.data.tags["mlflow.parentRunId"] == there["duo"].info.run_id
    assert [file.path for file in client.list_artifacts(there["pages"].info.run_id)] == ["pages.md"]


def test_traces_are_taken(server: str, tmp_path: Path) -> None:
    config = write_run(tmp_path, server)
    warnings: list[str] = []
    record = start_training_record(config, config_path_of(config), 0)
    sender = TraceSender(config, record, warnings.append)
    played = trajectory(turn(0, "solver", started_s=1.7e9, took_s=1.0))
    sender.send([TracedTrajectory(trajectory=played, task=TASK, advantages={})] * 2)
    sender.close()
    sender.join(60)
    assert warnings == []
    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name("e")
    assert len(client.search_traces(locations=[experiment.experiment_id])) == 2
