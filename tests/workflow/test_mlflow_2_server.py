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
from rollout.base.network import free_port
from rollout.base.processes import start_group, stop_group
from tests.support.finished import STEPS, finished
from tests.support.played import TASK, trajectory, turn
from tests.support.tracked_run import config_path_of, write_run

MLFLOW = Path(__file__).resolve().parents[2] / ".venv-mlflow2/bin/mlflow"
SEEDS = {"duo": 1, "duo_s2": 2}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MLFLOW.exists(), reason="`make test-mlflow` installs MLflow 2"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server of MLflow 2 on an empty store."""
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    command = [
        f"{MLFLOW}",
        "server",
        "--host=127.0.0.1",
        f"--port={port}",
        "--workers=1",
        f"--backend-store-uri=sqlite:///{folder}/mlflow.db",
        f"--artifacts-destination={folder}",
    ]
    process = start_group(command, log=folder / "log")
    deadline = time.monotonic() + 120
    try:
        version = ""
        while not version:
            try:
                version = urllib.request.urlopen(f"{uri}/version", timeout=5).read().decode()
            except OSError:
                log = (folder / "log").read_text()
                assert process.poll() is None and time.monotonic() < deadline, log
                time.sleep(0.5)
        assert version.startswith("2.")
        yield uri
    finally:
        stop_group(process)


def write_finished_run(results: Path, run: str, uri: str) -> str:
    """Write a finished run that is tracked in a server; return the name of its experiment."""
    path = finished(results, run, SEEDS[run]).folder / "config.yaml"
    values = yaml.safe_load(path.read_text())
    values["tracking"]["uri"] = uri
    path.write_text(yaml.safe_dump(values))
    return str(values["tracking"]["experiment"])


def test_finished_runs_are_there_once(server: str, tmp_path: Path) -> None:
    (experiment_name,) = {write_finished_run(tmp_path, run, server) for run in SEEDS}
    write_text(tmp_path / "tables" / "pages.md", "| a |")
    link = publish(tmp_path, SEEDS, ["pages"], pytest.fail)
    assert str(link).startswith(f"{server}/#/compare-runs")
    assert publish(tmp_path, SEEDS, ["pages"], pytest.fail) == link

    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name(experiment_name)
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == [
        "duo",
        "duo evaluate trained",
        "duo train",
        "duo_s2 evaluate trained",
        "duo_s2 train",
        "pages",
    ]
    mean = (0.6 + 0.7) / 2
    assert runs["duo"].data.metrics == pytest.approx({"trained/avg_at_4/all": mean})
    training = runs["duo_s2 train"]
    assert training.data.metrics["cost/tokens"] == 20000
    points = client.get_metric_history(training.info.run_id, "reward/mean")
    assert [point.step for point in points] == list(range(1, STEPS + 1))
    assert points[-1].value == pytest.approx(0.2 + 0.02 * 19 + 0.1 * 2)
    model = Path(training.data.tags["trained.solver"])
    assert model.parts[-3:] == ("duo_s2", "bootstrap", "model")
    assert training.data.tags["mlflow.parentRunId"] == runs["duo"].info.run_id
    artifacts = client.list_artifacts(runs["pages"].info.run_id)
    assert [artifact.path for artifact in artifacts] == ["pages.md"]


def test_traces_are_taken(server: str, tmp_path: Path) -> None:
    config = write_run(tmp_path, server)
    record = start_training_record(config, config_path_of(config), 0)
    sender = TraceSender(config, record, pytest.fail)
    played = trajectory(turn(0, "solver", started_s=1.7e9, took_s=1.0))
    sender.send([TracedTrajectory(trajectory=played, task=TASK, advantages={})] * 2)
    sender.close()
    sender.join(60)
    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    assert len(client.search_traces(locations=[experiment.experiment_id])) == 2
