"""A step's experience, collected for real with canned replies."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_mas.cli.main import main
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.training import collected_steps
from mcore_mas.training.metrics import rollout_metrics
from rollout.base.errors import EngineError, PromptTooLong
from rollout.environments import math
from rollout.environments.math import last_boxed
from rollout.environments.protocol import Step
from rollout.records.files import read_trajectories, write_trajectories
from rollout.records.trajectory import Group, Status
from rollout.rewards.allocation import allocate
from tests.support.scripted_run import box, make_run, task_of


class Breaking(math.MathEnv):
    """Cannot take a step."""

    async def step(self, action: str) -> Step:
        raise KeyError("own")


def only_odd_tasks_differ(prompt, call):
    """Even tasks are always solved; odd ones by every second call."""
    task = task_of(prompt)
    return box(task if task % 2 == 0 or call % 2 else -1)


def test_every_turn_is_rewarded_written_and_a_sample(tmp_path: Path) -> None:
    run = make_run(tmp_path, lambda prompt, call: box(task_of(prompt)))
    experience = asyncio.run(run.rollouts.collect_batch(0))
    assert experience.batches == 1
    assert [s.reward for s in experience.samples] == [1.0] * 4
    written = read_trajectories(run.rollouts.collected.folder / "step_000000.parquet")
    assert written == [t for group in experience.groups for t in group.trajectories]


def test_a_step_is_written_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, lambda prompt, call: box(task_of(prompt)))
    writers = []

    def write(*arguments: Any) -> None:
        writers.append(threading.current_thread())
        write_trajectories(*arguments)

    monkeypatch.setattr(collected_steps, "write_trajectories", write)
    asyncio.run(run.rollouts.collect_batch(0))
    assert writers
    assert threading.main_thread() not in writers


def test_without_resampling_what_says_nothing_is_only_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, only_odd_tasks_differ, "filter={name: informative}")
    experience = asyncio.run(run.rollouts.collect_batch(0))
    batch = {task.id for task in run.rollouts.schedule.batch(0)}
    assert {s.task for s in experience.samples} == {task for task in batch if int(task) % 2}
    assert len(experience.groups) == 2


def test_resampling_goes_on_until_enough_tasks_say_something(tmp_path: Path) -> None:
    run = make_run(tmp_path, only_odd_tasks_differ, "filter={name: informative, resample: 10}")
    for step in range(4):
        experience = asyncio.run(run.rollouts.collect_batch(step))
        tasks = {s.task for s in experience.samples}
        assert len(tasks) == 2
        assert all(int(task) % 2 for task in tasks)
        assert len(experience.groups) == 2 * experience.batches
        played = [t.id for g in experience.groups for t in g.trajectories]
        assert len(set(played)) == len(played)
        first = {g.task.id for g in experience.groups[:2]}
        assert first == {task.id for task in run.rollouts.schedule.batch(step)}


def test_resampling_is_bounded(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, lambda prompt, call: box(-1), "filter={name: informative, resample: 2}"
    )
    experience = asyncio.run(run.rollouts.collect_batch(0))
    assert (experience.batches, experience.samples) == (3, ())


def test_remax_plays_a_greedy_trajectory_of_each_task_beside(tmp_path: Path) -> None:
    temperatures = []

    def script(prompt, call):
        return box(task_of(prompt))

    run = make_run(tmp_path, script, "advantage={name: remax}", "trainer.group_size=1")
    experience = asyncio.run(run.rollouts.collect_batch(0))
    engine = run.rollouts.team.policies["solver"].engine
    temperatures = sorted(sampling.temperature for _, sampling in engine.calls)
    assert temperatures == [0.0, 0.0, 1.0, 1.0]
    assert [s.scores["greedy"] for s in experience.samples] == [1.0, 1.0]
    assert len(read_trajectories(run.rollouts.collected.folder / "step_000000.parquet")) == 2


def out_of_ten(group: Group) -> Group:
    """As a coach might: ten for what is right."""
    return allocate(
        group, lambda trajectory: [10.0 * (trajectory.outcome or 0.0) for _ in trajectory.turns]
    )


def test_d10_remax_rewards_the_greedy_trajectory_as_the_others(tmp_path: Path) -> None:
    """10 for a right answer of both: the advantage is 10 - 10; with the greedy one's outcome it was 10 - 1."""
    allocator = "reward={name: tests.unit.training.test_experience:out_of_ten}"
    settings = ("advantage={name: remax}", "trainer.group_size=1", allocator, "~reward.penalties")
    run = make_run(tmp_path, lambda prompt, call: box(task_of(prompt)), *settings)
    experience = asyncio.run(run.rollouts.collect_batch(0))
    assert [(s.reward, s.scores["greedy"]) for s in experience.samples] == [(10.0, 10.0)] * 2
    assert [len(group.trajectories) for group in experience.groups] == [1, 1]


