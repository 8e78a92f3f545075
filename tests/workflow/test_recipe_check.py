"""Checkpoints of another recipe are reported before anything of the run is touched."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline.check import suite_problems
from mcore_mas.pipeline.passage_index import index_passages
from mcore_mas.pipeline.prepare import prepare_tasks
from mcore_mas.pipeline.recipe_check import recipe_problems
from mcore_mas.pipeline.sharing import settings_digest
from mcore_mas.pipeline.suite import Suite, load_suite
from mcore_mas.runtime.checkpoint import Checkpoints
from mcore_mas.runtime.checkpoint_manifest import read_checkpoint_manifest
from mcore_mas.runtime.input_digests import input_digests, recipe_module_digests
from mcore_mas.runtime.recipe import Identity, identity_of, recipe_of
from rollout.tasks.splits import SPLITS
from tests.support import reference
from tests.support.checkpoints import MODELS, save
from tests.support.templates import byte_tokenizer

REWARD = """from rollout.rewards.allocation import shared_outcome


def pay(group):
    return shared_outcome(group)
"""
NOTE = "note: the settings are valid, but not for the checkpoints here, so `mcore-mas run` refuses"
PASSAGE = json.dumps({"id": "1", "contents": '"Zurich"\nZurich is a city.'})


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

    # Steps are no part of the recipe. This run's tasks are yet to be made, and new code repeats no
    # finished training.
    (newest.parents[1] / "done.json").write_text("{}")
    assert problems_of(tmp_path) == []
    (problem,) = problems_of(tmp_path, "trainer.steps=4")  # the new code would train a fourth step
    assert "trained with another version of mcore-mas; fork it" in problem

    # Its models would be taken for those of two steps.
    (problem,) = problems_of(tmp_path, "trainer.steps=2")
    surplus = "the run has taken 3 steps, more than trainer.steps 2; set trainer.steps to 3 or more"
    assert problem == f"run 'r': {newest}: {surplus}, or name the run anew"

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
    module = "another version of reward.name=paid_reward:pay"
    assert problem.startswith(f"run 'r': {newest}: trained with {module}; fork it")

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


@dataclass(frozen=True)
class Project:
    """The folder of a suite whose run has a data file, a model, passages, and a file of its reward."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the run's third step."""
        return self.folder / "results" / "r" / "train" / "checkpoints" / "step_000003"

    def write_rows(self, answer: str) -> None:
        """Write the data file; its time stamp is later than that of the run's tasks."""
        row = {"id": "a", "prompt": "1+1?", "answer": answer}
        self.write_later("rows.jsonl", json.dumps(row))

    def write_later(self, name: str, text: str) -> None:
        """Write a file with a time stamp in the future."""
        path = self.folder / name
        path.write_text(text)
        later = time.time() + 60
        os.utime(path, (later, later))

    def check(self) -> list[str]:
        """Return the lines of `mcore-mas check`."""
        return CliRunner().invoke(app, ["check", "suite.yaml"]).stdout.splitlines()


@pytest.fixture
def project(tmp_path: Path, reward_file: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Return a project whose run has prepared its tasks, indexed its passages and taken 3 steps."""
    monkeypatch.chdir(tmp_path)
    reward_file.write_text(REWARD.replace("(group):", "(group, *, words):"))
    reference.make_model("qwen2", tmp_path / "model", layers=2)
    byte_tokenizer(tmp_path / "model", ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    (tmp_path / "words.txt").write_text("1")
    (tmp_path / "passages.jsonl").write_text(PASSAGE)
    project = Project(tmp_path)
    project.write_rows("2")
    suite = {
        "suite": "s",
        "experiments": {
            "r": [
                "experiment=demo_math",
                "cold_start=null",
                "trainer={steps: 3, tasks_per_step: 1}",
                "+trainer.keep_best=0",
                "data={generator: null, options: {}, format: plain}",
                *(f"data.{split}=[rows.jsonl]" for split in SPLITS),
                "reward={name: 'paid_reward:pay', options: {words: ./words.txt}}",
                "+retriever={ranking: bm25, passages: passages.jsonl}",
                *(f"policies.{name}.model=model" for name in ("solver", "verifier")),
                *(f"+policies.{name}.chat_template=chatml" for name in ("solver", "verifier")),
            ]
        },
    }
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    loaded = load_suite("suite.yaml")
    assert suite_problems(loaded) == []

    config = loaded.run_config("r")
    loaded.write_configs(["r"])
    tasks = config.folder / "tasks"
    prepare_tasks(loaded.config_path("r"), tasks)
    index_passages(loaded.config_path("r"), tasks / "passages.jsonl", config.folder / "index")
    identity = replace(identity_of(config), inputs=input_digests(config))
    save(Checkpoints(project.checkpoint.parent, identity, keep=2), 3)
    return project


def test_inputs_that_differ_from_the_checkpoints_are_refused_before_jobs_start(
    project: Project,
) -> None:
    assert project.check() == ["ok: r"]

    def refusal() -> str:
        """Return the difference in the only line of the check."""
        ok, line = project.check()
        checkpoint = project.checkpoint.relative_to(project.folder)
        prefix = f"{NOTE} run 'r': {checkpoint}: trained with "
        assert ok == "ok: r"
        assert line.startswith(prefix)
        changes, _, ways_out = line.removeprefix(prefix).partition("; fork it")
        assert "name the run anew, or start it over (`rm -r results/r/train`; " in ways_out
        return changes

    # Rows with other words and the same tasks are no change.
    project.write_later("rows.jsonl", '{"answer": "2", "prompt": "1+1?", "id": "a"}')
    assert project.check() == ["ok: r"]
    project.write_rows("3")
    assert refusal() == "other training tasks than those of data.train"
    project.write_rows("2")

    words = project.folder / "words.txt"
    words.write_text("2")
    assert refusal() == "another version of reward.options.words=./words.txt"
    words.unlink()
    assert refusal() == "reward.options.words=./words.txt, which is missing now"
    words.write_text("1")

    weights = project.folder / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "another version of policies.solver.model/model.safetensors" in refusal()
    weights.write_bytes(content)

    project.write_later("passages.jsonl", PASSAGE.replace("Zurich", "Geneva"))
    assert refusal() == "another version of retriever.index"
    project.write_later("passages.jsonl", PASSAGE)
    assert project.check() == ["ok: r"]


def test_other_code_is_refused_only_for_a_training_that_has_not_finished(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_mas.runtime.input_digests.code_digest", lambda: "another version")
    _, line = project.check()
    assert "trained with another version of mcore-mas; fork it" in line
    (project.checkpoint.parents[1] / "done.json").write_text("{}")
    assert project.check() == ["ok: r"]


def test_a_larger_model_is_refused_before_jobs_start(project: Project) -> None:
    reference.make_model("qwen2", project.folder / "model", layers=3)
    byte_tokenizer(project.folder / "model", ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    _, line = project.check()
    assert (
        "policy 'solver' has layers 2, but the run's model has 3; name the run anew, or start it"
        in line
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_dry_run_refuses_an_edited_data_file(project: Project) -> None:
    project.write_rows("3")
    command = [sys.executable, "-m", "mcore_mas", "run", "suite.yaml", "-n"]
    dry_run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert dry_run.returncode == 1
    last_line = dry_run.stderr.splitlines()[-1]
    assert last_line.startswith("error: run 'r': results/r/train/checkpoints/step_000003: ")
    assert "trained with other training tasks than those of data.train; fork it" in last_line
