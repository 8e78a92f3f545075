"""Other models in some seats, through the real rules: what is planned, and who plays."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from rollout.records.files import read_trajectories
from tests.support.run_folder import describe_model, make_run
from tests.workflow.test_dag import planned, snakemake

pytestmark = pytest.mark.usefixtures("forked_programs")
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


def test_a_cell_trains_what_it_needs_and_is_in_the_table(tmp_path: Path) -> None:
    suite = suite_of()
    for run in ("mas", "alone"):
        describe_model(tmp_path / f"results/{run}/bootstrap/model")
    assert planned(tmp_path, suite, target="results/tables/s.csv")["evaluate"] == 2 * 2 + 3
    one = planned(tmp_path, suite, target="results/mas/evaluation/from_alone.json")
    assert one == {"prepare_tasks": 1, "share_tasks": 1, "train": 1, "evaluate": 1}


@pytest.mark.slow
def test_each_agent_plays_the_model_of_its_seat(tmp_path: Path) -> None:
    base = make_run(tmp_path, "data.test=2") / "base"
    small = ["data.train=16", "data.validation=2", "data.test=2", "evaluation.samples=2"]
    models = [f"policies.{policy}.model={base}" for policy in ("solver", "verifier")]
    suite = suite_of(*small, *models)
    suite["evaluate"]["mas"] = {"mixed": {"solver": "alone/verifier", "verifier": "base"}}
    made = [f"results/{run}/tasks/test.parquet" for run in ("mas", "alone")]
    done = snakemake(tmp_path, suite, "--", *made)
    assert done.returncode == 0, done.stderr
    shared, own = (tmp_path / path for path in made)
    assert (
        shared.samefile(own) and shared.lstat().st_mtime_ns > own.lstat().st_mtime_ns
    )  # the owner's time stays
    for run in ("mas", "alone"):  # what training would leave
        trained = {policy: tmp_path / "trained" / run / policy for policy in ("solver", "verifier")}
        for folder in trained.values():
            copytree(base, folder)
        manifest = tmp_path / "results" / run / "train" / "done.json"
        manifest.parent.mkdir()
        manifest.write_text(
            json.dumps({"policies": {policy: str(folder) for policy, folder in trained.items()}})
        )
    done = snakemake(tmp_path, suite, "--", "results/mas/evaluation/mixed.json")
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "results/mas/evaluation/mixed.json").read_text())
    assert (scores["run"], scores["state"], len(scores["tasks"])) == ("mas", "mixed", 2)
    turns = [
        turn
        for t in read_trajectories(tmp_path / "results/mas/evaluation/mixed")
        for turn in t.turns
    ]
    assert {turn.agent: turn.policy for turn in turns} == {
        "solver": "alone.verifier",
        "verifier": "base.verifier",
    }
