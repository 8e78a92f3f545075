"""What is known to fail is said before it costs anything: of every run at once, in one line each."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.cli.main import main
from mcore_mas.config.hub import downloaded_model
from mcore_mas.pipeline.check import problems
from mcore_mas.pipeline.suite import load_suite
from mcore_mas.pipeline.suite_file import SuiteError
from rollout.orchestras import ORCHESTRAS
from rollout.records.trajectory import Task
from rollout.teams.episode import Episode
from rollout.teams.source_checks import asked_agents, filled_slots, misused, template_slots
from rollout.teams.team import TeamSession
from tests.support import reference

NO_START = ["cold_start=null", "engine.max_length=256"]
SERVED = ["engine=sglang", f"engine.python={sys.executable}", "engine.max_length=512"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, 4 heads, 2 key/value heads, 4096 positions; a tokenizer in name only, so no chat template."""
    folder = tmp_path_factory.mktemp("model")
    reference.make_model("qwen2", folder, layers=6)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def said(*overrides: str, **options: bool) -> list[str]:
    return problems(load_suite("demo_math", overrides), **options)


def of(model: Path | str, *overrides: str) -> list[str]:
    own = [f"policies.{name}.model={model}" for name in ("solver", "verifier")]
    return said(*NO_START, *own, *overrides)


def test_the_demo_is_well() -> None:
    assert said() == []


def test_layouts_and_lengths_of_a_cold_start_and_the_machine_are_said_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mcore_mas.pipeline.check.shutil.which", lambda name: None)
    monkeypatch.setattr("mcore_mas.pipeline.check.count_visible_gpus", lambda: 0)
    settings = ["policies.solver.tp=3", "engine.max_length=2048", "engine.device=cuda"]
    lines = said("cluster.device=auto", *settings)
    assert lines == [
        "run 'demo_math': policies.solver: tp: 3 does not divide the model's 8 heads; valid here: [1, 2, 4], "
        "nearest: 2",
        "run 'demo_math': policies.verifier: engine.max_length 2048 is more than the 1024 positions of "
        "results/demo_math/bootstrap/model; use at most 1024",
        "run 'demo_math': engine.device: cuda, and there is no GPU here; set it to cpu",
    ]


@pytest.mark.parametrize(
    ("gpus", "overrides", "line"),
    [
        (1, [], None),  # the demo computes on CPUs
        (0, ["cluster.device=auto"], None),
        (3, ["cluster.device=auto"], None),
        (
            2,
            ["cluster.device=auto"],
            "cluster.pool: split needs 3 GPUs and there are 2 (solver: trainer 2; verifier: trainer 1); use "
            "cluster.pool: shared, which needs 2, or compute on CPUs: cluster.device: cpu, or more GPUs",
        ),
        (2, ["cluster.device=auto", "cluster.pool=shared"], None),
        (2, ["cluster.device=auto", "cluster.address=10.0.0.1:6379"], None),  # where others may be
        (
            0,
            ["cluster.device=cuda"],
            "cluster.device: cuda, and there is no GPU here; set it to auto or cpu",
        ),
        (
            8,
            [*SERVED, "policies.verifier.own.engine.options={device: cpu}"],
            "policies.solver: cluster.device: cpu shows SGLang's servers no GPU; set it to auto or cuda",
        ),
    ],
)
def test_a_training_that_has_too_few_gpus_here_is_refused_before_its_cold_start(
    monkeypatch: pytest.MonkeyPatch, gpus: int, overrides: list[str], line: str | None
) -> None:
    monkeypatch.setattr("mcore_mas.pipeline.check.shutil.which", lambda name: None)
    monkeypatch.setattr("mcore_mas.pipeline.check.count_visible_gpus", lambda: gpus)
    assert said(*overrides) == ([f"run 'demo_math': {line}"] if line else [])
    if gpus:  # from where jobs go to other machines nothing is known of them
        monkeypatch.setattr("mcore_mas.pipeline.check.shutil.which", lambda name: name)
        assert said(*overrides) == (
            [f"run 'demo_math': {line}"] if line and "SGLang" in line else []
        )


