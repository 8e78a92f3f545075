"""Results of runs in MLflow: a parent per experiment, trainings, scores, costs and tables, each there once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient

from mcore_mas.tracking import publish as publishing
from mcore_mas.tracking.publish import publish, publish_evaluation, publish_within_limit
from rollout.base.files import sha256, write_json, write_text
from rollout.base.ownership import owned
from rollout.records.files import tasks_digest, write_tasks, write_trajectories
from tests.support.finished import finished
from tests.support.played import TASK, trajectory, turn

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).resolve().parents[3]


def tracked(results: Path) -> tuple[MlflowClient, dict[str, Any]]:
    """The store's runs by suite, name and stage."""
    client = MlflowClient(tracking_uri=f"sqlite:///{results}/mlflow.db")
    runs = client.search_runs(
        [experiment.experiment_id for experiment in client.search_experiments()]
    )
    return client, {
        f"{r.data.tags['suite']}: {r.info.run_name}, {r.data.tags['stage']}": r for r in runs
    }


def test_runs_of_two_seeds_and_two_suites_have_their_parents(tmp_path: Path) -> None:
    said: list[str] = []
    for run, seed, suite in (("duo", 1, "one"), ("duo_s2", 2, "one"), ("other", 1, "two")):
        config = finished(tmp_path, run, seed, suite)
        assert config.tracking.uri == f"sqlite:///{tmp_path}/mlflow.db"
    write_text(tmp_path / "tables" / "one.md", "| a |")
    link = publish_within_limit(tmp_path, ["duo", "duo_s2", "other"], ["one"], said.append)
    client, runs = tracked(tmp_path)
    assert sorted(runs) == [
        "one: duo evaluate trained, evaluate", "one: duo train, train", "one: duo, experiment",
        "one: duo_s2 evaluate trained, evaluate", "one: duo_s2 train, train", "one: one, report",
        "two: duo, experiment", "two: other evaluate trained, evaluate", "two: other train, train",
    ]  # fmt: skip
    parents = {name: run.data.tags.get("mlflow.parentRunId") for name, run in runs.items()}
    one, two = runs["one: duo, experiment"].info.run_id, runs["two: duo, experiment"].info.run_id
    assert [name for name, parent in sorted(parents.items()) if parent == one] == sorted(runs)[
        :2
    ] + sorted(runs)[3:5]
    assert [name for name, parent in sorted(parents.items()) if parent == two] == sorted(runs)[7:]
    assert runs["one: duo, experiment"].data.metrics == pytest.approx(
        {"trained/avg_at_4/all": 0.65}
    )  # of 0.6 and 0.7
    assert runs["one: duo_s2 evaluate trained, evaluate"].data.metrics["avg_at_4/all"] == 0.7
    train = runs["one: duo_s2 train, train"]
    assert train.data.metrics["cost/gpu_hours"] == 20 * 60 * 2 / 3600
    assert train.data.metrics["cost/tokens"] == 20000
    assert (train.data.tags["seed"], train.data.tags["experiment"]) == ("2", "duo")
    assert (train.info.start_time, train.info.end_time) == (1.7e12, 1.7e12 + 19 * 60000)
    report = runs["one: one, report"].info.run_id
    assert [file.path for file in client.list_artifacts(report)] == ["one.md"]
    assert link and all(
        run.info.run_id in link for name, run in runs.items() if name.endswith(", train")
    )
    before = {
        name: (run.info.run_id, run.data.metrics, run.info.end_time) for name, run in runs.items()
    }
    assert publish(tmp_path, ["duo", "duo_s2", "other"], ["one"], said.append) == link
    _, runs = tracked(tmp_path)
    assert {
        name: (run.info.run_id, run.data.metrics, run.info.end_time) for name, run in runs.items()
    } == before
    points = client.get_metric_history(train.info.run_id, "reward/mean")
    assert [point.step for point in points] == list(range(1, 21))  # each once
    assert said == []


