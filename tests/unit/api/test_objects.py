"""Objects of the Python API become sections of a config; what does not fit is said in one line."""

from __future__ import annotations

import inspect
import json
import operator
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mcore_mas as mm
from docs.writers.api import API_PAGE, pages, public_methods
from mcore_mas import api
from mcore_mas.api.objects import TaskError, allocator_of, known_here, split_tasks
from mcore_mas.config.run import ConfigError
from mcore_mas.runtime.recipe import input_digests
from rollout.base.lookup import LOCAL_OBJECTS, UnknownName, lookup
from rollout.records.trajectory import Task
from rollout.rewards.allocation import shared_outcome
from tests.support.played import group, trajectory, turn

AGENTS = [
    mm.AgentSpec("writer", "{problem}"),
    mm.AgentSpec("editor", "{problem} {draft}", policy="second"),
]
TASKS = [(f"{n}+1", n + 1) for n in range(20)]


async def relay(task, team, env):
    draft = await team.act("writer", problem=task.prompt)
    await team.act("editor", problem=task.prompt, draft=draft.text)


def plain(task):
    return task.prompt


def waits(task):
    return SimpleNamespace(reset=str, step=str)


def yields(trajectory):
    yield 1.0


def breaks(task):
    return int(task.prompt)


def made(tmp_path: Path, **settings: Any) -> mm.Run:
    model = tmp_path / "m"
    if not model.exists():
        mm.make_tiny_model(model)
    given = {
        "tasks": TASKS,
        "policies": str(model),
        "folder": tmp_path / "own",
        "lr": 1e-3,
        **settings,
    }
    return mm.Run(given.pop("agents", AGENTS), given.pop("orchestra", relay), **given)


def test_objects_are_the_sections_of_a_config(tmp_path: Path) -> None:
    config = made(
        tmp_path, steps=3, group_size=2, advantage="grpo", engine={"max_length": 300}, seed=5
    ).config
    assert (config.run, config.results, config.seed) == ("own", tmp_path, 5)
    assert (config.trainer.steps, config.trainer.group_size, config.trainer.tasks_per_step) == (
        3,
        2,
        8,
    )
    assert {name: agent.policy for name, agent in config.agents.items()} == {
        "writer": "shared",
        "editor": "second",
    }
    assert {name: (p.model, p.lr) for name, p in config.policies.items()} == dict.fromkeys(
        ("shared", "second"), (str(tmp_path / "m"), 1e-3)
    )
    assert config.orchestra.name == f"{__name__}:relay" and config.orchestra.call.func is relay
    assert (config.engine.max_length, config.engine.slots, config.advantage.name) == (
        300,
        192,
        "grpo",
    )
    assert config.tracking.uri == f"sqlite:///{tmp_path}/mlflow.db"
    paid = made(
        tmp_path, reward=lambda trajectory: 1.0, penalties={"invalid": {"coef": 0.25}}
    ).config.reward
    assert (
        paid.penalties == {"invalid": {"coef": 0.25}}
        and paid.options["reward"] == "here:own.reward"
    )
    assert not (tmp_path / "own").exists()  # nothing starts, nothing is written