def test_a_retriever_and_an_engine_on_a_gpu_do_not_go_with_a_run_on_cpus() -> None:
    with pytest.raises(
        SuiteError,
        match=r"policies\.solver: engine\.device: cuda, and cluster\.device: cpu shows it no",
    ):
        load_suite("demo_math", ["engine.device=cuda"])
    lines = problems(load_suite("demo_search", ["retriever.device=cuda"]))
    assert any(
        "retriever.device: cuda, and cluster.device: cpu shows it no GPU" in line for line in lines
    )


def test_models_that_are_not_there_have_no_template_or_lie_in_the_hubs_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (missing, _) = of("/models/none")
    assert (
        "policies.solver: /models/none: no model here (config.json is missing); name a Hugging Face folder"
        in missing
    )
    assert "`hf download Qwen/None`, or name a folder" in of("Qwen/None")[0]
    (base, other) = of(model)
    assert (
        base.startswith("run 'demo_math': policies.solver: ")
        and "base model without a chat template" in base
    )
    assert "policies.verifier: " in other
    assert (
        of(model, *(f"policies.{name}.chat_template=chatml" for name in ("solver", "verifier")))
        == []
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    repository = tmp_path / "models--me--mine"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert downloaded_model("me/mine") == str(snapshot)
    assert [downloaded_model(name) for name in ("me/other", "../none")] == ["me/other", "../none"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            "no tokenizer.json; expected a Hugging Face folder with",
        ),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            "no *.safetensors file; expected a Hugging Face model",
        ),
        (
            lambda folder: os.truncate(folder / "model.safetensors", 100),
            "model.safetensors: not a readable safetensors",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "b.safetensors: not a readable safetensors file (No such file",
        ),
    ],
)
def test_a_models_files_are_read_as_far_as_their_headers(
    broken: Callable[[Path], object], message: str, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, folder := tmp_path / "model")
    broken(folder)
    lines = of(
        folder, *(f"policies.{name}.chat_template=chatml" for name in ("solver", "verifier"))
    )
    assert [message in line for line in lines] == [True] * len(lines) and lines


def test_programs_and_keys_that_this_machine_lacks_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("rollout.engines.remote._taken", {})  # of earlier tests
    asked = ["coach=openai", "reward.name=coach"]
    assert said(*asked) == [
        "run 'demo_math': coach.key_variable: OPENAI_API_KEY is not set here; export it with the key, or name a "
        "key_file"
    ]
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert said(*asked) == []
    (line,) = said(
        "~orchestra.options", "orchestra.name=program", "orchestra.options.command=[nowhere, a]"
    )
    assert (
        "orchestra.options.command: 'nowhere' is no program on this machine; install it, or name its path"
        in line
    )
    (line,) = said("env={name: mcp, options: {servers: {a: {command: nowhere}}}}")
    assert "env.options.servers.a.command: 'nowhere' is no program" in line
    monkeypatch.setattr("mcore_mas.tracking.writers.find_spec", lambda name: None)
    assert said("tracking=wandb") == [
        "run 'demo_math': tracking.also: wandb is not installed; pip install wandb, or remove it from the list"
    ]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            "sokoban",
            "expected rows of signs separated by spaces, all of one length); its tasks are of env 'plan_path'",
        ),
        (
            "blocksworld",
            "expected lines 'now: A B | C' and 'goal: C B A' with the same blocks); its tasks are of env",
        ),
    ],
)
def test_an_environment_begins_a_task_of_the_generator(env: str, message: str) -> None:
    (line,) = problems(load_suite("demo_path", [f"env.name={env}"]))
    assert (
        line.startswith(f"run 'demo_path': data: env '{env}' cannot begin task 'plan_path_5x5/")
        and message in line
    )


