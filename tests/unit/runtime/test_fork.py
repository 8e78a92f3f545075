"""`--adopt` forks a run: what it was is kept beside it, and what goes on is of the new recipe alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_mas.runtime.checkpoint import CheckpointError, Checkpoints
from mcore_mas.runtime.checkpoint_manifest import read_checkpoint_manifest
from mcore_mas.runtime.recipe import Identity
from mcore_mas.training.train import fork_run
from rollout.base.ownership import owned
from tests.faults.forked import forked, run_folder, trained
from tests.unit.runtime.test_checkpoint import MODELS, names, save, silent

pytestmark = pytest.mark.usefixtures("forked_programs")


def of(train: Path, seed: int, *, may_change: bool = False) -> Checkpoints:
    identity = Identity(run="r", models=MODELS, recipe={"seed": seed}, may_change=may_change)
    return Checkpoints(train / "checkpoints", identity, keep=2)


def begun(tmp_path: Path) -> Path:
    """A run's folder with the checkpoints of steps 4 and 5 by the recipe `seed: 1`."""
    folder = tmp_path / "r" / "train"
    folder.mkdir(parents=True)
    save(of(folder, 1), 4, 5)
    (folder / "metrics.jsonl").write_text('{"step": 4}\n')
    for name in ("mlflow.json", "wandb.id"):
        (folder / name).write_text("{}")
    (folder / "ray").mkdir()
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    own = {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    return {path: content for path, content in own.items() if path.name != "lock.json"}


def adopted(folder: Path, seed: int, steps: int = 9) -> tuple[Any, str]:
    with owned(folder):
        checkpoints = of(folder, seed, may_change=True)
        found = checkpoints.newest(silent)
        assert found is not None
        return fork_run(folder, checkpoints, found, steps)


def test_what_the_run_was_is_kept_and_each_goes_on_by_its_own_recipe(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    before = contents(folder)
    assert adopted(folder, 1)[1] == ""
    with pytest.raises(
        CheckpointError,
        match=r"seed=1, and the config says 2; trainer.steps is 5, so that a fork would",
    ):
        adopted(folder, 2, steps=5)
    assert (contents(folder), names(tmp_path / "r")) == (before, ["train"])

    saved, line = adopted(folder, 2)
    kept = tmp_path / "r" / "train.1"
    assert (
        line
        == f"forked at step 5: seed=1, and the config says 2; the run as it was is kept in {kept}"
    )
    assert (saved.step, saved.state["kl"]) == (5, 5)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5}\n')
    with owned(folder):
        save(of(folder, 2), 6)
    assert contents(kept) == before
    assert names(folder / "checkpoints") == ["step_000005", "step_000006"]
    assert not [
        *folder.glob("mlflow*"),
        *folder.glob("wandb*"),
    ]  # runs of its own there
    assert (
        read_checkpoint_manifest(folder / "checkpoints" / "step_000005")["forked_from"] == "train.1"
    )

    assert of(folder, 2).newest(silent) is not None  # without saying so again
    assert of(kept, 1).newest(silent) is not None
    with pytest.raises(
        CheckpointError, match=r"trained with seed=2, and the config says 1; fork it with --adopt"
    ):
        of(folder, 1).newest(silent)
    assert adopted(folder, 3)[1].endswith(f"kept in {tmp_path / 'r' / 'train.2'}")


@pytest.mark.parametrize(
    "at", ["folder.begun:train.1", "folder.written:train.1", "folder.there:train.1"]
)
def test_a_fork_that_is_killed_has_lost_nothing_and_is_made_again(tmp_path: Path, at: str) -> None:
    folder = begun(tmp_path)
    before = contents(folder)
    assert forked(lambda: adopted(folder, 2), tmp_path / "log", f"{at}=kill") == -signal.SIGKILL
    assert contents(folder) == before
    adopted(folder, 2)
    newest = max(path for path in (tmp_path / "r").glob("train.*"))
    assert contents(newest) == before


def test_a_fork_that_is_killed_before_its_checkpoint_says_so_is_made_again(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    before = contents(folder)
    assert (
        forked(lambda: adopted(folder, 2), tmp_path / "log", "file.written:manifest.json=kill")
        == -signal.SIGKILL
    )
    assert contents(tmp_path / "r" / "train.1") == before
    assert adopted(folder, 2)[1].endswith("train.2")
    assert of(folder, 2).newest(silent) is not None


@pytest.mark.slow
def test_a_run_that_is_trained_by_another_recipe_is_refused_and_then_forked(tmp_path: Path) -> None:
    """Of two steps by one seed, and two more by another: the files of the first two are in both folders."""
    run = run_folder(tmp_path)
    config = run / "config.yaml"

    def edit(**trainer: Any) -> None:
        values = yaml.safe_load(config.read_text())
        own = {"seed": trainer.pop("seed", 1), "trainer": values["trainer"] | trainer}
        config.write_text(yaml.safe_dump({**values, **own}))

    edit(steps=2)
    assert (done := trained(config)).returncode == 0, done.stderr
    before = contents(run / "train")
    edit(steps=4, seed=2)
    refused = trained(config)
    assert refused.returncode == 1
    assert (
        "trained with seed=(default), and the config says 2; fork it with --adopt" in refused.stderr
    )
    assert contents(run / "train") == before
    forks = trained(config, "--adopt")
    assert forks.returncode == 0, forks.stderr
    assert f"the run as it was is kept in {run / 'train.1'}" in forks.stderr
    assert contents(run / "train.1") == before
    steps = [
        json.loads(line)["step"]
        for line in (run / "train" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [-1, 0, 1, 2, 3]
    assert [
        json.loads((own / "done.json").read_text())["steps"]
        for own in (run / "train.1", run / "train")
    ] == [2, 4]