def test_a_team_that_ships_brings_all_but_what_is_given(tmp_path: Path) -> None:
    team = made(tmp_path, agents="chain", orchestra=None, lr=1e-4, sharing="partly").config
    assert list(team.agents) == ["generator", "verifier", "refiner"] and team.env.name == "math"
    assert {name: (p.model, p.lr) for name, p in team.policies.items()} == dict.fromkeys(
        ("writer", "verifier"), (str(tmp_path / "m"), 1e-4)
    )
    assert team.reward.options == {"history": "before", "formula": "quality"}
    own = made(tmp_path, agents="chain", orchestra=None, env="code", reward=lambda trajectory: 1.0)
    assert (own.config.env.name, list(own.config.reward.options)) == (
        "code",
        ["reward"],
    )  # without the team's options
    assert {task.env for tasks in own._tasks.values() for task in tasks} == {"code"}
    assert own.config.policies["shared"].lr == 1e-3


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (
            {"agents": "chian", "orchestra": None},
            ConfigError,
            "no team 'chian' in the configs; nearest: chain",
        ),
        (
            {"orchestra": None},
            TaskError,
            r"^orchestra is missing; expected an async function \(task, team, env\), or",
        ),
        ({"stepz": 3}, TaskError, "Run has no setting 'stepz'; .*; nearest: steps"),
        (
            {"max_length": 256},
            TaskError,
            r"^Run has no setting 'max_length'; write engine=\{\"max_length\": \.\.\.\}$",
        ),
        (
            {"samples": 2},
            TaskError,
            r"setting 'samples'; write evaluation=\{\"samples\": \.\.\.\}$",
        ),
        ({"kl": {"coef": 0.1}}, TaskError, r"setting 'kl'; write loss=\{\"kl\": \.\.\.\}$"),
        (
            {"temperature": 0.5},
            TaskError,
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
        ({"lr": 0}, ConfigError, "lr is missing"),
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
        ({"tasks": TASKS[:2]}, TaskError, "2 tasks; expected 3 or more"),
        (
            {"tasks": [1, 2, 3]},
            TaskError,
            r"tasks.train\[0\] is '1'; expected a Task, \(prompt, answer\)",
        ),
        (
            {"tasks": {"train": TASKS, "tset": TASKS}},
            TaskError,
            "tasks has keys train, tset; expected train, valid",
        ),
        (
            {"tasks": {"test": TASKS}},
            TaskError,
            "tasks has keys test; expected train, validation, test",
        ),
        ({"folder": "results/a b"}, ConfigError, "run"),
        (
            {"agents": AGENTS[0]},
            TaskError,
            r"agents: AgentSpec\(name='writer'.*; expected a list of AgentSpec, or",
        ),
        (
            {"agents": ["writer"]},
            TaskError,
            r"agents: \['writer'\]; expected a list of AgentSpec, or the name of a",
        ),
        ({"agents": []}, TaskError, r"agents: \[\]; expected a list of AgentSpec"),
        (
            {"tasks": 5},
            TaskError,
            r"tasks.train is 5; expected tasks, \(prompt, answer\) pairs, rows, or a file",
        ),
        ({"tasks": "no.jsonl"}, TaskError, "no.jsonl: not here"),
        (
            {"tasks": [("1+1", 2)] * 9},
            TaskError,
            "'1\\+1' comes twice, and would be in train and test; take it out",
        ),
        (
            {"agents": [AGENTS[0], AGENTS[0]]},
            TaskError,
            "agents: 'writer' is there twice; expected different names",
        ),
        (
            {"reward": 3},
            TaskError,
            r"reward own.reward must take \(trajectory\); it is of type int; expected a",
        ),
        (
            {"tasks_per_step": 17},
            TaskError,
            r"data.train: 16 tasks are fewer than trainer.tasks_per_step 17; add tasks",
        ),
        (
            {"env": plain},
            TaskError,
            r"env '.*:plain' lacks a method reset; expected reset\(task\) and async step",
        ),
        (
            {"env": waits},
            TaskError,
            r"env '.*:waits': its method step must take \(action\) as an async function",
        ),
        (
            {"env": breaks},
            TaskError,
            r"env '.*:breaks' cannot be made of task '.*' \(ValueError: invalid literal",
        ),
        (
            {"engine": {"max_length": 8192}, "microbatch_tokens": 8192},
            TaskError,
            "8192 .*4096 positions",
        ),
        (
            {"reward": lambda: 3},
            TaskError,
            r"reward own.reward must take \(trajectory\), not \(\); expected a function",
        ),
        (
            {"reward": lambda one, other: 3},
            TaskError,
            r"must take \(trajectory\), not \(one, other\); expected a func",
        ),
        (
            {"reward": yields},
            TaskError,
            r"must take \(trajectory\) and may not yield; expected a function",
        ),
        (
            {"policies": "models/none"},
            TaskError,
            r"policies.shared: models/none: no model here \(config.json is miss",
        ),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, settings: dict[str, Any], error: type, words: str
) -> None:
    with pytest.raises(error, match=words) as refused:
        made(tmp_path, **settings)
    assert "\n" not in str(refused.value)


