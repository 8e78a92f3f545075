"""Checkpoints of another recipe are reported before anything of the run is touched."""

import sys
from pathlib import Path

import pytest

from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline.recipe_check import recipe_problems
from mcore_mas.pipeline.sharing import settings_digest
from mcore_mas.pipeline.suite import Suite
from mcore_mas.runtime.checkpoint import Checkpoints
from mcore_mas.runtime.checkpoint_manifest import read_checkpoint_manifest
from mcore_mas.runtime.input_digests import recipe_module_digests
from mcore_mas.runtime.recipe import Identity, recipe_of
from tests.support.checkpoints import MODELS, save

REWARD = "def pay(group):\n    return group\n"


def load(results: Path, *overrides: str) -> Suite:
    """Return a suite of one run with the user's reward and three steps."""
    run = [
        "experiment=demo_math",
        "reward={name: 'paid_reward:pay', options: {}}",
        "trainer.steps=3",
        *overrides,
    ]
    return Suite.load({"suite": "s", "results": str(results), "experiments": {"r": run}})


def problems_of(results: Path, *overrides: str) -> list[str]:
    """Return the problems of the run's checkpoints with further overrides."""
    return recipe_problems(load(results, *overrides))


def save_checkpoints(config: RunConfig) -> Path:
    """Save checkpoints of the steps 2 and 3 with the recipe of a run; return the newest."""
    recipe = recipe_of(config) | {"data.tasks": "digest of the tasks"}
    inputs = recipe_module_digests(config) | {"code": "digest of the code"}
    identity = Identity(run=config.run, models=MODELS, recipe=recipe, inputs=inputs)
    folder = config.folder / "train" / "checkpoints"
    save(Checkpoints(folder, identity, keep=2), 2, 3)
    return folder / "step_000003"


@pytest.fixture
def reward_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the run's reward."""
    file = tmp_path / "paid_reward.py"
    file.write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "paid_reward", raising=False)  # of another test
    return file


def test_settings_and_modules_that_differ_from_the_checkpoints_are_reported(
    tmp_path: Path, reward_file: Path
) -> None:
    assert problems_of(tmp_path) == []  # there is no checkpoint
    newest = save_checkpoints(load(tmp_path).run_config("r"))
    assert read_checkpoint_manifest(newest)["step"] == 3

    # Steps are no part of the recipe, and tasks and code are compared when the training starts.
    assert problems_of(tmp_path) == []
    assert problems_of(tmp_path, "trainer.steps=4") == []

    ways_out = f"name the run anew, or start it over (`rm -r {newest.parents[1]}`"
    (problem,) = problems_of(tmp_path, "advantage=grpo")
    assert problem.startswith(f"run 'r': {newest}: trained with advantage.name=")
    assert 'and the config says "grpo"; fork it (trainer.resume=changed with' in problem
    assert f"trainer.steps above 3), {ways_out}" in problem
    (problem,) = problems_of(tmp_path, "advantage=grpo", "trainer.steps=4")
    assert f"; fork it (trainer.resume=changed), {ways_out}" in problem

    # A finished run has no step left for a fork.
    assert len(problems_of(tmp_path, "advantage=grpo", "trainer.resume=changed")) == 1
    fork = ("advantage=grpo", "trainer.resume=changed", "trainer.steps=4")
    assert problems_of(tmp_path, *fork) == []

    reward_file.write_text(f"{REWARD}\n# edited\n")
    (problem,) = problems_of(tmp_path)
    assert problem.startswith(f"run 'r': {newest}: trained with reward.name=paid_reward:pay=\"")

    # Training continues from an older checkpoint if the newest one has no manifest.
    reward_file.write_text(REWARD)
    (newest / "manifest.json").unlink()
    assert problems_of(tmp_path) == []


def test_an_edited_module_repeats_the_stages_that_depend_on_it(
    tmp_path: Path, reward_file: Path
) -> None:
    config = load(tmp_path).runs["r"]
    stages = ("tasks", "index", "cold_start", "train", "evaluate")
    before = {stage: settings_digest(config, stage) for stage in stages}
    reward_file.write_text(f"{REWARD}\n# edited\n")
    after = {stage: settings_digest(config, stage) for stage in stages}
    assert [stage for stage in stages if before[stage] != after[stage]] == ["train"]
