"""Results of runs in MLflow: parents, trainings, scores, costs and tables, each once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.tracking import publish as publishing
from mcore_mas.tracking.publish import publish, publish_evaluation, publish_within_limit
from rollout.base.digests import sha256
from rollout.base.files import write_text
from rollout.base.json_files import write_json
from rollout.base.ownership import owned
from rollout.records.files import tasks_digest, write_tasks, write_trajectories
from tests.support.finished import finished
from tests.support.mlflow_database import write_database
from tests.support.played import TASK, trajectory, turn

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).resolve().parents[3]
PROCESS_TAGS = {"commit": "0123456789", "slurm_job": "7 9", "machines": "n0 n1"}
SOURCES = ("all", "gsm8k", "math")


@pytest.fixture(autouse=True)
def _database(tmp_path: Path) -> None:
    write_database(tmp_path / "mlflow.db")


def client_of(results: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{results}/mlflow.db")


def runs_of(results: Path) -> dict[str, Run]:
    """Return MLflow's runs by "SUITE: NAME"."""
    client = client_of(results)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    by_name = {f"{run.data.tags['suite']}: {run.info.run_name}": run for run in runs}
    assert len(by_name) == len(runs)
    return by_name


def track(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mcore_mas", "track", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_runs_of_two_seeds_and_two_suites_have_their_parents(tmp_path: Path) -> None:
    finished(tmp_path, "duo", 1, "one")
    finished(tmp_path, "duo_s2", 2, "one")
    finished(tmp_path, "other", 1, "two")
    write_text(tmp_path / "tables" / "one.md", "| a |")
    names = ["duo", "duo_s2", "other"]
    link = publish_within_limit(tmp_path, names, ["one"], pytest.fail)

    runs = runs_of(tmp_path)
    parents = {
        name: run.data.tags["mlflow.parentRunId"]
        for name, run in runs.items()
        if "mlflow.parentRunId" in run.data.tags
    }
    first, second = runs["one: duo"].info.run_id, runs["two: duo"].info.run_id
    assert parents == {
        "one: duo train": first,
        "one: duo evaluate trained": first,
        "one: duo_s2 train": first,
        "one: duo_s2 evaluate trained": first,
        "two: other train": second,
        "two: other evaluate trained": second,
    }
    assert runs.keys() == {*parents, "one: duo", "two: duo", "one: one"}

    mean = (0.6 + 0.7) / 2
    assert runs["one: duo"].data.metrics == pytest.approx({"trained/avg_at_4/all": mean})
    assert runs["one: duo_s2 evaluate trained"].data.metrics["avg_at_4/all"] == 0.7
    training = runs["one: duo_s2 train"]
    assert training.data.metrics["cost/gpu_hours"] == 20 * 60 * 2 / 3600
    assert training.data.metrics["cost/tokens"] == 20000
    assert (training.data.tags["seed"], training.data.tags["experiment"]) == ("2", "duo")
    assert (training.info.start_time, training.info.end_time) == (1.7e12, 1.7e12 + 19 * 60000)
    artifacts = client_of(tmp_path).list_artifacts(runs["one: one"].info.run_id)
    assert [artifact.path for artifact in artifacts] == ["one.md"]
    for name in ("one: duo train", "one: duo_s2 train", "two: other train"):
        assert runs[name].info.run_id in str(link)

    assert publish(tmp_path, names, ["one"], pytest.fail) == link
    for name, run in runs_of(tmp_path).items():
        assert run.info.run_id == runs[name].info.run_id
        assert run.data.metrics == runs[name].data.metrics
        assert run.info.end_time == runs[name].info.end_time
    points = client_of(tmp_path).get_metric_history(training.info.run_id, "reward/mean")
    assert [point.step for point in points] == list(range(1, 21))


@pytest.mark.slow
def test_two_processes_send_the_same_results_once(tmp_path: Path) -> None:
    finished(tmp_path, "duo", 1)
    processes = [track(tmp_path) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        (line,) = output.splitlines()  # the address of a page, and the command that serves it
        command = f"mcore-mas ui --store sqlite:///{tmp_path}/mlflow.db"
        assert line.endswith(f"  (`{command}` starts its server)")
    runs = runs_of(tmp_path)
    assert runs.keys() == {"pages: duo", "pages: duo train", "pages: duo evaluate trained"}
    run_id = runs["pages: duo train"].info.run_id
    for name in ("reward/mean", "achieved/reward"):
        points = client_of(tmp_path).get_metric_history(run_id, name)
        assert [point.step for point in points] == list(range(1, 21))


@pytest.mark.slow
def test_a_run_that_was_broken_off_is_sent_by_its_own_folder(tmp_path: Path) -> None:
    config = finished(tmp_path, "duo", 1)
    (config.folder / "train" / "done.json").unlink()
    assert track(config.folder).wait(120) == 0
    client = client_of(tmp_path)
    training = runs_of(tmp_path)["pages: duo train"]
    run_id = training.info.run_id
    assert training.info.status == "KILLED"
    assert "trained.solver" not in training.data.tags
    assert len(client.get_metric_history(run_id, "reward/mean")) == 20

    with owned(config.folder / "train"):  # by a training that has resumed
        client.update_run(run_id, status="RUNNING")
        publish(tmp_path, ["duo"], [], pytest.fail)
        assert client.get_run(run_id).info.status == "RUNNING"


def write_run_of_table(results: Path) -> Path:
    """Write a run of a paper's table that was evaluated on two data sources; return its folder."""
    folder = finished(results, "duo", 1, "one").folder
    config_path = folder / "config.yaml"
    values = yaml.safe_load(config_path.read_text())
    values["tracking"]["tags"]["table"] = "drmas_1 marti_ttrl"
    write_text(config_path, yaml.safe_dump(values))
    for split in ("train", "validation", "test"):
        write_tasks(folder / "tasks" / f"{split}.parquet", [TASK])

    metrics_path = folder / "train" / "metrics.jsonl"
    *lines, last_line = metrics_path.read_text().splitlines()
    last_row = json.loads(last_line) | {
        "validation/gsm8k/accuracy": 0.5,
        "validation/math/accuracy": 0.25,
    }
    write_text(metrics_path, "\n".join([*lines, json.dumps(last_row), ""]))

    rows = [
        {"dataset": source, "metric": metric, "value": number / 10}
        for number, source in enumerate(SOURCES)
        for metric in ("avg@4", "pass@4")
    ]
    counts = {"k": 4, "replies": 8, "overlong": 0, "cut": 0, "failed": {}}
    write_json(folder / "evaluation" / "trained.json", {**counts, "rows": rows})
    write_json(
        folder / "logs" / "evaluate_trained.json",
        {"began": 1.7e9, "ended": 1.7e9 + 60, "tags": PROCESS_TAGS},
    )
    answer = trajectory(
        turn(0, started_s=1.0, took_s=2.0, completion_ids=(1, 2, 3), logprobs=(0.0,) * 3),
        turn(1, "verifier", started_s=4.0, took_s=0.5),
    )
    write_trajectories(folder / "evaluation" / "trained" / "part_00000.parquet", [answer])
    write_text(results / "tables" / "one.csv", "a")
    write_text(results / "figures" / "one" / "charts.html", "<html>")
    return folder


def test_runs_have_tags_scores_and_costs_to_compare_them_by(tmp_path: Path) -> None:
    folder = write_run_of_table(tmp_path)
    assert publish(tmp_path, ["duo"], ["one"], pytest.fail)
    runs = runs_of(tmp_path)
    training = runs["one: duo train"].data
    evaluation = runs["one: duo evaluate trained"].data
    digest = tasks_digest([TASK])
    for tags in (training.tags, evaluation.tags):
        assert tags["table"] == "drmas_1 marti_ttrl"
        assert tags["config_sha256"] == sha256(folder / "config.yaml")
    assert training.tags["data.train"] == training.tags["data.validation"] == digest
    assert evaluation.tags["data.test"] == digest
    assert evaluation.tags.items() >= PROCESS_TAGS.items()
    assert training.metrics["validation/gsm8k/accuracy"] == 0.5
    assert training.metrics["validation/math/accuracy"] == 0.25

    expected = {
        "agent/solver/calls": 1.0,
        "agent/solver/tokens": 3.0,
        "agent/solver/seconds": 2.0,
        "agent/verifier/calls": 1.0,
        "agent/verifier/tokens": 1.0,
        "agent/verifier/seconds": 0.5,
        "answer/tokens": 4.0,
        "answer/seconds": 3.5,
        "replies/replies": 8.0,
        "replies/overlong": 0.0,
        "replies/cut": 0.0,
        "replies/failed": 0.0,
    }
    for number, source in enumerate(SOURCES):
        expected[f"avg_at_4/{source}"] = number / 10
        expected[f"pass_at_4/{source}"] = number / 10
    assert evaluation.metrics == pytest.approx(expected)
    artifacts = client_of(tmp_path).list_artifacts(runs["one: one"].info.run_id)
    assert sorted(artifact.path for artifact in artifacts) == ["charts.html", "one.csv"]


@pytest.mark.slow
def test_stages_before_the_training_have_their_times_and_measurements(tmp_path: Path) -> None:
    folder = write_run_of_table(tmp_path)
    second = finished(tmp_path, "duo_s2", 2, "one").folder
    record = {"began": 1.7e9, "tags": PROCESS_TAGS}
    for stage in ("bootstrap", "build_index", "encode_shard_0001-of-0002"):
        write_json(folder / "logs" / f"{stage}.json", {**record, "ended": 1.7e9 + 90})
    write_json(second / "logs" / "bootstrap.json", {**record, "ended": 1.7e9 + 45})
    write_json(second / "logs" / "build_index.json", record)  # it has not ended
    history = [{"step": step, "loss": 1 / step, "accuracy": 0.25 * step} for step in (1, 2)]
    write_json(folder / "bootstrap" / "bootstrap.json", {"model": "m", "history": history})
    write_json(
        folder / "index" / "index.json", {"dim": 384, "ntotal": 80, "corpus": "passages.jsonl"}
    )
    for _ in range(2):
        assert publish(tmp_path, ["duo", "duo_s2"], ["one"], pytest.fail)

    runs = runs_of(tmp_path)
    other_stages = ("train", "evaluate", "report", "experiment")
    stages = {name: run for name, run in runs.items() if run.data.tags["stage"] not in other_stages}
    seconds = {
        name: (run.info.end_time - run.info.start_time) / 1000 for name, run in stages.items()
    }
    assert seconds == {
        "one: duo bootstrap": 90,
        "one: duo build_index": 90,
        "one: duo encode_shard_0001-of-0002": 90,
        "one: duo_s2 bootstrap": 45,
    }
    parent = runs["one: duo"].info.run_id
    assert {run.data.tags["mlflow.parentRunId"] for run in stages.values()} == {parent}
    assert stages["one: duo encode_shard_0001-of-0002"].data.tags["stage"] == "encode_shard"

    bootstrap = stages["one: duo bootstrap"]
    assert bootstrap.data.tags.items() >= PROCESS_TAGS.items()
    assert bootstrap.data.tags["table"] == "drmas_1 marti_ttrl"
    assert bootstrap.data.tags["data.test"] == tasks_digest([TASK])
    points = client_of(tmp_path).get_metric_history(bootstrap.info.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [(1, 1.0), (2, 0.5)]
    assert stages["one: duo build_index"].data.metrics == {"dim": 384, "ntotal": 80}


def test_an_evaluation_sends_its_scores_and_its_training(tmp_path: Path) -> None:
    config = finished(tmp_path, "duo", 1)
    publish_evaluation(config.folder / "config.yaml", pytest.fail)
    runs = runs_of(tmp_path)
    training = runs["pages: duo train"].data
    assert training.metrics["cost/tokens"] == 20000
    for policy, folder in config.models.items():
        assert training.tags[f"trained.{policy}"] == folder
    assert runs["pages: duo evaluate trained"].data.metrics["avg_at_4/all"] == 0.6
    assert runs["pages: duo"].data.metrics == {}  # the means are over all seeds


def test_one_tracked_run_is_not_the_mean_over_its_seeds(tmp_path: Path) -> None:
    finished(tmp_path, "duo", 1)
    finished(tmp_path, "duo_s2", 2)
    result = CliRunner().invoke(app, ["track", str(tmp_path / "duo_s2")])
    assert result.exit_code == 0, result.output
    runs = runs_of(tmp_path)
    assert runs["pages: duo_s2 evaluate trained"].data.metrics["avg_at_4/all"] == 0.7
    assert runs["pages: duo"].data.metrics == {}


def test_a_job_does_not_wait_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = finished(tmp_path, "duo", 1)
    released = threading.Event()
    monkeypatch.setattr(publishing, "SECONDS_PER_RUN", 0.1)
    monkeypatch.setattr(publishing, "publish", lambda *_, **__: released.wait(60))
    warnings: list[str] = []
    publish_evaluation(config.folder / "config.yaml", warnings.append)
    assert publish_within_limit(tmp_path, ["duo"], ["one"], warnings.append) is None
    released.set()
    warning = f"MLflow does not answer; `mcore-mas track {tmp_path}` sends the results later"
    assert warnings == [warning, warning]


def test_a_run_of_another_version_is_skipped_with_a_warning(tmp_path: Path) -> None:
    finished(tmp_path, "duo", 1)
    write_text(tmp_path / "old" / "config.yaml", "run: old\nnonsense: 1\n")
    warnings: list[str] = []
    assert publish(tmp_path, ["old", "duo"], [], warnings.append) is not None
    assert len(warnings) == 1
    assert warnings[0].startswith("a run is not sent to MLflow: ConfigError: ")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("train/metrics.jsonl", '{"a": 1}\n'),
        ("train/done.json", "{"),
        ("evaluation/trained.json", '{"rows": [1]}'),
        ("logs/build_index.json", "["),
    ],
)
def test_a_damaged_run_is_one_warning_and_the_others_are_sent(
    tmp_path: Path, file: str, content: str
) -> None:
    write_text(finished(tmp_path, "broken", 1).folder / file, content)
    finished(tmp_path, "duo", 1)
    warnings: list[str] = []
    publish(tmp_path, ["broken", "duo"], [], warnings.append)
    (warning,) = warnings
    assert warning.startswith("run broken is not sent to MLflow completely: ")
    assert "pages: duo evaluate trained" in runs_of(tmp_path)


def test_a_damaged_store_costs_one_line(tmp_path: Path) -> None:
    finished(tmp_path, "duo", 1)
    (tmp_path / "mlflow.db").write_bytes(b"this is no database" * 1000)
    warnings: list[str] = []
    assert publish(tmp_path, ["duo"], [], warnings.append) is None
    assert len(warnings) == 1
    assert warnings[0].endswith(f"`mcore-mas track {tmp_path}` sends them later")
