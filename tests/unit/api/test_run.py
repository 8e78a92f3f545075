"""A run of the Python API: its arguments become a config, and its stages stop on Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mcore_mas as mm
from mcore_mas.api.references import ArgumentError
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.evaluation import converse as chats
from mcore_mas.evaluation import evaluate as evaluation
from mcore_mas.evaluation.export_check import ExportError
from mcore_mas.evaluation.replay import replay_remedy
from mcore_mas.runtime.checkpoint import CheckpointError, Checkpoints
from mcore_mas.runtime.input_digests import input_digests
from mcore_mas.runtime.recipe import identity_of
from mcore_mas.runtime.stop_signal import Stopped, StopSignal
from mcore_mas.training import train as training
from rollout.base.ownership import FolderError
from rollout.records.files import read_tasks
from rollout.records.trajectory import Trajectory
from tests.support import api
from tests.support.api import AGENTS, TASKS, make_run, relay
from tests.support.checkpoints import save
from tests.support.played import trajectory

ROWS = [{"dataset": "all", "metric": "avg@4", "value": 0.5}]


def env_without_methods(task):
    return task.prompt


def env_with_wrong_methods(task):
    return SimpleNamespace(reset=str, step=str)


def env_that_breaks(task):
    return int(task.prompt)


def reward_that_yields(trajectory):
    yield 1.0


def test_trainer_and_sections(tmp_path: Path) -> None:
    config = make_run(
        tmp_path,
        steps=3,
        group_size=2,
        advantage="grpo",
        engine={"max_length": 300},
        seed=5,
    ).config
    assert (config.run, config.results, config.seed) == ("own", tmp_path, 5)
    trainer = config.trainer
    assert (trainer.steps, trainer.group_size, trainer.tasks_per_step) == (3, 2, 8)
    assert (config.engine.max_length, config.engine.slots) == (300, 192)
    assert config.advantage.name == "grpo"
    assert config.tracking.uri == f"sqlite:///{tmp_path}/mlflow.db"


def test_agents_policies_and_orchestra(tmp_path: Path) -> None:
    config = make_run(tmp_path).config
    policies = {name: agent.policy for name, agent in config.agents.items()}
    assert policies == {"writer": "shared", "editor": "second"}
    for policy in config.policies.values():
        assert (policy.model, policy.lr) == (str(tmp_path / "model"), 1e-3)
    assert list(config.policies) == ["shared", "second"]
    assert config.orchestra.name == f"{api.__name__}:relay"
    assert config.orchestra.call.func is relay


def test_reward_and_penalties(tmp_path: Path) -> None:
    penalties = {"invalid": {"coef": 0.25}}
    reward = make_run(tmp_path, reward=lambda trajectory: 1.0, penalties=penalties).config.reward
    assert reward.penalties == penalties
    assert reward.options["reward"] == "here:own.reward"


def test_nothing_is_written_before_training(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert not (tmp_path / "own").exists()


def test_a_team_that_ships_brings_orchestra_env_and_reward(tmp_path: Path) -> None:
    run = make_run(tmp_path, agents="chain", orchestra=None, lr=1e-4, sharing="partly")
    assert list(run.config.agents) == ["generator", "verifier", "refiner"]
    assert run.config.env.name == "math"
    assert run.config.reward.options == {"history": "before", "formula": "quality"}
    assert list(run.config.policies) == ["writer", "verifier"]
    for policy in run.config.policies.values():
        assert (policy.model, policy.lr) == (str(tmp_path / "model"), 1e-4)


def test_an_env_and_a_reward_replace_those_of_a_team_that_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: {"rows": ROWS})
    run = make_run(
        tmp_path,
        agents="chain",
        orchestra=None,
        env="code",
        reward=lambda trajectory: 1.0,
    )
    assert run.config.env.name == "code"
    assert list(run.config.reward.options) == ["reward"]  # without the options of the team's
    assert run.config.policies["shared"].lr == 1e-3
    run.evaluate()
    for split in ("train", "validation", "test"):
        tasks = read_tasks(run.folder / "tasks" / f"{split}.parquet")
        assert {task.env for task in tasks} == {"code"}


def test_a_reward_may_be_written_in_c(tmp_path: Path) -> None:
    run = make_run(tmp_path, reward=len)  # of a module without a file
    assert run.config.reward.options["reward"] == "builtins:len"
    assert not [name for name in input_digests(run.config) if "builtins" in name]


def test_numbers_of_numpy_and_paths_from_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    mm.make_tiny_model(tmp_path / "tiny")
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in TASKS]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    run = make_run(
        tmp_path,
        tasks="~/own.jsonl",
        policies="~/tiny",
        folder="~/run",
        steps=np.int64(3),
        lr=np.float32(0.5),
        engine={"slots": np.int32(4)},
    )
    assert run.folder == tmp_path / "run"
    assert run.config.trainer.steps == 3
    assert run.config.engine.slots == 4
    assert {policy.lr for policy in run.config.policies.values()} == {0.5}

    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: {"rows": ROWS})
    assert run.evaluate() == {"avg@4": 0.5}
    assert (run.folder / "config.yaml").is_file()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"agents": "chian", "orchestra": None},
            ConfigError,
            "no team 'chian' in the configs; nearest: chain",
        ),
        (
            {"orchestra": None},
            ArgumentError,
            r"^orchestra is missing; expected an async function \(task, team, env\), or",
        ),
        ({"stepz": 3}, ArgumentError, "^Run has no setting 'stepz'; nearest: steps"),
        ({"learning_rate": 3}, ArgumentError, r"'learning_rate'; write lr=\.\.\."),
        ({"max_steps": 3}, ArgumentError, r"'max_steps'; write steps=\.\.\.$"),
        (
            {"k": 3},
            ArgumentError,
            r"^Run has no setting 'k'; write evaluation=\{\"samples\": \.\.\.\}$",
        ),
        ({"model": "m"}, ArgumentError, r"'model'; write policies=\.\.\."),
        ({"policies": None}, ArgumentError, "^policies is missing"),
        ({"policies": ["m"]}, ArgumentError, r"^policies is \['m'\]; expected a model's folder"),
        ({"folder": __file__}, ArgumentError, "^folder: .*test_run.py is a file; name the folder"),
        ({"folder": f"{__file__}/run"}, ArgumentError, "^folder: .*test_run.py is a file; name"),
        (
            {"tasks": [(f"{n}+1", "") for n in range(20)]},
            ArgumentError,
            r"^tasks: 16 of 16 have no answer, and env 'math' compares replies with it; the first is '0\+1'",
        ),
        (
            {"tasks": [{"prompt": f"{n}+1", "answer": None} for n in range(20)]},
            ArgumentError,
            "^tasks: 16 of 16 have no answer",
        ),
        (
            {"max_length": 256},
            ArgumentError,
            r"^Run has no setting 'max_length'; write engine=\{\"max_length\": \.\.\.\}$",
        ),
        (
            {"samples": 2},
            ArgumentError,
            r"setting 'samples'; write evaluation=\{\"samples\": \.\.\.\}$",
        ),
        ({"kl": {"coef": 0.1}}, ArgumentError, r"setting 'kl'; write loss=\{\"kl\": \.\.\.\}$"),
        (
            {"temperature": 0.5},
            ArgumentError,
            r"write AgentSpec\(..., settings=\{\"temperature\": ...\}\) or evaluation=\{\"temperature\"",
        ),
        (
            {"penalties": {"invald": {}}},
            ConfigError,
            "unknown penalty 'invald'; nearest: invalid; known",
        ),
        ({"steps": 0}, ConfigError, "trainer.steps: Input should be greater than or equal to 1"),
        ({"engine": {"slotz": 3}}, ConfigError, "engine.slotz: unknown key; nearest: slots"),
        ({"env": "maths"}, ConfigError, "unknown env 'maths'.*; nearest: math"),
        ({"env": lambda: None}, ConfigError, r"env 'here:own.env' must take \(task, \*, ...\)"),
        (
            {"orchestra": lambda task, team, env: None},
            ConfigError,
            "must take .* as an async function",
        ),
        ({"lr": 0}, ConfigError, "lr is 0, and agent .writer. trains this policy; set it above 0"),
        (
            {"agents": AGENTS[:1]},
            ConfigError,
            "asks agent 'editor', who is not in the team; agents: writer",
        ),
        (
            {"agents": [mm.AgentSpec("writer", "{q}"), AGENTS[1]]},
            ConfigError,
            r"does not fill the slot \{q\}",
        ),
        (
            {"policies": {"shared": "m"}},
            ConfigError,
            "agent 'editor' plays policy 'second', which is not defined",
        ),
        ({"tasks": TASKS[:2]}, ArgumentError, "2 tasks; expected 3 or more"),
        (
            {"tasks": [1, 2, 3]},
            ArgumentError,
            r"tasks.train\[0\] is '1'; expected a Task, \(prompt, answer\)",
        ),
        (
            {"tasks": {"train": TASKS, "tset": TASKS}},
            ArgumentError,
            "tasks has keys train, tset; expected train, valid",
        ),
        (
            {"tasks": {"test": TASKS}},
            ArgumentError,
            "tasks has keys test; expected train, validation, test, of which train is required",
        ),
        ({"folder": "results/a b"}, ConfigError, "run"),
        ({"folder": "a\nb"}, ConfigError, r"^run 'a\\nb': run: String should match"),
        (
            {"folder": "x" * 300},
            ArgumentError,
            "^folder: x{80}… has 300 characters; .* at most 100$",
        ),
        (
            {"agents": AGENTS[0]},
            ArgumentError,
            r"agents: AgentSpec\(name='writer'.*; expected a list of AgentSpec, or",
        ),
        (
            {"agents": ["writer"]},
            ArgumentError,
            r"agents: \['writer'\]; expected a list of AgentSpec, or the name of a",
        ),
        ({"agents": []}, ArgumentError, r"agents: \[\]; expected a list of AgentSpec"),
        (
            {"tasks": 5},
            ArgumentError,
            r"tasks.train is 5; expected tasks, \(prompt, answer\) pairs, rows, or a file",
        ),
        ({"tasks": "no.jsonl"}, ArgumentError, "no.jsonl: not here"),
        (
            {"tasks": [("1+1", 2)] * 9},
            ArgumentError,
            "'1\\+1' comes twice, and would be in train and test; take it out",
        ),
        (
            {"agents": [AGENTS[0], AGENTS[0]]},
            ArgumentError,
            "agents: 'writer' is there twice; expected different names",
        ),
        (
            {"reward": 3},
            ArgumentError,
            r"reward own.reward must take \(trajectory\); it is of type int; expected a",
        ),
        (
            {"tasks_per_step": 17},
            ArgumentError,
            r"data.train: 16 tasks are fewer than trainer.tasks_per_step 17; add tasks",
        ),
        (
            {"env": env_without_methods},
            ArgumentError,
            r"env '.*:env_without_methods' lacks a method reset; expected reset\(task\) and async step",
        ),
        (
            {"env": env_with_wrong_methods},
            ArgumentError,
            r"env '.*:env_with_wrong_methods': its method step must take \(action\) as an async function",
        ),
        (
            {"env": env_that_breaks},
            ArgumentError,
            r"env '.*:env_that_breaks' cannot be made of task '.*' \(ValueError: invalid literal",
        ),
        (
            {"engine": {"max_length": 8192}, "microbatch_tokens": 8192},
            ArgumentError,
            "8192 .*4096 positions",
        ),
        (
            {"reward": lambda: 3},
            ArgumentError,
            r"reward own.reward must take \(trajectory\), not \(\); expected a function",
        ),
        (
            {"reward": lambda one, other: 3},
            ArgumentError,
            r"must take \(trajectory\), not \(one, other\); expected a func",
        ),
        (
            {"reward": reward_that_yields},
            ArgumentError,
            r"must take \(trajectory\) and may not yield; expected a function",
        ),
        (
            {"policies": "models/none"},
            ArgumentError,
            r"policies.shared: models/none: no model here \(config.json is miss",
        ),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, settings: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message) as error_info:
        make_run(tmp_path, **settings)
    assert "\n" not in str(error_info.value)


def test_a_prompt_that_is_too_long_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts have 160 tokens or more, and 44 fit beside a reply of 256."""
    monkeypatch.setattr(training, "train", lambda *_, **__: pytest.fail("the training starts"))
    tasks = [(f"{n}+1 " * 40, n + 1) for n in range(20)]
    run = make_run(tmp_path, tasks=tasks, engine={"max_length": 300})
    message = (
        r"task 'train-0': .*writer.*; raise engine.max_length \(300\), or shorten the prompts$"
    )
    with pytest.raises(ArgumentError, match=message):
        run.train()