def test_two_processes_send_the_same_results_once(tmp_path: Path) -> None:
    finished(tmp_path, "duo", 1)
    command = [sys.executable, "-m", "mcore_mas", "track", str(tmp_path)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert len(output.splitlines()) == 1  # the address of a page
    client, runs = tracked(tmp_path)
    assert len(runs) == 3
    train = runs["pages: duo train, train"].info.run_id
    for name in ("reward/mean", "0_key/reward"):
        points = client.get_metric_history(train, name)
        assert [point.step for point in points] == list(range(1, 21))


def test_a_run_that_was_broken_off_is_sent_by_its_own_folder(tmp_path: Path) -> None:
    config = finished(tmp_path, "duo", 1)
    (config.folder / "train" / "done.json").unlink()
    command = [sys.executable, "-m", "mcore_mas", "track", str(config.folder)]
    subprocess.run(command, cwd=ROOT, timeout=120, check=True)
    client, runs = tracked(tmp_path)
    train = runs["pages: duo train, train"]
    assert train.info.status == "KILLED"
    assert "trained.solver" not in train.data.tags
    assert len(client.get_metric_history(train.info.run_id, "reward/mean")) == 20

    with owned(config.folder / "train"):  # it has resumed
        client.update_run(train.info.run_id, status="RUNNING")
        publish(tmp_path, ["duo"], [], pytest.fail)
        assert client.get_run(train.info.run_id).info.status == "RUNNING"


def of_two_sources(results: Path) -> Path:
    """The folder of a run of a paper's table, evaluated on two sources with the turns of an answer."""
    folder = finished(results, "duo", 1, "one").folder
    config, journal = folder / "config.yaml", folder / "train" / "metrics.jsonl"
    values = yaml.safe_load(config.read_text())
    values["tracking"]["tags"]["table"] = "drmas_1 marti_ttrl"
    write_text(config, yaml.safe_dump(values))
    for split in ("train", "validation", "test"):
        write_tasks(folder / "tasks" / f"{split}.parquet", [TASK])
    *rows, last = journal.read_text().splitlines()
    last = json.dumps(
        json.loads(last) | {"validation/gsm8k/accuracy": 0.5, "validation/math/accuracy": 0.25}
    )
    write_text(journal, "\n".join([*rows, last, ""]))
    scores = {
        (name, metric): n / 10
        for n, name in enumerate(("all", "gsm8k", "math"))
        for metric in ("avg@4", "pass@4")
    }
    rows = [
        {"dataset": name, "metric": metric, "value": value}
        for (name, metric), value in scores.items()
    ]
    made = {"commit": "0123456789", "slurm_job": "12", "machines": "n0"}
    head = {"k": 4, "replies": 8, "overlong": 0, "cut": 0, "failed": {}}
    write_json(
        folder / "logs" / "evaluate_trained.json",
        {"began": 1.7e9, "tags": made, "ended": 1.7e9 + 60},
    )
    write_json(folder / "evaluation" / "trained.json", {**head, "rows": rows})
    of_three = {"completion_ids": (1, 2, 3), "logprobs": (0.0,) * 3}
    answer = [
        turn(0, started_s=1.0, took_s=2.0, **of_three),
        turn(1, "verifier", started_s=4.0, took_s=0.5),
    ]
    write_trajectories(
        folder / "evaluation" / "trained" / "part_00000.parquet", [trajectory(*answer)]
    )
    write_text(results / "tables" / "one.csv", "a")
    write_text(results / "figures" / "one" / "charts.html", "<html>")
    return folder


def test_what_runs_are_found_and_compared_by_is_there(tmp_path: Path) -> None:
    said: list[str] = []
    folder = of_two_sources(tmp_path)
    assert publish(tmp_path, ["duo"], ["one"], said.append)
    client, runs = tracked(tmp_path)
    train, evaluation = (
        runs["one: duo train, train"].data,
        runs["one: duo evaluate trained, evaluate"].data,
    )
    digest = tasks_digest([TASK])
    for tags in (train.tags, evaluation.tags):
        assert (tags["table"], tags["config_sha256"]) == (
            "drmas_1 marti_ttrl",
            sha256(folder / "config.yaml"),
        )
    assert [train.tags[f"data.{split}"] for split in ("train", "validation")] == [digest] * 2
    assert evaluation.tags["data.test"] == digest
    assert [evaluation.tags[name] for name in ("commit", "slurm_job", "machines")] == [
        "0123456789",
        "12",
        "n0",
    ]
    assert train.metrics["validation/gsm8k/accuracy"] == 0.5
    assert train.metrics["validation/math/accuracy"] == 0.25
    scores = {
        f"{metric}_at_4/{name}": n / 10
        for n, name in enumerate(("all", "gsm8k", "math"))
        for metric in ("avg", "pass")
    }
    solver = {"agent/solver/calls": 1.0, "agent/solver/tokens": 3.0, "agent/solver/seconds": 2.0}
    verifier = {
        "agent/verifier/calls": 1.0,
        "agent/verifier/tokens": 1.0,
        "agent/verifier/seconds": 0.5,
    }
    counts = {
        "replies/replies": 8.0,
        "replies/overlong": 0.0,
        "replies/cut": 0.0,
        "replies/failed": 0.0,
    }
    answer = {"answer/tokens": 4.0, "answer/seconds": 3.5}
    assert evaluation.metrics == pytest.approx({**scores, **solver, **verifier, **counts, **answer})
    report = runs["one: one, report"].info.run_id
    assert sorted(file.path for file in client.list_artifacts(report)) == ["charts.html", "one.csv"]
    assert said == []


def test_stages_before_training_are_children_with_their_jobs_and_the_time_they_took(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    folder = of_two_sources(tmp_path)
    of_seed_2 = finished(tmp_path, "duo_s2", 2, "one").folder
    at = {"commit": "0123456789", "slurm_job": "7 9", "machines": "n0 n1"}
    for name in ("bootstrap", "build_index", "encode_shard_0001-of-0002"):
        write_json(
            folder / "logs" / f"{name}.json", {"began": 1.7e9, "tags": at, "ended": 1.7e9 + 90}
        )
    write_json(
        of_seed_2 / "logs" / "bootstrap.json", {"began": 1.7e9, "tags": at, "ended": 1.7e9 + 45}
    )
    write_json(
        of_seed_2 / "logs" / "build_index.json", {"began": 1.7e9, "tags": at}
    )  # it has not ended
    history = [{"step": step, "loss": 1 / step, "accuracy": 0.25 * step} for step in (1, 2)]
    write_json(folder / "bootstrap" / "bootstrap.json", {"model": "m", "history": history})
    write_json(
        folder / "index" / "index.json", {"dim": 384, "ntotal": 80, "corpus": "passages.jsonl"}
    )
    for _ in range(2):  # the second time all is there
        assert publish(tmp_path, ["duo", "duo_s2"], ["one"], said.append)
    client, runs = tracked(tmp_path)
    stages = {
        name: run
        for name, run in runs.items()
        if name.rpartition(" ")[2] not in ("train", "evaluate", "report")
    }
    parent = stages.pop("one: duo, experiment").info.run_id
    assert {
        name: (r.info.end_time - r.info.start_time) / 1000 for name, r in sorted(stages.items())
    } == {
        "one: duo bootstrap, bootstrap": 90,
        "one: duo build_index, build_index": 90,
        "one: duo encode_shard_0001-of-0002, encode_shard": 90,
        "one: duo_s2 bootstrap, bootstrap": 45,
    }
    assert {run.data.tags["mlflow.parentRunId"] for run in stages.values()} == {parent}
    tags = stages["one: duo bootstrap, bootstrap"].data.tags
    assert tags | at == tags  # commit, jobs, machines
    assert (tags["seed"], tags["table"], tags["suite"]) == ("1", "drmas_1 marti_ttrl", "one")
    assert (tags["config_sha256"], tags["data.test"]) == (
        sha256(folder / "config.yaml"),
        tasks_digest([TASK]),
    )
    start = stages["one: duo bootstrap, bootstrap"].info.run_id
    points = [(point.step, point.value) for point in client.get_metric_history(start, "loss")]
    assert points == [(1, 1.0), (2, 0.5)]
    assert stages["one: duo build_index, build_index"].data.metrics == {"dim": 384, "ntotal": 80}
    evaluation = runs["one: duo evaluate trained, evaluate"].info
    assert (evaluation.start_time, evaluation.status) == (1.7e12, "FINISHED")
    assert said == []


def test_an_evaluation_sends_its_scores_and_what_its_training_has_cost(tmp_path: Path) -> None:
    said: list[str] = []
    config = finished(tmp_path, "duo", 1)
    publish_evaluation(config.folder / "config.yaml", said.append)
    _, runs = tracked(tmp_path)
    train, evaluation = (
        runs["pages: duo train, train"],
        runs["pages: duo evaluate trained, evaluate"],
    )
    assert (train.data.metrics["cost/tokens"], evaluation.data.metrics["avg_at_4/all"]) == (
        20000,
        0.6,
    )
    assert runs["pages: duo, experiment"].data.metrics == {}  # of all seeds, which the report knows
    for policy, folder in config.models.items():
        assert train.data.tags[f"trained.{policy}"] == folder
    assert said == []


def test_neither_an_evaluation_nor_a_report_waits_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    config, let_go = finished(tmp_path, "duo", 1), threading.Event()
    monkeypatch.setattr(publishing, "SECONDS_PER_RUN", 0.1)
    monkeypatch.setattr(publishing, "publish", lambda *_, **__: let_go.wait(60))
    publish_evaluation(config.folder / "config.yaml", said.append)
    assert publish_within_limit(tmp_path, ["duo"], ["one"], said.append) is None
    let_go.set()
    assert (
        said
        == [f"MLflow does not answer; `mcore-mas track {tmp_path}` sends the results later"] * 2
    )


def test_a_run_of_another_version_is_told_of_and_passed_over(tmp_path: Path) -> None:
    said: list[str] = []
    finished(tmp_path, "duo", 1)
    write_text(tmp_path / "old" / "config.yaml", "run: old\nnonsense: 1\n")
    assert publish(tmp_path, ["old", "duo"], [], said.append) is not None
    assert len(said) == 1 and said[0].startswith("a run is not sent to MLflow: ConfigError: ")


def test_a_store_that_is_none_costs_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    finished(tmp_path, "duo", 1)
    (tmp_path / "mlflow.db").write_bytes(b"this is no database" * 1000)
    assert publish(tmp_path, ["duo"], [], said.append) is None
    assert len(said) == 1 and said[0].endswith(f"`mcore-mas track {tmp_path}` sends them later")
