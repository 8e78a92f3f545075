"""A failed job of the pipeline: the terminal has one line about it, and Snakemake's log the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mcore_mas.pipeline.base_model import make_tiny_model

# Tasks are made by the check first, and then by a job, which has a log.
TASKS = """
from pathlib import Path

from rollout.records.trajectory import Task
from rollout.tasks.generators import Generator


def tasks(seed, sizes):
    if Path("results/r/logs").exists():
        raise RuntimeError("the disk of the tasks is gone")
    fields = {"prompt": "1+1?", "answers": ("2",), "env": "math", "source": "own"}
    return [Task(id=f"{s}{n}", split=s, **fields) for s, size in sizes.items() for n in range(size)]


GENERATOR = Generator(tasks=tasks)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_the_terminal_names_the_cause_of_a_failed_job_once(tmp_path: Path) -> None:
    (tmp_path / "lost_tasks.py").write_text(TASKS)
    data = "{generator: 'lost_tasks:GENERATOR', options: {}, train: 16, validation: 1, test: 1}"
    make_tiny_model(tmp_path / "tiny")
    models = [f"policies.{name}.model=tiny" for name in ("solver", "verifier")]
    settings = ["cold_start=null", "engine.max_length=512", *models]
    run = ["experiment=demo_math", "~data", f"+data={data}", *settings]
    suite = {"suite": "s", "experiments": {"r": run}}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    target = "results/r/tasks/train.parquet"
    command = [sys.executable, "-m", "mcore_mas", "run", "suite.yaml", target]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    failed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    last_lines = failed.stderr.rstrip().splitlines()[-3:]
    assert last_lines[0].startswith("error: ")
    assert last_lines[0].endswith("RuntimeError: the disk of the tasks is gone")
    assert last_lines[1] == "  logs: results/r/logs/prepare_tasks.log"
    assert last_lines[2].endswith("the same command continues from what is saved.")

    for block in ("Error in rule", "CalledProcessError", "At least one job did not complete"):
        assert block not in failed.stderr
    (log,) = (tmp_path / ".snakemake" / "log").glob("*.log")
    assert "Error in rule prepare_tasks" in log.read_text()