def test_missing_data_files_are_named_unless_they_are_to_be_fetched() -> None:
    own = [
        "data={train: [a.parquet], validation: [a.parquet], test: [b.parquet]}",
        "cold_start=null",
    ]
    lines = [line for line in said("~data", f"+{own[0]}", own[1]) if "data: " in line]
    assert [line.partition("data: ")[2] for line in lines] == [
        "a.parquet: not here; name another one",
        "b.parquet: not here; name another one",
    ]
    assert not said("~data", f"+{own[0]}", own[1], files=False)
    lines = problems(load_suite("drmas_t2_3b_shared_drmas"))
    (index,) = [
        line
        for line in lines
        if "retriever.folder: data/wiki-18/index.json: not here; it is made of" in line
    ]
    assert "the target `acquire` fetches it" in index
    assert any(
        "retriever.encoder_folder: models/e5-base-v2: not here; it is intfloat/e5-base-v2" in x
        for x in lines
    )


def test_a_slot_that_nobody_fills_is_refused_when_the_run_is_composed() -> None:
    with pytest.raises(
        SuiteError,
        match=r"agent 'solver': orchestra 'solver_verifier' does not fill the slot \{problm\}",
    ):
        load_suite("demo_math", ["agents.solver.user='{problm}'"])
    with pytest.raises(
        SuiteError, match=r"agent 'solver': its user template: .*; write a brace itself twice"
    ):
        load_suite("demo_math", ["agents.solver.user='a { b'"])


async def relay(task, team, env):
    reply = await team.act("drafter", problem=task.prompt)
    slots = {"problem": task.prompt, "draft": reply.text}
    await team.act("editor", **slots)


def test_the_slots_of_an_orchestra_are_read_from_its_source() -> None:
    assert filled_slots(relay, "drafter") == {"problem"}
    assert (
        filled_slots(relay, "editor") is None
    )  # this module imports others, which may write slots
    assert template_slots("a", "{problem} {draft.text} {{no}}") == ["problem", "draft"]
    with pytest.raises(ValueError, match="a slot without a name"):
        template_slots("a", "{}")


def test_what_an_agent_is_made_of_is_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registered.py").write_text(
        "import mcore_mas as mm\n"
        "@mm.register_agent('own_poet', system='', user='{problem}')\n"
        "def parse(text): return text\n"
        "POET = mm.AgentSpec('own_poet', '{problem}', settings={})\n"
        "async def alone(task, team, env):\n"
        "    await team.act('own_poet', problem=task.prompt)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import registered

    assert filled_slots(registered.alone, "own_poet") == {"problem"}


def test_slots_that_come_from_a_call_may_be_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spread.py").write_text(
        "async def relay(task, team, env):\n"
        "    await team.act('writer', **env.slots(task))\n"
        "    for _ in range(2):\n"
        "        reply = await team.act('editor', **{'problem': task.prompt})\n"
        "    if reply.value is None:\n"
        "        await team.act('rescuer')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import spread

    assert [filled_slots(spread.relay, agent) for agent in ("writer", "editor")] == [None, None]
    assert asked_agents(spread.relay) == {
        "writer",
        "editor",
    }  # the rescuer may be left out of a team
    assert filled_slots(spread, "writer") is None  # no function, so no source


OTHERS: Any = None


async def sure(task, team, env):
    if hasattr(team, "pause"):
        team.pause()
    team.rounds = 2
    later = team.act("writer", rounds=team.rounds, scores=team.scores)
    reply = team.act("editor")
    reply = await reply
    await env.step(f"{await later} {reply.text}")
    _ = env.run("1 + 1"), await env.preview("1"), env.rewards


async def bound_again(task, team, env):
    with OTHERS.of(team) as team:
        await team.anything(task.prompt)


async def nested(task, team, env):
    await asyncio.gather(
        *(one.play(task) for one in OTHERS.teams if (lambda team: team.anything)(one))
    )


def with_own_team(play):
    return wraps(play)(lambda task, team, env: play(task, OTHERS.of(team), env))


@with_own_team
async def decorated(task, team, env):
    await team.anything(task.prompt)


