"""Trainings in forks of a process that has imported everything: a start takes a second, a kill hits no one else."""

from __future__ import annotations

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
    "policies.solver.tp=1",
    "agents.solver.max_tokens=8",
    "agents.verifier.max_tokens=8",
    "orchestra.options.max_loops=1",
    "+engine.deterministic=true",
    "reward.name=tests.support.rewards:by_first_token",  # a random model gets some of it: every step is an update
    "~reward.penalties",
)
PASSAGES = [Passage.compose(str(n), f"Title {n}", f"text {n}") for n in range(40)]


def forked(work: Callable[[], object], log: Path, orders: str = "") -> int:
    """Exit status of a fork of this process that works with failpoints `orders`, minus the signal that ended it."""
    child = os.fork()
    if not child:
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ[FAILPOINTS] = orders
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def trained(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A training in a process of its own: a fork cannot train after tests that have left threads of torch."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.forked", str(config), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def run_folder(results: Path, *settings: str) -> Path:
    """A run, ready for `pipeline`."""
    return make_run(results, *SETTINGS, *settings)


def bare_folder(results: Path) -> Path:
    """A folder with an encoder, ready for `preparation`."""
    write_bert(results / "bare" / "bert", [passage.contents for passage in PASSAGES], seed=1)
    return results / "bare"


def pipeline(run: Path) -> None:
    """Train a run, evaluate it two trajectories a file, and make its table."""
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
    """Generate tasks and index passages, in vectors and in words."""
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
    """What a folder holds, by file: of metrics, scores and trajectories all but when and where they were made."""
    found = {}
    logs = {folder / "train" / name for name in ("lock.json", "mlflow.json")}
    logs |= set((folder / "logs").glob("*.json"))  # when stages began and ended
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path not in logs):
        name = str(path.relative_to(folder))
        if path.suffix == ".parquet":
            found[name] = json.dumps(_timeless(pq.read_table(path).to_pylist()), default=bytes.hex)
        elif path.name == "metrics.jsonl":
            found[name] = json.dumps(
                [_timeless(json.loads(line)) for line in path.read_text().splitlines() if line]
            )
        elif path.suffix == ".json":
            found[name] = json.dumps(_timeless(json.loads(path.read_text() or "0")))
        elif not fnmatch(path.name, ".*.sha256"):  # which have when files were written
            found[name] = sha256(path)
    return found


# a start's; by when models were written; of what has one of these
_RUNS_OWN = ("epoch", "identity", "sha256")


def _timeless(value: object) -> object:
    """Without seconds, and what is a second's."""
    if isinstance(value, dict):
        own = {
            k: v
            for k, v in value.items()
            if k not in _RUNS_OWN or ("bytes" in value and k == "sha256")
        }
        own = {
            k: v for k, v in own.items() if not k.startswith("restarts/")
        }  # of trainers, after faults
        return {
            k: _timeless(v)
            for k, v in own.items()
            if not k.endswith(("_s", "/tokens_per_s", "/tflops"))
        }
    return [_timeless(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as here, training_here(here):
        train.train(Path(sys.argv[1]), adopt="--adopt" in sys.argv[2:])