def test_a_task_without_its_greedy_baseline_does_not_train(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, lambda prompt, call: box(0), "advantage={name: remax}", "trainer.group_size=1"
    )
    engine = run.rollouts.team.policies["solver"].engine
    plain = engine.generate

    async def fails_when_greedy(prompt_ids, sampling):
        if sampling.temperature == 0.0 and task_of(prompt_ids) == int(
            run.rollouts.schedule.batch(0)[0].id
        ):
            raise EngineError("gone")
        return await plain(prompt_ids, sampling)

    engine.generate = fails_when_greedy
    experience = asyncio.run(run.rollouts.collect_batch(0))
    lost, trained = (group.trajectories[0] for group in experience.groups)
    assert lost.status is Status.FAILED
    assert lost.error == "no greedy baseline: EngineError: gone"
    assert {s.trajectory for s in experience.samples} == {trained.id}


def test_a_step_in_which_everything_failed_stops_the_run(tmp_path: Path) -> None:
    def fails(prompt, call):
        raise EngineError("no engine")

    with pytest.raises(
        TrainingError, match="step 0: all 4 trajectories failed; the first: EngineError: no engine"
    ):
        asyncio.run(make_run(tmp_path, fails).rollouts.collect_batch(0))
    # what failed can be looked at
    assert len(read_trajectories(tmp_path / "trajectories" / "step_000000.parquet")) == 4


def test_more_quarantined_trajectories_than_allowed_end_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of four is a quarter, which is allowed; it plays again from its file, and two of four end the run."""

    def breaks(text: str) -> str | None:
        if "13" in text:
            raise KeyError("thirteen")
        return last_boxed(text)

    monkeypatch.setattr(math, "last_boxed", breaks)
    run = make_run(tmp_path, lambda prompt, call: box(13 if call == 0 else task_of(prompt)))
    batch = asyncio.run(run.rollouts.collect_batch(0))
    trajectories = [t for group in batch.groups for t in group.trajectories]
    [broken] = [t for t in trajectories if t.status is not Status.COMPLETED]
    assert broken.error == "Defect: math.step: KeyError: 'thirteen'"
    assert rollout_metrics(batch.groups)["rollout/quarantined"] == 1.0
    [file] = (run.rollouts.collected.quarantine).iterdir()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(run.config.model_dump(mode="json")))
    for fixed, status, words in (
        (False, 1, "KeyError: 'thirteen'"),
        (True, 0, "completed   outcome 0"),
    ):
        if fixed:
            monkeypatch.undo()
        monkeypatch.setattr("sys.argv", ["mcore-mas", "replay", str(file), "--config", str(config)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == status
        assert words in capsys.readouterr().out
    monkeypatch.setattr(math, "last_boxed", breaks)
    run = make_run(
        tmp_path / "again", lambda prompt, call: box(13 if call < 2 else task_of(prompt))
    )
    with pytest.raises(
        TrainingError,
        match=r"step 0: 2 of 4 trajectories are quarantined, more than collection.max_q",
    ):
        asyncio.run(run.rollouts.collect_batch(0))


def test_an_environment_of_ones_own_is_named_where_it_breaks(tmp_path: Path) -> None:
    """Its tasks are of env math."""
    name = "tests.unit.training.test_experience:Breaking"
    run = make_run(tmp_path, lambda prompt, call: box(task_of(prompt)), f"env={{name: {name}}}")
    with pytest.raises(
        TrainingError, match=rf"the first: Defect: {name}\.step: KeyError: 'own'; see to it"
    ):
        asyncio.run(run.rollouts.collect_batch(0))


def test_a_validation_measures_by_the_rules_of_an_evaluation(tmp_path: Path) -> None:
    """Of three tasks one is right, one is gone at first and then wrong, and one is too long: wrong, and asked once."""
    asked: list[int] = []

    def script(prompt: tuple[int, ...], _: int) -> bytes:
        task = task_of(prompt)
        asked.append(task)
        if task == 1 and asked.count(1) == 1:
            raise EngineError("gone")
        if task == 2:
            raise PromptTooLong("prompt of 600 tokens, and there is room for 500")
        return box(0)

    sampling = (
        "evaluation.temperature=0.6",
        "evaluation.top_p=0.95",
        "evaluation.top_k=20",
        "evaluation.retries=1",
    )
    run = make_run(tmp_path, script, *sampling, "trainer.validation_samples=1")
    tasks = sorted(run.rollouts.schedule._tasks, key=lambda task: task.id)[:3]
    board = asyncio.run(replace(run.rollouts, validation=tuple(tasks)).validate())
    metrics = board.metrics()
    assert metrics.pop("ci_low") < 1 / 3 < metrics.pop("ci_high")
    assert metrics == {
        "failed": 0.0,
        "overlong": 1.0,
        "accuracy": pytest.approx(1 / 3),
        "valid_ratio": 1.0,
    }
    assert sorted(asked) == [0, 1, 1, 2]
    engine = run.rollouts.team.policies["solver"].engine  # type: ignore[attr-defined]
    assert {(s.temperature, s.top_p, s.top_k) for _, s in engine.calls} == {(0.6, 0.95, 20)}
