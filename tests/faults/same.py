"""Trainings of a recipe in forks: `python -m tests.faults.same FOLDER WAY...` prints a line of JSON of each.

A way is failpoints' orders, `=` for none; one that kills is trained again. With `ahead:` before it a step is collected
ahead of training. What is printed are digests by file.
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


def trained(base: Path, way: str) -> dict[str, str]:
    """What the run's folder holds after a training of it."""
    results, log = base / "results", base / "log"
    results.mkdir()
    orders = way.removeprefix("ahead:").removeprefix("=")
    assert (
        forked(lambda: run_folder(results, *(AHEAD if way.startswith("ahead:") else ())), log) == 0
    ), log.read_text()
    (run,) = results.iterdir()
    status = forked(lambda: work(run), log, orders)
    if "kill" in orders:  # in the middle of a collection
        assert status == -9, log.read_text()
        assert list((run / "train" / "collection").iterdir())
        status = forked(lambda: work(run), log)
    assert status == 0, log.read_text()
    found = fingerprint(run)
    shutil.rmtree(results)
    return found


if __name__ == "__main__":
    for given in sys.argv[2:]:
        print(json.dumps(trained(Path(sys.argv[1]), given)), flush=True)