def save_last_checkpoint(
    config_file: Path, after_step: Callable[..., Any], stop: StopSignal
) -> None:
    """Stand for a whole training: save a checkpoint of the last step, as this run's."""
    config = RunConfig.load(config_file)
    identity = replace(identity_of(config), inputs=input_digests(config))
    checkpoints = Checkpoints(config.folder / "train" / "checkpoints", identity, keep=2)
    if not checkpoints.has(config.trainer.steps):
        save(checkpoints, config.trainer.steps)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files in a folder by relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_refused_run_leaves_a_trained_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "train", save_last_checkpoint)
    make_run(tmp_path, steps=2).train()
    folder = tmp_path / "own"
    before = contents(folder)
    assert {"config.yaml", "given/train.parquet", "tasks/train.parquet"} <= before.keys()
    make_run(tmp_path, steps=2).train()  # nothing has changed
    assert contents(folder) == before

    editor = replace(AGENTS[1], user="{problem} Draft: {draft}")
    other_prompt = make_run(tmp_path, steps=2, agents=[AGENTS[0], editor])
    changed_prompt = (
        r'trained with agents\.editor\.user="\{problem\} \{draft\}", and the config says'
    )
    other_tasks = make_run(tmp_path, steps=2, tasks=[(f"2*{n}", 2 * n) for n in range(20)])
    changed_tasks = "trained with other training tasks than those of data.train"
    # The maximum length is no part of the recipe, but this one leaves no room for a reply.
    short = make_run(tmp_path, steps=3, engine={"max_length": 260})
    for run, error, message in (
        (other_prompt, CheckpointError, changed_prompt),
        (other_tasks, CheckpointError, changed_tasks),
        (short, ArgumentError, r"raise engine.max_length \(260\)"),
    ):
        with pytest.raises(error, match=message):
            run.train()
        assert contents(folder) == before

    with pytest.raises(CheckpointError, match=changed_tasks):
        other_tasks.evaluate(state="base")
    assert contents(folder) == before


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, folder="/proc/own")  # nobody may write there, not even root
    with pytest.raises(
        FolderError, match=r"^/proc/own: cannot write here .*; choose another results"
    ):
        run.train()