@pytest.mark.parametrize("orchestra", [sure, bound_again, nested, decorated, *ORCHESTRAS.values()])
def test_what_an_orchestra_asks_of_its_team_is_there_as_far_as_its_source_says(
    orchestra: Any,
) -> None:
    assert misused(orchestra, Task, TeamSession, Episode) == ""


WORLD = """
from rollout.records.trajectory import Task
from rollout.tasks import Generator


class Letters:
    def __init__(self, task): ...
    def reset(self, task): ...
    async def step(self, action): ...


class Unset:
    def __init__(self, task): ...
    async def step(self, action): ...


class Waits(Letters):
    def step(self, action): ...


def makes(task):
    return Waits(task)


async def relay(task, team, env, *, max_loops):
    await team.act("solvr", problem=task.prompt)


async def talk(task, team, env, *, max_loops):
    await team.atc("solver", problem=task.prompt)


async def hears(task, team, env, *, max_loops):
    reply = team.act("solver", problem=task.prompt)
    await env.step(reply.text)


async def leaves(task, team, env, *, max_loops):
    env.step(task.prompt)


async def asks(task, team, env, *, max_loops):
    await env.tell(task.prompt)


def tasks(seed, sizes, *, env="own_world:Letters"):
    own = {"answers": (), "env": env, "source": "own"}
    return [Task(id=f"{s}{n}", prompt="?", split=s, **own) for s, size in sizes.items() for n in range(size)]


MADE = Generator(tasks=tasks)
"""


@pytest.fixture
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_world", raising=False)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "env.name='own_world:Unset'",
            "env: env 'own_world:Unset' lacks a method reset; expected reset(task) and",
        ),
        (
            "env.name='own_world:Waits'",
            "env: env 'own_world:Waits': its method step must take (action) as an async fu",
        ),
        (
            "orchestra.name='own_world:relay'",
            "orchestra 'own_world:relay' asks agent 'solvr', who is not in the team; agents: solver, verifier"
            "; nearest: solver",
        ),
        (
            "orchestra.name='own_world:talk'",
            "orchestra 'own_world:talk': team.atc: TeamSession has no 'atc'; nearest: act",
        ),
        (
            "orchestra.name='own_world:hears'",
            "'own_world:hears': write await before team.act('solver', problem=task.p",
        ),
        (
            "orchestra.name='own_world:leaves'",
            "orchestra 'own_world:leaves': write await before env.step(task.prompt)",
        ),
        (
            "orchestra.name='own_world:asks'",
            "orchestra 'own_world:asks': env.tell: Episode has no 'tell'",
        ),
        ("orchestra.name='own_wrold:relay'", "No module named 'own_wrold'"),
        (
            "data.generator='own_world:tasks'",
            "data.generator: 'own_world:tasks' is of type function; expected a Gen",
        ),
    ],
)
def test_code_of_ones_own_that_cannot_play_is_refused(
    own_world: None, override: str, words: str
) -> None:
    with pytest.raises(SuiteError) as refused:
        load_suite(
            "demo_math",
            [override, "agents.solver.user='{problem}'", "agents.verifier.user='{problem}'"],
        )
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_tasks_that_are_too_few_or_of_an_environment_that_is_not_there(
    own_world: None, tmp_path: Path
) -> None:
    own = ["cold_start=null", *(f"policies.{n}.model={tmp_path}" for n in ("solver", "verifier"))]
    (tmp_path / "config.json").write_text("{}")

    def lines(*overrides: str) -> list[str]:
        found = problems(
            load_suite("demo_math", [*own, "data.generator='own_world:MADE'", *overrides])
        )
        return [line.partition("data")[2] for line in found if ": data" in line]

    sizes = "data={{generator: 'own_world:MADE', train: {}, validation: 1, test: 1, options: {{env: '{}'}}}}"
    assert lines("~data", "+" + sizes.format(40, "own_world:Letters")) == []
    assert lines(
        "~data", "+" + sizes.format(5, "own_world:Letters"), "trainer.tasks_per_step=6"
    ) == [".train: 5 tasks are fewer than trainer.tasks_per_step 6; add tasks, or lower it"]
    assert lines(
        "~data", "+" + sizes.format(0, "own_world:Letters"), "trainer.tasks_per_step=6"
    ) == [".train: 0 tasks are fewer than trainer.tasks_per_step 6; add tasks, or lower it"]
    made = "env 'own_world:makes': its method step must take (action) as an async function"
    assert lines(
        "~data", "+" + sizes.format(40, "own_world:Letters"), "env.name='own_world:makes'"
    ) == [f": {made}"]
    (line,) = lines("~data", "+" + sizes.format(40, "own_world:Leters"))
    assert line.startswith(
        ": env 'own_world:Leters' cannot be imported: module 'own_world' has no attribute 'Leters'"
    )


