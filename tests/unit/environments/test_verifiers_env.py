"""Environments of the package `verifiers`, by a stand-in with the interface of version 0.1."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.base.errors import EnvError
from rollout.environments.verifiers import PROGRAM, VerifiersEnv, run_episode
from rollout.environments.verifiers_worker import team_result
from rollout.orchestras.program import ProgramRules
from rollout.records.trajectory import Status, Task, Trajectory
from rollout.tasks.generators import GENERATORS
from tests.support.casts import SUM, play

PYTHON = str(Path(__file__).resolve().parents[2] / "support" / "stand_in_verifiers" / "python")


def tasks_of(id: str, sizes: dict[str, int], **options: Any) -> list[Task]:
    """Return tasks of the generator `verifiers`."""
    return GENERATORS["verifiers"].tasks(1, sizes, id=id, python=PYTHON, **options)


def play_episode(id: str, *replies: str, **options: Any) -> tuple[Trajectory, list[str]]:
    """Play the row 'What is 3+4?' with these replies; return the trajectory and the prompts."""
    row = {
        "example_id": 3,
        "prompt": [{"role": "user", "content": "What is 3+4?"}],
        "answer": "\\boxed{7}",
    }
    return play(
        "program",
        {"solver": "program_agent"},
        *replies,
        task=replace(SUM, answers=(json.dumps(row),)),
        make_env=partial(VerifiersEnv, id=id, python=PYTHON),
        call=PROGRAM,
        models={"*": "solver"},
        **options,
    )


@pytest.mark.parametrize(("reply", "reward"), [("\\boxed{7}", 1.0), ("\\boxed{8}", 0.0)])
def test_an_episode_is_scored_by_the_rubric(reply: str, reward: float) -> None:
    trajectory, prompts = play_episode("sums", reply)
    assert trajectory.status is Status.COMPLETED, trajectory.error
    assert trajectory.outcome == reward
    assert trajectory.metrics["turns"] == 1.0
    assert len(trajectory.turns) == 1
    assert "What is 3+4?" in prompts[0]


def test_the_environment_decides_how_often_agents_are_asked() -> None:
    trajectory, prompts = play_episode("two-turns", "\\boxed{8}", "\\boxed{7}")
    assert trajectory.outcome == 0.5  # 1 / number of turns
    assert "Try again." in prompts[1]


def test_a_failed_episode_is_not_trained() -> None:
    trajectory, _ = play_episode("sums", "break", rules=ProgramRules(crash="fail"))
    assert trajectory.status is Status.FAILED
    assert "verifiers 'sums': RuntimeError: the rollout failed: the tool broke" in trajectory.error


def test_a_process_that_ends_fails_its_episodes_with_its_last_line() -> None:
    trajectory, _ = play_episode("sums", "exit", rules=ProgramRules(crash="fail"))
    assert trajectory.status is Status.FAILED
    assert "the worker process ended: the environment exits" in trajectory.error


@pytest.mark.slow
def test_an_episode_that_hangs_ends_at_the_deadline() -> None:
    rules = ProgramRules(crash="fail", deadline_s=8.0)
    trajectory, _ = play_episode("sums", "hang", rules=rules)
    assert trajectory.status is Status.LATE
    assert trajectory.error == "LateTool: program: nothing came within 8 s"


def test_episodes_take_turns_among_the_workers() -> None:
    settings = json.dumps({"id": "without-calls", "python": PYTHON, "args": {}, "workers": 2})

    async def play_three() -> list[str]:
        episode = partial(run_episode, settings, "{}", url="http://127.0.0.1:1", key="k")
        return list(await asyncio.gather(episode(), episode(), episode()))

    processes = [json.loads(result)["metrics"]["process"] for result in asyncio.run(play_three())]
    assert processes[0] == processes[2] != processes[1]


def trace(name: str, reward: float) -> SimpleNamespace:
    """Return the trace of an agent in an episode of verifiers 0.4."""
    agent = SimpleNamespace(name=name)
    return SimpleNamespace(agent=agent, reward=reward, rewards={}, metrics={name: 1.0})


def test_the_trained_agents_of_an_episode_have_one_reward() -> None:
    traces = [trace("a", 0.5), trace("b", 0.5)]
    assert team_result(traces) == {"reward": 0.5, "metrics": {"a": 1.0, "b": 1.0}}
    with pytest.raises(ValueError, match=r"have different rewards \(a: 0\.5, b: 1\)"):
        team_result([trace("a", 0.5), trace("b", 1.0)])
    with pytest.raises(ValueError, match="no trained agent took part in an episode"):
        team_result([])


def test_rows_are_split_by_their_content() -> None:
    tasks = tasks_of("sums", {"train": 10, "validation": 1, "test": 1}, args={"size": 60})
    assert len({task.id for task in tasks}) == 12
    row = json.loads(tasks[0].answers[0])
    assert tasks[0].prompt == row["prompt"][0]["content"]
    assert tasks[0].env == "verifiers"


def test_validation_and_test_are_from_the_evaluation_set() -> None:
    sizes = {"train": 30, "validation": 5, "test": 5}
    tasks = tasks_of("sums", sizes, args={"evaluated": 40})
    numbers = {
        split: [json.loads(t.answers[0])["example_id"] for t in tasks if t.split == split]
        for split in sizes
    }
    assert sorted(numbers["train"]) == list(range(30))
    assert min(numbers["validation"] + numbers["test"]) >= 1000
    assert not set(numbers["validation"]) & set(numbers["test"])


@pytest.mark.parametrize(
    ("id", "line"),
    [
        ("no-such-env", "ImportError: no environment no-such-env"),
        ("in-groups", "scores the rollouts of a group together"),
    ],
)
def test_environments_that_cannot_be_played_are_refused(id: str, line: str) -> None:
    with pytest.raises(ValueError, match=f"the tasks of '{id}' cannot be read: .*{line}"):
        tasks_of(id, {"train": 1})


def test_another_orchestra_is_refused() -> None:
    task = Task(id="t", prompt="", answers=("{}",), env="verifiers", source="s", split="train")
    env = VerifiersEnv(task, id="sums")
    with pytest.raises(EnvError, match=r"needs orchestra=\{name: program"):
        asyncio.run(env.step("\\boxed{7}"))
