"""The whole pipeline with all real components: both demo teams train for two steps."""

import base64
import csv
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from mlflow.tracking import MlflowClient

from retrieval.corpus import write_corpus
from rollout.tasks.encyclopedia_world import passages
from tests.support.run_folder import metrics_of

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[2]


def snakemake(suite: Path, results: Path) -> str:
    """Run a suite; return Snakemake's output."""
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--configfile",
        str(suite),
        "--config",
        f"results={results}",
    ]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-6000:]
    return completed.stdout + completed.stderr


@pytest.mark.slow
@pytest.mark.multirank
def test_the_tiny_suite_runs_to_its_report_and_a_second_run_does_nothing(tmp_path: Path) -> None:
    # The whole encyclopedia, with 2480 passages, would be encoded for 14 s.
    write_corpus(tmp_path / "passages.jsonl", passages(1)[:200])
    suite = yaml.safe_load((ROOT / "workflow/suites/tiny.yaml").read_text())
    suite["experiments"]["tiny_search"].append(f"retriever.passages={tmp_path}/passages.jsonl")
    suite_file = tmp_path / "tiny.yaml"
    suite_file.write_text(yaml.safe_dump(suite))
    results = tmp_path / "results"
    output = snakemake(suite_file, results)
    assert f"Report: {results}/reports/tiny.html" in output
    assert "mcore-mas ui" in output

    with (results / "tables" / "tiny.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["experiment"] for row in rows} == {"tiny_math", "tiny_search"}
    assert {row["policy_state"] for row in rows} == {"base", "trained", "trained-base"}
    assert {row["n"] for row in rows if row["dataset"] == "all"} == {"8"}

    store = MlflowClient(f"sqlite:///{results}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in store.search_experiments()]
    tracked_runs = store.search_runs(experiments)
    stages = Counter(run.data.tags["stage"] for run in tracked_runs)
    assert stages == {
        "prepare_tasks": 2,
        "build_index": 1,
        "probe_retriever": 1,
        "make_base_model": 2,
        "bootstrap": 2,
        "train": 2,
        "evaluate": 4,
        "experiment": 2,
        "report": 1,
    }
    for run in tracked_runs:
        if run.data.tags["stage"] == "bootstrap":
            assert run.info.end_time > run.info.start_time

    page = (results / "reports/tiny.html").read_text()
    assert "@media (max-width: 640px)" in page  # the project's stylesheet
    assert "#rulegraph { display: none; }" in page
    (curves,) = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", page)
    assert b"validation accuracy" in base64.b64decode(curves)
    assert "</html>" in page
    # The page has a link to MLflow's comparison of both trainings.
    assert "Compare the trainings in MLflow" in page
    assert "compare-runs?runs=" in page
    for run in tracked_runs:
        if run.data.tags["stage"] == "train":
            assert run.info.run_id in page
    # Overrides of all runs are listed once.
    assert "experiment=demo_math data.train=40" in page
    assert "evaluation.samples=2 data.train=40" not in page

    for name, agents in {"tiny_math": {"solver", "verifier"}, "tiny_search": {"verifier"}}.items():
        rows = metrics_of(results / name)
        assert [row["step"] for row in rows] == [-1, 0, 1]
        last = rows[-1]
        assert last["rollout/failed"] == 0
        for agent in agents:
            assert last[f"agent/{agent}/calls"] >= 4
            assert last.get(f"agent/{agent}/logprob_gap_max", 0.0) < 1e-4
        trajectories = results / name / "train" / "trajectories" / "step_000001.parquet"
        columns = set(pq.read_schema(trajectories).names)
        assert {"id", "task_id", "step", "turns", "outcome", "status"} <= columns
    retriever = json.loads((results / "tiny_search" / "retriever.json").read_text())
    assert retriever["recall_at_1"] > 0.9

    assert "Nothing to be done" in snakemake(suite_file, results)