def test_numbers_of_numpy_and_paths_from_home_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    mm.make_tiny_model(tmp_path / "tiny")
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps({"prompt": q, "answer": a}) + "\n" for q, a in TASKS)
    )
    sizes = {"steps": np.int64(3), "lr": np.float32(0.5), "engine": {"slots": np.int32(4)}}
    run = made(tmp_path, tasks="~/own.jsonl", policies="~/tiny", folder="~/run", **sizes)
    assert (run.folder, run.config.trainer.steps, run.config.engine.slots) == (
        tmp_path / "run",
        3,
        4,
    )
    assert {policy.lr for policy in run.config.policies.values()} == {0.5}
    assert run._prepared().is_file()


def test_tasks_come_in_the_forms_that_people_have_them_in() -> None:
    rows = [
        {"question": "a?", "answer": 1},
        {"problem": "b?", "solution": ["2", "two"]},
        ("c?", "3"),
    ]
    own = Task(id="mine", prompt="d?", answers=("4",), env="search", source="s", split="")
    found = split_tasks([*rows, own, *TASKS])
    assert [len(found[split]) for split in ("train", "validation", "test")] == [20, 2, 2]
    assert [(t.id, t.prompt, t.answers, t.env) for t in found["train"][:4]] == [
        ("train-0", "a?", ("1",), ""),
        ("train-1", "b?", ("2", "two"), ""),
        ("train-2", "c?", ("3",), ""),
        ("mine", "d?", ("4",), "search"),
    ]
    assert found["test"][1].prompt == "19+1"
    no_validation = split_tasks({"train": TASKS, "test": TASKS[:2]})
    assert {split: len(tasks) for split, tasks in no_validation.items()} == {
        "train": 18,
        "validation": 2,
        "test": 2,
    }
    assert no_validation["validation"][1].prompt == "19+1"
    by_split = split_tasks({"train": TASKS, "validation": TASKS[:1], "test": TASKS[:2]})
    assert {split: len(tasks) for split, tasks in by_split.items()} == {
        "train": 20,
        "validation": 1,
        "test": 2,
    }


def test_tasks_are_read_from_files_of_a_split_each(tmp_path: Path) -> None:
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("".join(json.dumps({"prompt": q, "answer": a}) + "\n" for q, a in TASKS))
    test.write_text(json.dumps({"prompt": "1+1", "answer": 2}) + "\n")
    assert [len(tasks) for tasks in split_tasks(str(train)).values()] == [16, 2, 2]
    given = split_tasks(
        {"train": train, "test": str(test)}
    )  # of a test that is given, train may have tasks
    assert [[task.prompt for task in given[split]] for split in ("validation", "test")] == [
        ["18+1", "19+1"],
        ["1+1"],
    ]


@pytest.mark.parametrize("said", [None, {"writer": 1.0}, "much"])
def test_a_reward_that_is_no_number_is_one_line(said: object) -> None:
    def worth(trajectory):
        return said

    played = group(trajectory(turn(0, "editor")))
    with pytest.raises(
        TaskError,
        match=r"^reward worth gave .* for a turn of agent 'editor'; expected a number, or",
    ):
        allocator_of(worth)(played)


def test_a_reward_of_a_trajectory_is_an_allocator() -> None:
    played = group(
        trajectory(turn(0, "writer"), turn(1, "editor"), outcome=1.0),
        trajectory(turn(0, "writer"), error="no"),
    )
    both = allocator_of(lambda t: 3)(played)
    assert [t.reward for t in both.trajectories[0].turns] == [3.0, 3.0]
    each = allocator_of(lambda t: {"writer": 1, "editor": len(t.turns)})(played)
    assert [t.reward for t in each.trajectories[0].turns] == [1.0, 2.0]
    assert allocator_of(shared_outcome) is shared_outcome


