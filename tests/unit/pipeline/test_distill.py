"""Distillation of a team into one model: from recorded replies to a run of one agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.pipeline.distill import (
    DistillSettings,
    TeamCost,
    describe,
    distill,
    problem_only,
)
from retrieval.build import build_index
from rollout.base.ownership import FolderError
from rollout.config.agents import build_team
from rollout.config.environment import build_env
from rollout.config.tasks import prepared_tasks
from rollout.engines import ChatState, PolicyReply
from rollout.records.files import write_trajectories
from rollout.records.trajectory import EMPTY_COMPLETION, Message, Sampling
from rollout.teams.collect import Collector
from tests.support.run_folder import make_run


def test_a_template_keeps_only_the_problem() -> None:
    template = "{problem}\n\n{team_context}Answer within \\boxed{{}}."
    assert problem_only(template) == "{problem}\n\nAnswer within \\boxed{{}}."
    # Search teams call the problem a question.
    assert problem_only("answer {question}\n{history}") == "answer {problem}\n"


def test_the_comparison_is_in_shares_of_the_team() -> None:
    team = TeamCost(accuracy=0.8, sampled=50.0, read=150.0)
    student = TeamCost(accuracy=0.76, sampled=20.0, read=40.0)
    assert describe(team, student) == [
        "team: 80.0 % right, 50.0 tokens sampled and 150.0 read per task",
        "one model: 76.0 % right, 20.0 tokens sampled and 40.0 read per task",
        # 0.76 / 0.8, 20 / 50 and 60 / 200
        "one model compared with the team: 95% of the accuracy, 40% of the tokens sampled, 30% of all tokens",
    ]


@dataclass
class Scripted:
    """Policy of the demos' teams, which gives an answer to each prompt; a verifier always agrees.

    Nobody of the search team searches.
    """

    answers: dict[str, str]

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        prompt = messages[-1].content
        if prompt.startswith("Check: "):
            text = "<verify>approve</verify>"
        elif prompt.startswith("verify "):
            text = "<verify>yes</verify>"
        elif prompt.startswith("answer "):
            question = prompt.removeprefix("answer ").strip()
            text = f"<answer> {self.answers[question]} </answer>"
        else:
            text = f"\\boxed{{{self.answers[prompt]}}}"
        return PolicyReply(text=text, raw=text, prompt_ids=(), completion=EMPTY_COMPLETION)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a finished run; see `finished_run`."""
    return finished_run(tmp_path)


def finished_run(folder: Path, *overrides: str, experiment: str = "demo_math") -> Path:
    """Make a finished run whose team gave a right answer to every second of its 12 tasks; return it."""
    run = make_run(folder, "evaluation.samples=1", *overrides, experiment=experiment)
    config = RunConfig.load(run / "config.yaml")
    tasks = prepared_tasks(run / "tasks", "train")
    answers = {
        task.prompt: task.answers[0] if number % 2 == 0 else "no"
        for number, task in enumerate(tasks)
    }
    policy = Scripted(answers)
    collector = Collector(
        team=build_team(config.agents, dict.fromkeys(config.policies, policy)),
        make_env=build_env(config.env, **dict.fromkeys(config.env.needs)),
        orchestra=config.orchestra.call,
        seed=1,
        step=0,
    )
    groups = asyncio.run(collector.collect(tasks, 2))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    (run / "train" / "trajectories").mkdir(parents=True)
    write_trajectories(run / "train" / "trajectories" / "step_000000.parquet", trajectories)
    # No policy was trained, so the models are those of the config.
    (run / "train" / "done.json").write_text(json.dumps({"policies": {}, "sha256": {}}))
    return run


@pytest.mark.slow
def test_one_model_learns_the_right_answers(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    to = tmp_path / "one"
    settings = DistillSettings(start="base", lr=3e-3, epochs=30, batch=6)
    team, student = distill(run, to, settings)
    # Two samples of six tasks give the same reply, which is learned once.
    assert "6 right answers of solver\n" in capsys.readouterr().out
    assert [record for record in caplog.records if record.name.startswith("megatron")] == []
    assert 0 <= team.accuracy <= 1
    assert student.sampled > 0
    assert student.read < team.read

    config = RunConfig.load(to / "config.yaml")
    assert list(config.agents) == ["player"]
    assert config.orchestra.name == "single"
    assert config.agents["player"].user == "{problem}"
    # In a training of the new run, the agent's trained model is the teacher.
    assert config.models == {
        "student": str(to / "bootstrap" / "model"),
        "teacher": str(run / "base"),
    }
    assert config.teachers["student"].policy == "teacher"
    assert config.trained == ("student",)
    assert json.loads((to / "evaluation" / "base.json").read_text())["replies"] == 6

    with pytest.raises(FolderError, match="something is there already"):
        distill(run, to, settings)


@pytest.mark.slow
def test_the_model_searches_the_index_that_the_run_of_the_team_has_built(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "retriever.ranking=bm25", experiment="demo_search")
    build_index(run / "tasks" / "passages.jsonl", run / "index", None)
    to = tmp_path / "one"
    distill(run, to, DistillSettings(role="lone_searcher", start="base", epochs=1))
    config = RunConfig.load(to / "config.yaml")
    assert config.agents["player"].user == "answer {problem}\n"
    assert config.retriever is not None
    assert config.retriever.folder == run / "index"
    assert (to / "evaluation" / "base.json").is_file()


def test_a_folder_that_exists_is_refused_also_the_current_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the new run is that of its folder, and the trained model is named by its path."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    for to in (Path(), Path("../empty"), empty):
        with pytest.raises(FolderError, match="something is there already; name another folder"):
            distill(run, to, DistillSettings())
    assert list(empty.iterdir()) == []


def test_runs_that_cannot_be_distilled_are_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "one"
    with pytest.raises(ConfigError, match="--agent coder: not in the team; agents: solver, verif"):
        distill(run, to, DistillSettings(agent="coder"))
    with pytest.raises(ConfigError, match="in 12 trajectories with a right answer, no last reply"):
        distill(run, to, DistillSettings(agent="verifier"))
    assert not to.exists()
    (run / "train" / "trajectories" / "step_000000.parquet").unlink()
    with pytest.raises(ConfigError, match="0 files of trajectories have no success to learn from"):
        distill(run, to, DistillSettings())


def test_no_model_starts_from_an_agent_that_a_remote_model_plays(run: Path, tmp_path: Path) -> None:
    config_path = run / "config.yaml"
    values = yaml.safe_load(config_path.read_text())
    values["policies"]["verifier"] = {"remote": {"model": "m"}}
    values["agents"]["verifier"]["loss_weight"] = 0
    config_path.write_text(yaml.safe_dump(values))
    to = tmp_path / "one"
    message = "--agent verifier: played by a remote model, from which no model can start; name one of solver$"
    with pytest.raises(ConfigError, match=message):
        distill(run, to, DistillSettings(agent="verifier"))
    # Without --agent, the other agents are tried; none of them answers in the form of this role.
    with pytest.raises(ConfigError, match="no last reply of 'solver' is right in role 'verifier'"):
        distill(run, to, DistillSettings(role="verifier"))
