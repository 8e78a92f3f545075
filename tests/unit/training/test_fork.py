"""Fork of a run (`--fork`): the run as it was is kept, and the new recipe goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_mas.runtime.checkpoint import Checkpoint, CheckpointError, Checkpoints
from mcore_mas.runtime.checkpoint_manifest import read_checkpoint_manifest
from mcore_mas.runtime.recipe import Identity
from mcore_mas.training.fork import fork_if_changed
from rollout.base.ownership import owned
from tests.faults.forked import forked, run_folder, train_in_process
from tests.support.checkpoints import MODELS, names, save, silent

pytestmark = pytest.mark.usefixtures("forked_programs")


def open_with_seed(train: Path, seed: int, *, may_change: bool = False) -> Checkpoints:
    """Open the checkpoints of a run whose recipe has only a seed."""
    identity = Identity(run="r", models=MODELS, recipe={"seed": seed}, may_change=may_change)
    return Checkpoints(train / "checkpoints", identity, keep=2)


def make_train_folder(tmp_path: Path) -> Path:
    """Make the folder of a run with checkpoints of the steps 4 and 5, by the recipe `seed: 1`."""
    folder = tmp_path / "r" / "train"
    folder.mkdir(parents=True)
    save(open_with_seed(folder, 1), 4, 5)
    (folder / "metrics.jsonl").write_text('{"step": 4}\n')
    for name in ("mlflow.json", "wandb.id"):
        (folder / name).write_text("{}")
    (folder / "ray").mkdir()
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the content of all files by relative path, without that of the owner."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock.json"
    }


def fork(folder: Path, seed: int, steps: int = 9) -> tuple[Checkpoint, list[str]]:
    """Continue a run with a seed; return the checkpoint to continue from and the noted lines."""
    notes: list[str] = []
    with owned(folder):
        checkpoints = open_with_seed(folder, seed, may_change=True)
        newest = checkpoints.recover_newest(silent)
        assert newest is not None
        return fork_if_changed(folder, checkpoints, newest, steps, notes.append), notes


def test_a_run_of_the_same_recipe_is_not_forked(tmp_path: Path) -> None:
    folder = make_train_folder(tmp_path)
    before = contents(folder)
    checkpoint, notes = fork(folder, 1)
    assert checkpoint.step == 5
    assert notes == []
    assert contents(folder) == before
    assert names(tmp_path / "r") == ["train"]


def test_a_fork_that_would_train_nothing_is_refused(tmp_path: Path) -> None:
    folder = make_train_folder(tmp_path)
    before = contents(folder)
    message = r"seed=1, and the config says 2; trainer.steps is 5, so that a fork would"
    with pytest.raises(CheckpointError, match=message):
        fork(folder, 2, steps=5)
    assert contents(folder) == before
    assert names(tmp_path / "r") == ["train"]


def test_run_and_fork_go_on_with_their_own_recipes(tmp_path: Path) -> None:
    folder = make_train_folder(tmp_path)
    before = contents(folder)
    checkpoint, notes = fork(folder, 2)
    copy = tmp_path / "r" / "train.1"
    assert notes == [
        "forked at step 5: seed=1, and the config says 2; the run as it was is kept in " + str(copy)
    ]
    assert checkpoint.step == 5
    assert checkpoint.state["kl"] == 5

    # what the fork writes does not change the copy
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5}\n')
    with owned(folder):
        save(open_with_seed(folder, 2), 6)
    assert contents(copy) == before
    assert names(folder / "checkpoints") == ["step_000005", "step_000006"]
    manifest = read_checkpoint_manifest(folder / "checkpoints" / "step_000005")
    assert manifest["forked_from"] == "train.1"

    # the fork is a run of its own at its trackers
    assert not list(folder.glob("mlflow*"))
    assert not list(folder.glob("wandb*"))

    # each continues with its recipe, and is refused with the other
    assert open_with_seed(folder, 2).recover_newest(silent) is not None
    assert open_with_seed(copy, 1).recover_newest(silent) is not None
    message = r"trained with seed=2, and the config says 1; fork it with --fork"
    with pytest.raises(CheckpointError, match=message):
        open_with_seed(folder, 1).recover_newest(silent)

    _, notes = fork(folder, 3)
    assert notes[0].endswith(f"kept in {tmp_path / 'r' / 'train.2'}")


@pytest.mark.parametrize(
    "failpoint", ["folder.begun:train.1", "folder.written:train.1", "folder.there:train.1"]
)
def test_a_fork_that_is_killed_loses_nothing_and_is_made_again(
    tmp_path: Path, failpoint: str
) -> None:
    folder = make_train_folder(tmp_path)
    before = contents(folder)
    status = forked(lambda: fork(folder, 2), tmp_path / "log", f"{failpoint}=kill")
    assert status == -signal.SIGKILL
    assert contents(folder) == before
    fork(folder, 2)
    newest_copy = max((tmp_path / "r").glob("train.*"))
    assert contents(newest_copy) == before


def test_a_fork_that_is_killed_before_its_checkpoint_is_rewritten_is_made_again(
    tmp_path: Path,
) -> None:
    folder = make_train_folder(tmp_path)
    before = contents(folder)
    failpoint = "file.written:manifest.json=kill"
    status = forked(lambda: fork(folder, 2), tmp_path / "log", failpoint)
    assert status == -signal.SIGKILL
    assert contents(tmp_path / "r" / "train.1") == before
    _, notes = fork(folder, 2)
    assert notes[0].endswith("train.2")
    assert open_with_seed(folder, 2).recover_newest(silent) is not None


@pytest.mark.slow
def test_a_run_of_another_recipe_is_refused_and_continued_with_fork(tmp_path: Path) -> None:
    """Two steps with one seed, two more with another; both folders have files of the first two."""
    run = run_folder(tmp_path)
    config = run / "config.yaml"

    def edit_config(seed: int, steps: int) -> None:
        values = yaml.safe_load(config.read_text())
        values["seed"] = seed
        values["trainer"]["steps"] = steps
        config.write_text(yaml.safe_dump(values))

    edit_config(seed=1, steps=2)
    finished = train_in_process(config)
    assert finished.returncode == 0, finished.stderr
    before = contents(run / "train")

    edit_config(seed=2, steps=4)
    refused = train_in_process(config)
    assert refused.returncode == 1
    message = "trained with seed=(default), and the config says 2; fork it with --fork"
    assert message in refused.stderr
    assert contents(run / "train") == before

    fork = train_in_process(config, "--fork")
    assert fork.returncode == 0, fork.stderr
    assert f"the run as it was is kept in {run / 'train.1'}" in fork.stderr
    assert contents(run / "train.1") == before
    assert steps_of(run / "train") == [-1, 0, 1, 2, 3]
    assert read_done(run / "train.1")["steps"] == 2
    assert read_done(run / "train")["steps"] == 4


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def read_done(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "done.json").read_text())
