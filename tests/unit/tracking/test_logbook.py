"""What a run writes down of its steps, over restarts."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from mlflow.tracking import MlflowClient

from mcore_mas import code_commit
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.joblog import Stopped
from mcore_mas.tracking import logbook
from mcore_mas.tracking.logbook import Journal, Logbook, open_logbook
from rollout.records.files import tasks_digest, write_tasks
from rollout.records.trajectory import Group, Task
from tests.support.played import TASK, trajectory, turn


def steps(path: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["x"]) for row in map(json.loads, path.read_text().splitlines())]


def test_a_row_of_an_owner_that_had_lost_the_folder_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, epoch in enumerate((5, 5, 9, 5, 9)):
        monkeypatch.setattr(logbook, "epoch_of", lambda _, own=epoch: own)
        Journal(path, step).log(step, {"x": 1.0})
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["epoch"]) for row in kept] == [(0, 5), (1, 5), (2, 9), (4, 9)]


def test_every_step_has_one_row_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, 0)
    for step in (-1, 0, 1, 2):
        journal.log(step, {"x": step})
    with path.open("a") as file:
        file.write('{"step": 3, "x"')  # killed
    journal = Journal(path, 2)  # from the checkpoint after two steps
    journal.log(1, {"x": 9.0})  # whose validation is made up a second time
    journal.log(2, {"x": 5.0})
    assert steps(path) == [(-1, -1), (0, 0), (1, 1), (2, 5.0)]


def test_games_are_drawn_beside_their_traces() -> None:
    sent: dict[str, str | None] = {}

    class Traces:
        def send(self, trajectories: Any, advantages: Any, draw: Any) -> None:
            sent.update({trajectory.id: draw(trajectory) for trajectory in trajectories})

    there: Any = SimpleNamespace(note=print, run_id="r")
    book = Logbook(there, there, there, Traces(), 2, [there])  # type: ignore[arg-type]
    path = Task(
        id="p",
        prompt="S 1 1 G 1 3\nS . G",
        answers=("R R",),
        env="plan_path",
        source="s",
        split="train",
    )
    walked = trajectory(
        turn(0, text="#### R"), turn(1, text="#### R", round=1), id="0/p/0", task_id="p"
    )
    book.trace(
        [Group(task=path, trajectories=(walked,)), Group(task=TASK, trajectories=(trajectory(),))],
        [],
    )
    assert sent["0/t/0"] is None  # mathematics
    drawn = ElementTree.fromstring(sent["0/p/0"] or "")
    walker = [shape.get("x") for shape in drawn if shape.text == "S"]
    # three boards of three squares of 24 pixels, 16 apart: in the first square of the first, one further in each
    assert walker == [str(16 + 12), str(16 + 72 + 16 + 24 + 12), str(16 + 2 * (72 + 16) + 48 + 12)]


def test_a_runs_steps_traces_and_end_come_to_mlflow_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    results = [f"results={tmp_path}", f"tracking.uri={uri}", "trainer.steps=3"]
    config = RunConfig.check(resolve(["experiment=demo_math", "run=r", *results]), "test")
    path = tmp_path / "config.yaml"
    path.write_text("run: r\n")
    (config.folder / "train").mkdir(parents=True)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    write_tasks(config.folder / "tasks" / "train.parquet", [TASK])
    with pytest.raises(Stopped), open_logbook(config, path, 0, None) as book:
        for step in (-1, 0, 1):
            book.report(step, {"reward/mean": step / 2})
        book.trace([Group(task=TASK, trajectories=(trajectory(turn(0)),))], [])
        raise Stopped
    client = MlflowClient(tracking_uri=uri)
    first = book.tracking_run
    assert client.get_run(str(first)).info.status == "KILLED"
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    with open_logbook(config, path, 1, first) as book:  # from the checkpoint after one step
        for step in (1, 2):
            book.report(step, {"reward/mean": step / 2})
    assert book.tracking_run == first
    run = client.get_run(str(first))
    assert (run.info.status, run.data.params["run"]) == ("FINISHED", "r")
    tags = run.data.tags
    assert (tags["seed"], tags["stage"], tags["slurm_job"]) == ("1", "train", "77 78")
    assert tags["machines"] == f"{platform.node()} n[0-1]"
    assert tags["model.solver"] == config.models["solver"]
    assert tags["commit"] == code_commit()
    (given,) = (entry.dataset for entry in run.inputs.dataset_inputs)
    assert (given.name, given.digest) == ("r/train", tasks_digest([TASK])[:36])
    assert json.loads(given.source) == {
        "uri": str((config.folder / "tasks" / "train.parquet").absolute())
    }
    points = {(m.step, m.value) for m in client.get_metric_history(str(first), "reward/mean")}
    assert points == {(0, -0.5), (1, 0.0), (2, 0.5), (3, 1.0)}
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    assert experiment is not None
    assert len(client.search_traces(locations=[experiment.experiment_id], run_id=str(first))) == 1


def test_what_is_left_is_reckoned_without_the_start_of_engines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 75.0, 77.0, 79.0])  # made; told of the first validation, a step, and another
    monkeypatch.setattr(logbook.time, "monotonic", lambda: next(now))
    reporter = logbook.Reporter("r train", 30)
    for done in (0, 1, 2):
        reporter.step(done, {})
    said = capsys.readouterr().err.split()
    assert [word for word in said if ":" in word and "train" not in word] == ["0:58", "0:56"]
