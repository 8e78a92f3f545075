"""MLflow's store: its database, its experiment, and runs that are found by key."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.runtime.migration import HeadMaintainer
from mlflow.tracking import MlflowClient
from requests.utils import get_environ_proxies

from mcore_mas.tracking.mlflow_store import (
    MetricPoint,
    MlflowStore,
    metric_name,
    run_key,
    set_mlflow_variables,
)
from tests.support.mlflow_database import write_database

KILLED_IN_THE_FIRST_MIGRATION = """
import os, sys
from pathlib import Path
from alembic.runtime.migration import HeadMaintainer
from mcore_mas.tracking.mlflow_store import MlflowStore
HeadMaintainer.update_to_step = lambda *_: os._exit(9)
MlflowStore(sys.argv[1], "e", Path("."))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_makes_the_database_leaves_none(tmp_path: Path) -> None:
    """MLflow cannot open a file with a part of its tables."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-c", KILLED_IN_THE_FIRST_MIGRATION, uri]
    assert subprocess.run(command, check=False).returncode == 9
    assert not (tmp_path / "mlflow.db").exists()
    MlflowStore(uri, "e", tmp_path).find_or_create_run("k", name="n", tags={})
    assert (tmp_path / "mlflow.db").is_file()
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.slow
def test_a_database_that_could_not_be_made_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with monkeypatch.context() as patch:
        patch.setattr(HeadMaintainer, "update_to_step", fail)
        with pytest.raises(Exception, match="disk is full"):
            MlflowStore(uri, "e", tmp_path)
    store = MlflowStore(uri, "e", tmp_path)
    assert store.find_or_create_run("k", name="n", tags={}).info.run_id
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.slow
def test_runs_of_one_key_are_one_run(tmp_path: Path) -> None:
    uri = write_database(tmp_path / "mlflow.db")
    first = MlflowStore(uri, "e", tmp_path)
    second = MlflowStore(uri, "e", tmp_path)
    created = first.find_or_create_run("k", name="n", tags={"a": "1"}, start_time=1e9)
    same_run = second.find_or_create_run("k", name="n", tags={"a": "2"}, parent="p")
    other = second.find_or_create_run("l", name="n", tags={})
    run_id = created.info.run_id
    assert same_run.info.run_id == run_id
    assert other.info.run_id != run_id
    tags = first.client.get_run(run_id).data.tags
    assert (tags["a"], tags["mlflow.parentRunId"]) == ("2", "p")
    assert same_run.info.start_time == 1e12

    point = MetricPoint(name="avg@4", value=0.5, time=1e9, step=3)
    for store in (first, second):
        store.log_metrics(run_id, [point])
    (written,) = first.client.get_metric_history(run_id, "avg_at_4")
    assert (written.value, written.timestamp, written.step) == (0.5, 1e12, 3)

    first.client.delete_run(run_id)
    assert first.find_or_create_run("k", name="n", tags={}).info.run_id != run_id


def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(tmp_path: Path) -> None:
    uri = write_database(tmp_path / "mlflow.db")
    experiment = MlflowStore(uri, "e", tmp_path).experiment_id
    MlflowClient(tracking_uri=uri).delete_experiment(experiment)
    with pytest.raises(LookupError, match=f"mlflow experiments restore -x {experiment}"):
        MlflowStore(uri, "e", tmp_path)


def test_a_server_on_this_machine_is_reached_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("NO_PROXY", "")
    set_mlflow_variables()
    assert os.environ["NO_PROXY"] == "*"
    monkeypatch.setenv("no_proxy", "example.org")
    set_mlflow_variables()
    assert get_environ_proxies("http://127.0.0.1:1/api") == {}
    assert "http" in get_environ_proxies("http://elsewhere:5000/api")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("avg@4/gsm8k", "avg_at_4/gsm8k"),
        ("agent/a,b/calls", "agent/a_b/calls"),
        ("/x/../y", "y"),
        ("x" * 300, "x" * 250),
    ],
)
def test_a_metric_name_has_the_characters_that_mlflow_allows(name: str, expected: str) -> None:
    assert metric_name(name) == expected


def test_a_key_depends_on_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_key(Path("a"), "b") == run_key(tmp_path / "a", "b")
    assert len({run_key("a", "b"), run_key("ab"), run_key("b", "a")}) == 3
