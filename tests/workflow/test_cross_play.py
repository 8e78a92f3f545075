"""Evaluations with other models in some seats, through the real rules: the planned jobs, and the models that play."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from rollout.records.files import read_trajectories
from tests.support.run_folder import describe_model, make_run
from tests.workflow.test_dag import planned_jobs, snakemake

pytestmark = pytest.mark.usefixtures("forked_programs")

# Evaluations of the run `mas`: the model of each seat that differs
CELLS = {
    "swapped": {"solver": "mas/verifier", "verifier": "mas/solver"},
    "from_alone": {"solver": "alone", "verifier": "alone/solver"},
    "without_verifier": {"verifier": "base"},
}


def suite_of(*overrides: str) -> dict[str, Any]:
    runs = {
        name: ["experiment=demo_math", "cold_start=null", *overrides] for name in ("mas", "alone")
    }
    return {"suite": "s", "results": "results", "experiments": runs, "evaluate": {"mas": CELLS}}


def test_an_evaluation_with_other_models_trains_their_runs_and_is_in_the_table(
    tmp_path: Path,
) -> None:
    suite = suite_of()
    for run in ("mas", "alone"):
        describe_model(tmp_path / f"results/{run}/bootstrap/model")
    jobs = planned_jobs(tmp_path, suite, target="results/tables/s.csv")
    assert jobs["evaluate"] == 2 * 2 + 3  # two states of two runs, and three cells
    jobs = planned_jobs(tmp_path, suite, target="results/mas/evaluation/from_alone.json")
    assert jobs == {"prepare_tasks": 1, "share_tasks": 1, "train": 1, "evaluate": 1}


@pytest.mark.slow
def test_each_agent_plays_the_model_of_its_seat(tmp_path: Path) -> None:
    base = make_run(tmp_path, "data.test=2") / "base"
    small = ["data.train=16", "data.validation=2", "data.test=2", "evaluation.samples=2"]
    models = [f"policies.{policy}.model={base}" for policy in ("solver", "verifier")]
    suite = suite_of(*small, *models)
    suite["evaluate"]["mas"] = {"mixed": {"solver": "alone/verifier", "verifier": "base"}}
    task_files = [f"results/{run}/tasks/test.parquet" for run in ("mas", "alone")]
    completed = snakemake(tmp_path, suite, "--", *task_files)
    assert completed.returncode == 0, completed.stderr
    # The tasks of `mas` are a newer link to those of `alone`.
    link, file = (tmp_path / path for path in task_files)
    assert link.samefile(file)
    assert link.lstat().st_mtime_ns > file.lstat().st_mtime_ns

    for run in ("mas", "alone"):
        write_finished_training(tmp_path, run, base)
    completed = snakemake(tmp_path, suite, "--", "results/mas/evaluation/mixed.json")
    assert completed.returncode == 0, completed.stderr
    scores = json.loads((tmp_path / "results/mas/evaluation/mixed.json").read_text())
    assert (scores["run"], scores["state"], len(scores["tasks"])) == ("mas", "mixed", 2)
    policies = {}
    for trajectory in read_trajectories(tmp_path / "results/mas/evaluation/mixed"):
        for turn in trajectory.turns:
            policies[turn.agent] = turn.policy
    assert policies == {"solver": "alone.verifier", "verifier": "base.verifier"}


def write_finished_training(folder: Path, run: str, base: Path) -> None:
    """Write the files that a finished training leaves, with the base model as the trained models."""
    models = {policy: folder / "trained" / run / policy for policy in ("solver", "verifier")}
    for model in models.values():
        copytree(base, model)
    manifest = folder / "results" / run / "train" / "done.json"
    manifest.parent.mkdir()
    paths = {policy: str(model) for policy, model in models.items()}
    manifest.write_text(json.dumps({"policies": paths}))