def test_no_command_is_advised_that_needs_the_script(tmp_path: Path) -> None:
    """The command line does not have the objects of a script that is not imported."""
    file = tmp_path / "own/train/quarantine/0-train-1-0.json"
    importable = make_run(tmp_path).config
    assert replay_remedy(importable, file, "plays it") == f"`mcore-mas replay {file}` plays it"

    async def relay_of_script(task, team, env):
        await relay(task, team, env)

    local = make_run(tmp_path, orchestra=relay_of_script).config
    assert replay_remedy(local, file, "plays it") == (
        f"{file} has the replies and the traceback of a quarantined trajectory; before `mcore-mas replay` "
        "can play it, move the orchestra, env, reward or parser 'own.orchestra' from your script into a "
        "module, and import it from there"
    )


def test_a_replay_outside_of_the_run_is_given_its_config(tmp_path: Path) -> None:
    """`mcore-mas evaluate own --out /scores.json` quarantines beside this file."""
    config = make_run(tmp_path).config
    file = Path("/scores-quarantine/0-test-1-0.json")
    assert replay_remedy(config, file, "plays it") == (
        f"`mcore-mas replay {file} --config {tmp_path}/own/config.yaml` plays it"
    )


def test_an_unknown_env_of_a_test_task_is_refused_before_the_training(tmp_path: Path) -> None:
    test = [mm.Task(id="t", prompt="1+1", answers=("2",), env="nope", source="own", split="test")]
    run = make_run(tmp_path, tasks={"train": TASKS, "test": test})
    with pytest.raises(ValueError, match="unknown env 'nope'"):
        run.train()
    assert not run.folder.exists()