def test_a_reward_may_be_written_in_c(tmp_path: Path) -> None:
    paid = allocator_of(operator.attrgetter("outcome"))(
        group(trajectory(turn(0), outcome=0.5))
    ).trajectories[0]
    assert paid.turns[0].reward == 0.5
    run = made(tmp_path, reward=len)  # of a module without a file
    assert run.config.reward.options["reward"] == "builtins:len"
    assert not [name for name in input_digests(run.config) if "builtins" in name]


def test_an_object_has_its_import_path_or_a_name_of_this_process() -> None:
    assert known_here("math", "x") == "math"
    assert known_here(relay, "x") == f"{__name__}:relay"
    own = [lambda: 1, lambda: 2]
    assert [known_here(thing, "run.reward") for thing in own] == ["here:run.reward"] * 2
    assert LOCAL_OBJECTS["here:run.reward"] is own[1]  # as in a notebook, the last one counts
    with pytest.raises(
        UnknownName, match=r"^env 'here:none.env' is an object of the script .* as run.chat\(\), or"
    ):
        lookup("env", "here:none.env", {})


def test_a_script_whose_lines_are_guarded_is_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    vars(main).update(world=lambda task: task, __file__=str(tmp_path / "mine.py"), __spec__=None)
    main.world.__module__, main.world.__qualname__ = "__main__", "world"
    monkeypatch.setitem(sys.modules, "__main__", main)
    (tmp_path / "mine.py").write_text("run = 1\n")
    assert known_here(main.world, "x.env") == "here:x.env"  # an import would run it again
    (tmp_path / "mine.py").write_text('if __name__ == "__main__":\n    run = 1\n')
    assert known_here(main.world, "x.env") == "mine:world"
    assert lookup("env", "mine:world", {}) is main.world  # here it is not imported a second time
    del main.__file__  # a notebook
    assert known_here(main.world, "x.env") == "here:x.env"


def test_the_public_names_stay() -> None:
    """Whoever takes a name away or renames an argument breaks programs of others: a line of the changelog."""
    names = (
        "Advantages AgentSpec Coach Conversation Env Generator Group Run RunLimits Sandbox Status Step Task "
        "TeamSession ToolCall Trajectory Turns last_boxed last_tag load_tasks make_tiny_model register_agent"
    )
    assert api.__all__ == names.split()
    assert {"Run", "load_tasks", "__version__"} <= set(dir(mm)) and mm.__version__ == version(
        "mcore-mas"
    )
    assert all(getattr(mm, name) is getattr(api, name) for name in api.__all__)
    assert list(public_methods(mm.Run)) == [
        *(
            "train",
            "arun",
            "metrics",
            "trajectories",
            "trajectories_of",
            "explain",
            "evaluate",
            "export",
            "chat",
        ),
    ]
    taken = {
        mm.Run: "agents orchestra tasks policies env reward folder settings",
        mm.Run.evaluate: "self k state",
        mm.Run.export: "self to policy",
        mm.Run.chat: "self prompts state",
        mm.Run.explain: "self advantage step task options",
        mm.AgentSpec: "name user system parse policy settings",
        mm.load_tasks: "given split subset columns format limit",
        mm.make_tiny_model: "out_dir",
        mm.register_agent: "name system user",
    }
    assert {thing: " ".join(inspect.signature(thing).parameters) for thing in taken} == taken
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        mm.Trainr  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"no attribute 'AgentSpce'; see docs/api.md; nearest: AgentSpec$"
    ):
        mm.AgentSpce  # noqa: B018


def test_the_page_of_the_api_is_current() -> None:
    page = pages()[API_PAGE]
    assert API_PAGE.read_text() == page, "run python -m docs.writers api"
    assert "### `Run.evaluate`" in page and "- `tasks`: tasks, (prompt" in page
