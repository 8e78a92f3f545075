"""An interrupted cold start continues from its newest checkpoint to the same model, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
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
STEPS = 6
SETTINGS = [
    "data.train=4",
    "data.validation=2",
    "data.test=2",
    "engine.slots=4",
    "cold_start.base.layers=1",
    "cold_start.base.hidden=32",
    "cold_start.base.heads=2",
    "cold_start.base.kv_heads=2",
    "cold_start.base.ffn=32",
    "cold_start.batch=2",
    "cold_start.warmup_steps=2",
    f"cold_start.max_steps={STEPS}",
    "cold_start.first_check=0",
    "cold_start.check_every=2",
    # Two tasks at once would start a second process that compares answers.
    "cold_start.check_tasks=1",
]
# Run a cold start in the folder of a run. With "stop", SIGURG is sent during the third step.
PROGRAM = """
import signal, sys
from pathlib import Path
from mcore_mas.pipeline import cold_start
from mcore_mas.runtime.joblog import logged

folder = Path(sys.argv[1])
stop = sys.argv[2] == "stop"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
update = cold_start.MegatronTrainer.update

def update_with_signal(trainer, *args):
    if stop and trainer.updates == 2:
        signal.raise_signal(signal.SIGURG)
    return update(trainer, *args)

cold_start.MegatronTrainer.update = update_with_signal
with logged(folder / "logs/bootstrap.log"):
    cold_start.bootstrap(folder / "config.yaml", folder / "base", folder / "bootstrap")
"""


@dataclass(frozen=True)
class Outcome:
    """Digest of a cold-started model, and the measurements without their times."""

    model: str
    measurements: list[dict[str, float]]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with its tasks and its base model."""
    results = tmp_path_factory.mktemp("results")
    folder = results / "duo"
    config = resolve(["experiment=demo_math", "run=duo", f"results={results}", *SETTINGS])
    write_text(folder / "config.yaml", yaml.safe_dump(config))
    prepare_tasks(folder / "config.yaml", folder / "tasks")
    make_base_model(folder / "config.yaml", folder / "tasks", folder / "base")
    return folder


def run_cold_start(
    folder: Path, mode: str = "", *, kind: type[subprocess.Popen[Any]] = Forked, **env: str
) -> tuple[int, str]:
    """Run a cold start in a process of its own; return its exit status and its log."""
    command = [sys.executable, "-c", PROGRAM, str(folder), mode]
    with kind(command, cwd=ROOT, env={**os.environ, **env}) as child:
        status = child.wait(300)
    return status, (folder / "logs" / "bootstrap.log").read_text()


def remove_outputs(folder: Path) -> None:
    """Remove the outputs of earlier cold starts, so that the next one starts from the beginning."""
    for name in ("bootstrap", "logs"):
        shutil.rmtree(folder / name, ignore_errors=True)


def outcome_of(folder: Path) -> Outcome:
    bootstrap = folder / "bootstrap"
    assert not (bootstrap / "checkpoints").exists()
    history = json.loads((bootstrap / "bootstrap.json").read_text())["history"]
    return Outcome(
        model=sha256(*sorted((bootstrap / "model").iterdir())),
        measurements=[
            {name: value for name, value in measurement.items() if name != "seconds"}
            for measurement in history
        ],
    )


@pytest.mark.slow
def test_an_interrupted_cold_start_continues_to_the_same_bits(run_folder: Path) -> None:
    # Unlike forked processes, this one has hash seeds of its own, which must not matter.
    status, _ = run_cold_start(run_folder, kind=subprocess.Popen)
    assert status == 0
    uninterrupted = outcome_of(run_folder)
    assert [row["step"] for row in uninterrupted.measurements] == [2, 4, 6]

    remove_outputs(run_folder)
    status, _ = run_cold_start(run_folder, MCORE_MAS_FAILPOINTS="checkpoint.there=kill@2")
    assert status == -signal.SIGKILL
    status, log = run_cold_start(run_folder)
    assert status == 0
    assert "/step_000004\n" in log
    assert outcome_of(run_folder) == uninterrupted

    remove_outputs(run_folder)
    status, log = run_cold_start(run_folder, "stop")
    assert status == 1
    assert log.rstrip().endswith("error: stopped by SIGURG after step 3; its checkpoint is saved")
    status, log = run_cold_start(run_folder)
    assert status == 0
    assert "/step_000003\n" in log
    assert outcome_of(run_folder) == uninterrupted


@pytest.mark.slow
def test_a_cold_start_with_other_settings_starts_from_the_beginning(run_folder: Path) -> None:
    remove_outputs(run_folder)
    status, _ = run_cold_start(run_folder, MCORE_MAS_FAILPOINTS="checkpoint.there=kill@2")
    assert status == -signal.SIGKILL

    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    config["cold_start"]["lr"] *= 2
    write_text(run_folder / "config.yaml", yaml.safe_dump(config))
    status, log = run_cold_start(run_folder)
    assert status == 0
    assert "continuing from" not in log
