"""Digests of a run's inputs, by which checkpoints of other inputs are refused."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime import input_digests as digests
from mcore_mas.runtime.checkpoint import CheckpointError, Checkpoints
from mcore_mas.runtime.input_digests import input_digests
from mcore_mas.runtime.recipe import identity_digest, identity_of
from rollout.records.files import write_tasks
from rollout.records.trajectory import Task
from tests.support.checkpoints import save, silent
from tests.support.tiny import make_model


@dataclass(frozen=True)
class RunWithInputs:
    """Run with an input of every kind.

    Attributes:
        checkpoints: of the run; opening computes its digests.
        files: one file of each input, with the name of its digest.
        checkouts: folder of one file that the environment reads.
    """

    config: RunConfig
    checkpoints: Callable[[], Checkpoints]
    files: dict[Path, str]
    checkouts: Path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunWithInputs:
    model = tmp_path / "model"
    make_model(0).save_pretrained(model)
    (model / "tokenizer.json").write_text("{}")
    game = tmp_path / "game.tw-pddl"
    game.write_text("{}")
    checkouts = tmp_path / "checkouts"
    source = checkouts / "a" / "b.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    words = tmp_path / "words.txt"
    words.write_text("1")
    module = tmp_path / "own_reward.py"
    module.write_text("def pay(group, *, files=()):\n    return group\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    index = tmp_path / "x" / "index" / "index.json"
    index.parent.mkdir(parents=True)
    index.write_text("{}")

    settings = [
        "run=x",
        f"results={tmp_path}",
        f"policies.solver.model={model}",
        f"policies.verifier.model={model}",
        f"reward={{name: 'own_reward:pay', options: {{files: [{words}]}}}}",
        f"env={{name: repository, options: {{checkouts: {checkouts}}}}}",
        "+retriever={}",
    ]
    config = RunConfig.from_values(resolve(["experiment=demo_math", *settings]), "test")
    task = Task(id="t/1", prompt="?", answers=(str(game),), env="math", source="t", split="train")
    write_tasks(config.folder / "tasks" / "train.parquet", [task])

    def checkpoints() -> Checkpoints:
        identity = replace(identity_of(config), inputs=input_digests(config))
        return Checkpoints(tmp_path / "checkpoints", identity, keep=2)

    save(checkpoints(), 5)
    files = {
        model / "model.safetensors": "policies.solver.model/model.safetensors",
        model / "tokenizer.json": "policies.solver.model/tokenizer.json",
        module: "reward.name=own_reward:pay",
        index: "retriever.index",
        game: "data.games",
        source: f"env.options.checkouts={checkouts}",
        words: f"reward.options.files={words}",
    }
    return RunWithInputs(config=config, checkpoints=checkpoints, files=files, checkouts=checkouts)


def test_a_flipped_bit_in_any_input_is_refused_by_its_name(run: RunWithInputs) -> None:
    assert run.checkpoints().recover_newest(silent) is not None
    for file, name in run.files.items():
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(CheckpointError, match=re.escape(f"another version of {name};")):
            run.checkpoints().recover_newest(silent)
        file.write_bytes(content)
        assert run.checkpoints().recover_newest(silent) is not None


def test_folders_with_too_many_files_are_not_read(
    run: RunWithInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"env.options.checkouts={run.checkouts}"
    monkeypatch.setattr(digests, "MAX_FOLDER_FILES", 0)
    assert input_digests(run.config)[name] == "more than 0 files"
    monkeypatch.setattr(digests, "MAX_FOLDER_FILES", 1)
    assert run.checkpoints().recover_newest(silent) is not None


def test_other_code_is_refused_unless_the_run_may_be_forked(
    run: RunWithInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "code_digest", lambda: "another version")
    message = r"trained with another version of mcore-mas; fork it"
    with pytest.raises(CheckpointError, match=message):
        run.checkpoints().recover_newest(silent)
    identity = identity_of(run.config)
    fork = replace(identity, inputs=input_digests(run.config), may_change=True)
    assert Checkpoints(tmp_path / "checkpoints", fork, keep=2).recover_newest(silent) is not None
    # an export does not compare inputs
    assert (
        Checkpoints(tmp_path / "checkpoints", identity, keep=2).recover_newest(silent) is not None
    )


def test_the_digest_of_an_identity_is_reproducible(run: RunWithInputs) -> None:
    assert identity_digest(identity_of(run.config)) == identity_digest(identity_of(run.config))
