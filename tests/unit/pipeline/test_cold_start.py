"""A cold start that was killed, or told to stop, goes on from its last checkpoint to the same model, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.pipeline.base_model import make_base_model
from mcore_mas.pipeline.prepare import prepare_tasks
from rollout.base.digests import sha256
from rollout.base.files import write_text
from tests.support.starts import Forked

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import signal, sys
from pathlib import Path
from mcore_mas.pipeline import cold_start
from mcore_mas.runtime.joblog import logged

folder, stops = Path(sys.argv[1]), sys.argv[2] == "stops"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
update = cold_start.MegatronTrainer.update

def told(trainer, *args):
    if stops and trainer.updates == 2:
        signal.raise_signal(signal.SIGURG)  # in the third step
    return update(trainer, *args)

cold_start.MegatronTrainer.update = told
with logged(folder / "logs/bootstrap.log"):
    cold_start.bootstrap(folder / "config.yaml", folder / "base", folder / "bootstrap")
"""
STEPS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with the tasks and the base model of a run."""
    results = tmp_path_factory.mktemp("results")
    small = [
        "data.train=4",
        "data.validation=2",
        "data.test=2",
        "cold_start.base.layers=1",
        "cold_start.base.hidden=32",
    ]
    small += [
        "cold_start.base.heads=2",
        "cold_start.base.kv_heads=2",
        "cold_start.base.ffn=32",
        "engine.slots=4",
    ]
    steps = [
        f"max_steps={STEPS}",
        "check_every=2",
        "check_tasks=2",
        "batch=2",
        "warmup_steps=2",
        "first_check=0",
    ]
    values = resolve(
        [
            "experiment=demo_math",
            "run=duo",
            f"results={results}",
            *small,
            *(f"cold_start.{s}" for s in steps),
        ]
    )
    write_text(results / "duo" / "config.yaml", yaml.safe_dump(values))
    prepare_tasks(results / "duo" / "config.yaml", results / "duo" / "tasks")
    make_base_model(
        results / "duo" / "config.yaml", results / "duo" / "tasks", results / "duo" / "base"
    )
    return results / "duo"


def started(
    folder: Path, mode: str = "", *, kind: type[subprocess.Popen[Any]] = Forked, **env: str
) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), mode]
    with kind(command, cwd=ROOT, env={**os.environ, **env}) as child:
        status = child.wait(300)
    return status, (folder / "logs" / "bootstrap.log").read_text()


def cleared(base: Path) -> None:
    """Have the next cold start begin from nothing."""
    for name in ("bootstrap", "logs"):
        subprocess.run(["rm", "-rf", str(base / name)], check=True)


def outcome(folder: Path) -> tuple[str, list[dict[str, float]]]:
    written = json.loads((folder / "bootstrap" / "bootstrap.json").read_text())
    measured = [
        {name: row[name] for name in row if name != "seconds"} for row in written["history"]
    ]
    assert not (folder / "bootstrap" / "checkpoints").exists()
    return sha256(*sorted((folder / "bootstrap" / "model").iterdir())), measured


@pytest.mark.slow
def test_a_cold_start_goes_on_after_a_kill_and_a_stop_to_the_same_bits(base: Path) -> None:
    assert (
        started(base, kind=subprocess.Popen)[0] == 0
    )  # whose hashes are others than those of forks
    unbroken = outcome(base)
    assert [row["step"] for row in unbroken[1]] == [2, 4, 6]
    cleared(base)
    code, _ = started(base, MCORE_MAS_FAILPOINTS="checkpoint.there=kill@2")
    assert code == -signal.SIGKILL
    code, said = started(base)
    assert code == 0 and "/step_000004\n" in said
    assert outcome(base) == unbroken
    cleared(base)
    code, said = started(base, "stops")
    assert code == 1 and said.rstrip().endswith(
        "error: stopped by SIGURG after step 3; all of it is saved"
    )
    code, said = started(base)
    assert code == 0 and "/step_000003\n" in said
    assert outcome(base) == unbroken


@pytest.mark.slow
def test_a_cold_start_of_other_settings_begins_anew(base: Path) -> None:
    cleared(base)
    assert started(base, MCORE_MAS_FAILPOINTS="checkpoint.there=kill@2")[0] == -signal.SIGKILL
    values = yaml.safe_load((base / "config.yaml").read_text())
    values["cold_start"]["lr"] *= 2
    write_text(base / "config.yaml", yaml.safe_dump(values))
    code, said = started(base)
    assert code == 0 and "continuing from" not in said