def test_every_misspelt_key_is_said_at_once() -> None:
    with pytest.raises(SuiteError) as refused:
        load_suite("demo_math", ["trainer.stepz=3", "engine.slotz=2"])
    misspelt = (
        "engine.slotz: unknown key; nearest: slots; trainer.stepz: unknown key; nearest: steps"
    )
    assert f"run 'demo_math': {misspelt} (" in str(refused.value)


def test_a_key_of_another_section_says_where_it_belongs() -> None:
    for override, places in (
        ("steps=3", "trainer.steps"),
        ("max_tokens=8", "agents.*.max_tokens or coach.max_tokens"),
    ):
        with pytest.raises(
            SuiteError, match=re.escape(f"{override[:-2]}: unknown key; write {places} (")
        ):
            load_suite("demo_math", [override])


def test_a_model_whose_folder_is_misspelt_has_a_nearest_one(model: Path) -> None:
    missing = of(model.with_name(f"{model.name}x"))[0]
    assert f"x: no model here (config.json is missing); nearest: {model}" in missing


def test_the_command_lists_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for overrides, status, lines in (
        ([], 0, 1),
        (["policies.solver.tp=3", "policies.verifier.tp=3"], 1, 2),
    ):
        monkeypatch.setattr("sys.argv", ["mcore-mas", "check", "demo_math", *overrides])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr().out.splitlines()
        assert (ended.value.code, len(out)) == (status, lines)


def test_paths_beside_the_suites_file_are_said_to_be_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tasks = tmp_path / "mine", '{"prompt": "1 + 1", "answer": "2"}\n' * 8
    folder.mkdir()
    (folder / "train.jsonl").write_text(tasks)
    (folder / "model").symlink_to(model)
    own = [*NO_START, *(f"policies.{name}.model=model" for name in ("solver", "verifier"))]
    own += [
        "data={format: plain, train: train.jsonl, validation: train.jsonl, test: none.jsonl, generator: null}"
    ]
    (folder / "s.yaml").write_text(
        json.dumps({"suite": "s", "experiments": {"a": ["experiment=demo_math", *own]}})
    )
    monkeypatch.chdir(tmp_path)
    there = f"paths are relative to the current folder, and it is in {folder}: cd {folder}"
    lines = problems(load_suite("mine/s.yaml"))
    assert (
        f"run 'a': policies.solver: model: no model here (config.json is missing); {there}" in lines
    )
    assert f"run 'a': data: train.jsonl: not here; {there}" in lines
    assert "run 'a': data: none.jsonl: not here; name another one" in lines
    monkeypatch.chdir(folder)
    assert not [
        line
        for line in problems(load_suite("s.yaml"))
        if "current folder" in line or "train.jsonl" in line
    ]


def test_overrides_of_a_suite_come_after_a_runs_own(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    runs = {"a": ["experiment=demo_math", "seed=5"], "b": ["experiment=demo_math"]}
    file.write_text(json.dumps({"suite": "s", "experiments": runs, "overrides": ["seed=7"]}))
    suite = load_suite(str(file), ["trainer.steps=3"])
    assert {
        run: (config["seed"], config["trainer"]["steps"]) for run, config in suite.runs.items()
    } == {
        "a": (7, 3),
        "b": (7, 3),
    }
