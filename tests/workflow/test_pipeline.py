"""The whole pipeline on both teams, with every real part, in two training steps."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[2]


def snakemake(results: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "snakemake", "--configfile", "workflow/suites/tiny.yaml"]
    command += ["--config", f"results={results}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.multirank
def test_the_tiny_suite_runs_to_its_report_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    results = tmp_path / "results"
    said = snakemake(results)
    assert f"Report: {results}/reports/tiny.html" in said
    assert "mcore-mas ui" in said

    with (results / "tables" / "tiny.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["experiment"] for row in rows} == {"tiny_math", "tiny_search"}
    assert {row["policy_state"] for row in rows} == {"base", "trained", "trained-base"}
    assert {row["n"] for row in rows if row["dataset"] == "all"} == {"8"}
    page = (results / "reports/tiny.html").read_text()
    assert "@media (max-width: 640px)" in page  # a stylesheet of ours
    store = MlflowClient(f"sqlite:///{results}/mlflow.db")
    runs = store.search_runs(
        [experiment.experiment_id for experiment in store.search_experiments()]
    )
    stages = [run.data.tags["stage"] for run in runs]
    # the rule `report` has sent the table, and links to the two trainings side by side
    assert {stage: stages.count(stage) for stage in sorted(stages)} == {
        "evaluate": 4, "experiment": 2, "report": 1, "train": 2,
        "bootstrap": 2, "build_index": 1, "make_base_model": 2, "prepare_tasks": 2, "probe_retriever": 1,
    }  # fmt: skip
    assert all(
        run.info.end_time > run.info.start_time
        for run in runs
        if run.data.tags["stage"] == "bootstrap"
    )
    assert "Compare the trainings in MLflow" in page and "compare-runs?runs=" in page
    assert all(run.info.run_id in page for run in runs if run.data.tags["stage"] == "train")
    assert (
        "experiment=demo_math data.train=40" in page
        and "evaluation.samples=2 data.train=40" not in page
    )  # once
    assert "</html>" in page

    for run, agents in {"tiny_math": {"solver", "verifier"}, "tiny_search": {"verifier"}}.items():
        lines = (results / run / "train" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [-1, 0, 1]
        last = json.loads(lines[-1])
        assert last["rollout/failed"] == 0
        for agent in agents:
            assert last[f"agent/{agent}/calls"] >= 4
            assert last.get(f"agent/{agent}/logprob_gap_max", 0.0) < 1e-4
        columns = pq.read_schema(
            results / run / "train" / "trajectories" / "step_000001.parquet"
        ).names
        assert {"id", "task_id", "step", "turns", "outcome", "status"} <= set(columns)
    search = json.loads((results / "tiny_search" / "retriever.json").read_text())
    assert search["recall_at_1"] > 0.9

    assert "Nothing to be done" in snakemake(results)
