"""What a run is: the recipe and the inputs by which checkpoints of another one are refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.checkpoint import CheckpointError, Checkpoints
from mcore_mas.runtime.recipe import (
    Identity,
    identity_digest,
    identity_of,
    input_digests,
    recipe_of,
)
from rollout.records.files import write_tasks
from rollout.records.trajectory import Task
from tests.support.checkpoints import MODELS, edit, names, save, silent
from tests.support.tiny import make_model


def test_a_checkpoint_of_another_recipe_is_refused_unless_the_run_says_so(tmp_path: Path) -> None:
    """Another estimator under the same name would go on from the first one's weights, and be taken for its own."""

    def of(recipe: dict[str, object], may_change: bool = False) -> Checkpoints:
        identity = Identity(run="r", models=MODELS, recipe=recipe, may_change=may_change)
        return Checkpoints(tmp_path, identity, keep=2)

    first = {"advantage.name": "drmas", "seed": 1}
    save(of(first), 5)
    assert of(first).newest(silent) is not None
    with pytest.raises(CheckpointError) as refused:
        of({"advantage.name": "grpo", "seed": 2}).newest(silent)
    assert str(refused.value).startswith(
        f'{tmp_path / "step_000005"}: trained with advantage.name="drmas", and the config says "grpo"; '
        "seed=1, and the config says 2; fork it with --adopt (trainer.resume=changed), or name the run "
        "anew; no checkpoint can be"
    )
    with pytest.raises(
        CheckpointError, match=r"trained with seed=1, and the config says \(default\); fork it"
    ):
        of({"advantage.name": "drmas"}).newest(silent)
    assert names(tmp_path) == ["step_000005"]  # nothing is lost
    assert of({"seed": 2}, may_change=True).newest(silent) is not None
    edit(tmp_path / "step_000005", recipe={})
    assert of({"seed": 2}).newest(silent) is not None  # of a version that did not write it down


def test_other_tasks_are_another_recipe(tmp_path: Path) -> None:
    make_model(0).save_pretrained(model := tmp_path / "model")
    models = [f"policies.{name}.model={model}" for name in ("solver", "verifier")]
    config = RunConfig.check(
        resolve(["experiment=demo_math", "run=x", f"results={tmp_path}", *models]), "test"
    )
    one = Task(id="t/1", prompt="?", answers=("1",), env="math", source="t", split="train")
    tasks = config.folder / "tasks" / "train.parquet"
    write_tasks(tasks, [one])
    folder = tmp_path / "checkpoints"
    save(Checkpoints(folder, identity_of(config), keep=2), 5)
    assert Checkpoints(folder, identity_of(config), keep=2).newest(silent) is not None
    write_tasks(tasks, [replace(one, answers=("2",))])
    with pytest.raises(
        CheckpointError,
        match=r'trained with data.tasks="[0-9a-f]{64}", and the config says "[0-9a-f]{64}"',
    ):
        Checkpoints(folder, identity_of(config), keep=2).newest(silent)


