"""Trainings of one recipe: `python -m tests.faults.same FOLDER WAY...` trains each way in a fork.

A way is the orders of failpoints, or `=` for none. A training that the orders kill is started again.
With the prefix `ahead:`, rollouts are collected one step ahead of training. For each way the program
prints the digests of the run's files as a line of JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from mcore_mas.training import train
from tests.faults.forked import fingerprint, forked, run_folder
from tests.support.in_process import training_here

AHEAD = ("trainer.staleness=1", "agents.solver.max_tokens=40")


def work(run: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, training_here(patch):
        train.train(run / "config.yaml")


def train_way(base: Path, way: str) -> dict[str, str]:
    """Train in one of the ways; return the digests of the run's files."""
    results = base / "results"
    log = base / "log"
    results.mkdir()
    orders = way.removeprefix("ahead:").removeprefix("=")
    settings = AHEAD if way.startswith("ahead:") else ()
    assert forked(lambda: run_folder(results, *settings), log) == 0, log.read_text()
    (run,) = results.iterdir()
    status = forked(lambda: work(run), log, orders)
    if "kill" in orders:  # the process is killed during a collection
        assert status == -9, log.read_text()
        assert list((run / "train" / "collection").iterdir())
        status = forked(lambda: work(run), log)
    assert status == 0, log.read_text()
    digests = fingerprint(run)
    shutil.rmtree(results)
    return digests


if __name__ == "__main__":
    for way in sys.argv[2:]:
        print(json.dumps(train_way(Path(sys.argv[1]), way)), flush=True)
