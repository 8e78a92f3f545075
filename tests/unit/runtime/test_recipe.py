"""Recipe of a run: which settings decide what is learnt, and refusals of other recipes."""

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.checkpoint import CheckpointError, Checkpoints
from mcore_mas.runtime.recipe import Identity, identity_of, recipe_of
from rollout.records.files import write_tasks
from rollout.records.trajectory import Task
from tests.support.checkpoints import MODELS, edit, names, save, silent
from tests.support.tiny import make_model


def test_a_checkpoint_of_another_recipe_is_refused_unless_the_run_says_so(tmp_path: Path) -> None:
    """Otherwise a run would continue from weights of another recipe, and pass for its own."""

    def open_checkpoints(recipe: dict[str, object], may_change: bool = False) -> Checkpoints:
        identity = Identity(run="r", models=MODELS, recipe=recipe, may_change=may_change)
        return Checkpoints(tmp_path, identity, keep=2)

    recipe: dict[str, object] = {"advantage.name": "drmas", "seed": 1}
    save(open_checkpoints(recipe), 5)
    assert open_checkpoints(recipe).recover_newest(silent) is not None

    with pytest.raises(CheckpointError) as refused:
        open_checkpoints({"advantage.name": "grpo", "seed": 2}).recover_newest(silent)
    assert str(refused.value) == (
        f'{tmp_path / "step_000005"}: trained with advantage.name="drmas", and the config says '
        '"grpo"; seed=1, and the config says 2; fork it with --fork (trainer.resume=changed), or '
        f"name the run anew, or move {tmp_path} away to start over"
    )
    message = r"trained with seed=1, and the config says \(default\); fork it"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoints({"advantage.name": "drmas"}).recover_newest(silent)
    assert names(tmp_path) == ["step_000005"]

    assert open_checkpoints({"seed": 2}, may_change=True).recover_newest(silent) is not None
    # versions before this one wrote no recipe
    edit(tmp_path / "step_000005", recipe={})
    assert open_checkpoints({"seed": 2}).recover_newest(silent) is not None


def test_a_checkpoint_with_another_problem_has_the_remedies_of_that_problem(tmp_path: Path) -> None:
    """Only the problem that is named counts, although the recipe differs too."""
    written = Identity(run="r", models=MODELS, recipe={"seed": 1})
    save(Checkpoints(tmp_path, written, keep=2), 5)
    folder = tmp_path / "step_000005"
    end = (
        "there is no older one; put back a checkpoint that can be used, or move "
        f"{tmp_path} away to start over"
    )

    larger = replace(written, models={"policy": {"vocab": 600}}, recipe={"seed": 2})
    with pytest.raises(CheckpointError) as refused:
        Checkpoints(tmp_path, larger, keep=2).recover_newest(silent)
    assert str(refused.value) == (
        f"{folder}: policy 'policy' has vocab 512, but the run's model has 600; {end}"
    )

    (folder / "policy" / "weights").unlink()
    fork = replace(written, recipe={"seed": 2}, may_change=True)
    with pytest.raises(CheckpointError) as refused:
        Checkpoints(tmp_path, fork, keep=2).recover_newest(silent)
    assert str(refused.value) == f"{folder}: policy/weights is missing; {end}"


def test_other_tasks_are_another_recipe(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(0).save_pretrained(model)
    models = [f"policies.{policy}.model={model}" for policy in ("solver", "verifier")]
    settings = ["run=x", f"results={tmp_path}", *models]
    config = RunConfig.from_values(resolve(["experiment=demo_math", *settings]), "test")
    task = Task(id="t/1", prompt="?", answers=("1",), env="math", source="t", split="train")
    tasks = config.folder / "tasks" / "train.parquet"
    write_tasks(tasks, [task])
    folder = tmp_path / "checkpoints"
    save(Checkpoints(folder, identity_of(config), keep=2), 5)
    assert Checkpoints(folder, identity_of(config), keep=2).recover_newest(silent) is not None

    write_tasks(tasks, [replace(task, answers=("2",))])
    message = r"trained with other training tasks than those of data.train; fork it"
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(folder, identity_of(config), keep=2).recover_newest(silent)


@pytest.mark.slow
class TestRecipe:
    COACH = ("coach=openai", "coach.model=a", "reward={name: coach, options: {}}")

    def recipe(self, *overrides: str) -> dict[str, object]:
        resolved = resolve(["experiment=demo_math", "run=x", *overrides])
        return recipe_of(RunConfig.from_values(resolved, "test"))

    def test_layouts_lengths_and_checks_are_not_part_of_it(self) -> None:
        changed = self.recipe(
            "trainer.steps=7",
            "policies.solver.tp=1",
            "engine.slots=8",
            "data.test=3",
            "evaluation.samples=1",
            "trainer.agreement={max: 0.01}",
            "trainer.max_advantage=null",
            "trainer.keep_best=2",
        )
        assert changed == self.recipe()

    def test_default_values_are_not_part_of_it(self) -> None:
        """So a later version may add keys."""
        default = self.recipe()
        assert self.recipe("trainer.passes=1", "+agents.solver.loss_weight=1.0") == default
        assert not default.keys() & {"trainer.passes", "filter", "agents.solver.loss_weight"}

    @pytest.mark.parametrize(
        ("override", "key"),
        [
            ("advantage=grpo", "advantage.name"),
            ("seed=9", "seed"),
            ("data.train=100", "data.train"),
            ("policies.solver.lr=0.5", "policies.solver.lr"),
            ("trainer.group_size=4", "trainer.group_size"),
            ("agents.verifier.temperature=0.5", "agents.verifier.temperature"),
            ("loss.options.clip_high=0.28", "loss.options.clip_high"),
        ],
    )
    def test_settings_that_change_what_is_learnt_are_part_of_it(
        self, override: str, key: str
    ) -> None:
        default = self.recipe()
        assert self.recipe(override)[key] != default.get(key)

    def test_the_coachs_model_and_sampling_are_part_of_it(self) -> None:
        recipe = self.recipe(*self.COACH)
        assert recipe["coach.model"] == "a"
        speed = ("coach.concurrency=3", "coach.budget.calls=9", "coach.url=https://a.b/v1")
        assert self.recipe(*self.COACH, *speed) == recipe
        for override in ("coach.temperature=0.5", "coach.outcome=true"):
            assert self.recipe(*self.COACH, override) != recipe