def test_no_policy_is_exported_by_default_if_none_is_trained(tmp_path: Path) -> None:
    frozen = [replace(agent, settings={"loss_weight": 0}) for agent in AGENTS]
    run = make_run(tmp_path, agents=frozen)
    with pytest.raises(ExportError, match="own: all policies are frozen; set the loss_weight"):
        run.export(tmp_path / "out")


@pytest.fixture
def three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every training take three steps, from step 0; a second one at the same time is an error."""
    is_free = threading.Lock()

    def train(
        config: Path, after_step: Callable[[int, dict[str, float]], Any], stop: StopSignal
    ) -> None:
        async def take_steps() -> None:
            for number in range(3):
                if not await after_step(number, {}):
                    await asyncio.sleep(0.2)  # the checkpoint is saved
                    raise Stopped("stopped")

        if not is_free.acquire(blocking=False):
            raise RuntimeError("another training is under way")
        try:
            asyncio.run(take_steps())
        finally:
            is_free.release()

    monkeypatch.setattr(training, "train", train)


@pytest.mark.usefixtures("three_steps")
def test_a_break_out_of_an_async_loop_is_over_before_the_next_loop_begins(tmp_path: Path) -> None:
    """A `break` does not wait for the checkpoint, and a run may be trained only once at a time."""

    async def program() -> list[float]:
        run = make_run(tmp_path)
        steps = []
        async for row in run:
            steps.append(row["step"])
            break
        return steps + [row["step"] async for row in run]

    assert asyncio.run(program()) == [0, 0, 1, 2]


@pytest.mark.usefixtures("three_steps")
def test_an_iterator_ends_when_another_one_of_its_run_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    earlier = iter(run)
    assert next(earlier)["step"] == 0
    assert [row["step"] for row in run] == [0, 1, 2]
    assert list(earlier) == []


def test_ctrl_c_stops_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun = threading.Event()

    def evaluate(config: object, state: str, out: Path, stop: StopSignal) -> dict[str, Any]:
        async def play() -> None:
            stop.listen()
            has_begun.set()
            await stop.run_until_stopped(asyncio.sleep(60))

        return {"rows": asyncio.run(play())}

    def interrupted_result(self: Any, timeout: float | None = None) -> None:
        has_begun.wait(30)
        raise KeyboardInterrupt

    run = make_run(tmp_path)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    # Ctrl-C comes while the caller waits for the thread.
    monkeypatch.setattr("concurrent.futures.Future.result", interrupted_result)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.evaluate()
    assert time.monotonic() - start < 30


def test_an_evaluation_whose_trajectories_all_failed_has_no_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: {"rows": []})
    assert make_run(tmp_path, evaluation={"max_failed": 1.0}).evaluate() == {}


class FakeTeam:
    """A team that plays prompts in its thread, and a person who types at the terminal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.played: list[str] = []
        self.typed: list[str | type[BaseException]] = []
        monkeypatch.setattr(chats, "converse", self.converse)
        monkeypatch.setattr("builtins.input", self.input)

    def converse(self, config: object, state: str, prompts: Iterator[str]) -> Iterator[Trajectory]:
        try:
            for prompt in prompts:
                assert threading.current_thread() is not threading.main_thread()
                self.played.append(prompt)
                yield trajectory()
        finally:
            self.played.append("closed")

    def input(self, prompt: str) -> str:
        assert threading.current_thread() is threading.main_thread()
        line = self.typed.pop(0)
        if isinstance(line, type):
            raise line
        return line


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> FakeTeam:
    return FakeTeam(monkeypatch)


@pytest.mark.parametrize("end", ["", EOFError])
def test_a_chat_with_a_person_ends_at_an_empty_line_or_ctrl_d(
    end: str | type[BaseException], team: FakeTeam, tmp_path: Path
) -> None:
    team.typed = ["a?", "b?", end]
    assert len(make_run(tmp_path).chat()) == 2
    assert team.played == ["a?", "b?", "closed"]


def test_ctrl_c_ends_a_chat(team: FakeTeam, tmp_path: Path) -> None:
    team.typed = ["a?", KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):
        make_run(tmp_path).chat()
    assert team.played == ["a?", "closed"]


def test_an_end_of_file_in_the_team_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lose_engine(prompt: str) -> Trajectory:
        raise EOFError(f"the engine's pipe ended at {prompt}")

    monkeypatch.setattr(chats, "converse", lambda *args: (lose_engine(p) for p in args[2]))
    with pytest.raises(EOFError, match="pipe ended at a"):
        make_run(tmp_path).chat("a?")


def test_a_chat_of_given_prompts(team: FakeTeam, tmp_path: Path) -> None:
    assert len(make_run(tmp_path).chat("a?", "b?", "c?")) == 3
    assert team.played == ["a?", "b?", "c?", "closed"]
