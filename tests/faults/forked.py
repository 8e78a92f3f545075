"""Trainings in forks of a process that has imported everything.

A start takes a second, and killing a fork does not affect the test.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_mas.evaluation import evaluate, trajectory_shards
from mcore_mas.reports.tables import make_table
from mcore_mas.training import train
from retrieval.build import build_index
from retrieval.corpus import Passage, write_corpus
from retrieval.encoder import Encoder
from rollout.base.digests import sha256
from rollout.base.failpoints import FAILPOINTS
from rollout.records.files import write_tasks
from rollout.tasks.arithmetic import arithmetic_tasks
from tests.support.in_process import training_here
from tests.support.run_folder import make_run
from tests.support.tiny_bert import write_bert

ROOT = Path(__file__).parents[2]
STEPS = 3
SETTINGS = (
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=1",
    "trainer.validate_every=2",
    "data.validation=2",
    "data.test=2",
    "evaluation.samples=2",  # two files of two trajectories
    "policies.solver.tp=1",
    "agents.solver.max_tokens=8",
    "agents.verifier.max_tokens=8",
    "orchestra.options.max_loops=1",
    "+engine.deterministic=true",
    # A random model earns this reward sometimes, so that every step has an update.
    "reward.name=tests.support.rewards:by_first_token",
    "~reward.penalties",
)
PASSAGES = [Passage.compose(str(n), f"Title {n}", f"text {n}") for n in range(40)]


def forked(work: Callable[[], object], log: Path, orders: str = "") -> int:
    """Do `work` in a fork of this process; return its exit status, or minus the signal that ended it.

    Args:
        log: file that gets the output of the fork.
        orders: value of the environment variable `FAILPOINTS` in the fork, such as
            "metrics.begun=kill"; "" for no failpoints.
    """
    child = os.fork()
    if child == 0:
        # Destructors of this process's objects may need threads, of which a fork has none.
        gc.freeze()
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ[FAILPOINTS] = orders
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def train_in_process(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Train in another process.

    A fork of this process cannot train if earlier tests have left threads of torch.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.forked", str(config), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def run_folder(results: Path, *settings: str) -> Path:
    """Make a run folder for `pipeline`; return it."""
    return make_run(results, *SETTINGS, *settings)


def preparation_folder(results: Path) -> Path:
    """Make a folder with only an encoder, for `preparation`; return it."""
    write_bert(results / "bare" / "bert", [passage.contents for passage in PASSAGES], seed=1)
    return results / "bare"


def pipeline(run: Path) -> None:
    """Train a run, evaluate it with two trajectories in a file, and make its table."""
    with pytest.MonkeyPatch.context() as patch:
        with training_here(patch):
            train.train(run / "config.yaml")
        patch.setattr(trajectory_shards, "_TRAJECTORIES_PER_FILE", 2)
        scores = run / "evaluation" / "trained.json"
        evaluate.evaluate(run / "config.yaml", "trained", scores)
        make_table(
            [scores],
            {run.name: run.name},
            [run / f"table.{kind}" for kind in ("csv", "md", "html")],
        )


def preparation(folder: Path) -> None:
    """Generate tasks, and build a dense and a lexical index of passages."""
    for split in ("train", "test"):
        write_tasks(folder / f"{split}.parquet", arithmetic_tasks(1, {split: 8}))
    write_corpus(folder / "passages.jsonl", PASSAGES)
    build_index(
        folder / "passages.jsonl",
        folder / "index",
        Encoder.of("bge", folder / "bert"),
        words=True,
    )


def fingerprint(folder: Path) -> dict[str, str]:
    """Return a digest or the content of every file, without times and other values of one start."""
    fingerprints = {}
    left_out = {folder / "train" / "lock.json", folder / "train" / "mlflow.json"}
    left_out |= set((folder / "logs").glob("*.json"))  # start and end times of stages
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path in left_out:
            continue
        if fnmatch(path.name, ".*.sha256"):  # has the modification time of its file
            continue
        if path.suffix == ".parquet":
            content = json.dumps(_comparable(pq.read_table(path).to_pylist()), default=bytes.hex)
        elif path.name == "metrics.jsonl":
            lines = path.read_text().splitlines()
            content = json.dumps([_comparable(json.loads(line)) for line in lines if line])
        elif path.suffix == ".json":
            content = json.dumps(_comparable(json.loads(path.read_text() or "0")))
        else:
            content = sha256(path)
        fingerprints[str(path.relative_to(folder))] = content
    return fingerprints


def _comparable(value: object) -> object:
    """Return a JSON value without the fields that differ between equal runs."""
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _comparable(item) for key, item in value.items() if not _varies(key, value)}


def _varies(key: str, fields: dict[str, object]) -> bool:
    """Return True if a field differs between equal runs."""
    if key == "sha256":
        # Beside `bytes`, this is the digest of a file, which is equal. Elsewhere it is the digest of a
        # manifest, which includes the epoch.
        return "bytes" not in fields
    if key == "epoch":  # larger after each start
        return True
    if key == "identity":  # of an evaluation; includes the modification times of model files
        return True
    is_time = key.endswith(("_s", "/tokens_per_s", "/tflops"))
    return is_time or key.startswith("restarts/")  # restarts of trainers after faults


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as here, training_here(here):
        train.train(Path(sys.argv[1]), fork="--fork" in sys.argv[2:])