def test_a_bit_that_flips_in_any_input_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table: input -> the key that the refusal names."""
    make_model(0).save_pretrained(model := tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    (game := tmp_path / "game.tw-pddl").write_text("{}")
    one = Task(id="t/1", prompt="?", answers=(str(game),), env="math", source="t", split="train")
    (notes := tmp_path / "checkouts" / "a" / "b.py").parent.mkdir(parents=True)
    notes.write_text("1")
    (words := tmp_path / "words.txt").write_text("1")
    (module := tmp_path / "own_reward.py").write_text(
        "def pay(group, *, files=()):\n    return group\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    index = tmp_path / "x" / "index" / "index.json"
    index.parent.mkdir(parents=True)
    index.write_text("{}")
    overrides = [f"policies.{name}.model={model}" for name in ("solver", "verifier")]
    overrides += [
        f"reward={{name: 'own_reward:pay', options: {{files: [{words}]}}}}",
        "+retriever={}",
    ]
    overrides += [f"env={{name: repository, options: {{checkouts: {notes.parents[1]}}}}}"]
    config = RunConfig.check(
        resolve(["experiment=demo_math", "run=x", f"results={tmp_path}", *overrides]), "test"
    )
    write_tasks(config.folder / "tasks" / "train.parquet", [one])

    def checkpoints() -> Checkpoints:
        return Checkpoints(
            tmp_path / "ckpt", replace(identity_of(config), inputs=input_digests(config)), keep=2
        )

    save(checkpoints(), 5)
    assert checkpoints().newest(silent) is not None
    assert identity_digest(identity_of(config)) == identity_digest(identity_of(config))
    files = {
        model / "model.safetensors": "policies.solver.model/model.safetensors",
        model / "tokenizer.json": "policies.solver.model/tokenizer.json",
        module: "reward.name=own_reward:pay",
        index: "retriever.index",
        game: "data.games",
        notes: f"env.options.checkouts={notes.parents[1]}",
        words: f"reward.options.files={words}",
    }
    for file, key in files.items():
        before = file.read_bytes()
        file.write_bytes(bytes([before[0] ^ 1]) + before[1:])
        with pytest.raises(CheckpointError, match=re.escape(f'{key}="')):
            checkpoints().newest(silent)
        file.write_bytes(before)
        assert checkpoints().newest(silent) is not None
    monkeypatch.setattr(
        "mcore_mas.runtime.recipe._MANY", 0
    )  # so that a folder of one file has too many
    assert input_digests(config)[f"env.options.checkouts={notes.parents[1]}"] == "more than 0 files"
    monkeypatch.setattr("mcore_mas.runtime.recipe._MANY", 1)
    assert checkpoints().newest(silent) is not None
    monkeypatch.setattr("mcore_mas.runtime.recipe._code", lambda: "another version")
    with pytest.raises(
        CheckpointError, match=r'trained with code="[0-9a-f]{64}", and the config says "another'
    ):
        checkpoints().newest(silent)
    anyhow = replace(identity_of(config), inputs=input_digests(config), may_change=True)
    assert Checkpoints(tmp_path / "ckpt", anyhow, keep=2).newest(silent) is not None
    assert (
        Checkpoints(tmp_path / "ckpt", identity_of(config), keep=2).newest(silent) is not None
    )  # an export's


@pytest.mark.slow
def test_the_recipe_is_what_decides_what_is_learnt(tmp_path: Path) -> None:
    def recipe(*overrides: str) -> dict[str, object]:
        resolved = resolve(["experiment=demo_math", "run=x", f"results={tmp_path}", *overrides])
        return recipe_of(RunConfig.check(resolved, "test"))

    same = [
        "trainer.steps=7",
        "policies.solver.tp=1",
        "engine.slots=8",
        "data.test=3",
        "evaluation.samples=1",
    ]
    same += ["trainer.agreement={max: 0.01}", "trainer.max_advantage=null", "trainer.keep_best=2"]
    assert recipe(*same) == recipe()
    # what is at its default is not in it, so that a later version may add keys
    assert recipe("trainer.passes=1", "+agents.solver.loss_weight=1.0") == recipe()
    assert not recipe().keys() & {"trainer.passes", "filter", "agents.solver.loss_weight"}
    changed = {
        "advantage=grpo": "advantage.name",
        "seed=9": "seed",
        "data.train=100": "data.train",
        "policies.solver.lr=0.5": "policies.solver.lr",
        "trainer.group_size=4": "trainer.group_size",
        "agents.verifier.temperature=0.5": "agents.verifier.temperature",
        "loss.options.clip_high=0.28": "loss.options.clip_high",
    }
    coach = ["coach=openai", "coach.model=a", "reward={name: coach, options: {}}"]
    assert recipe(*coach)["coach.model"] == "a"
    assert recipe(*coach) == recipe(
        *coach, "coach.concurrency=3", "coach.budget.calls=9", "coach.url=https://a.b/v1"
    )
    assert (
        recipe(*coach)
        != recipe(*coach, "coach.temperature=0.5")
        != recipe(*coach, "coach.outcome=true")
    )
    for override, key in changed.items():
        differing = {k for k, v in recipe(override).items() if recipe().get(k) != v}
        assert key in differing, override
