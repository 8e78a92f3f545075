"""Checks of a suite before it runs: models, machine, files, tasks and code of the user."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_mas.cli.main import main
from mcore_mas.config.hub import downloaded_model
from mcore_mas.pipeline.check import suite_problems
from mcore_mas.pipeline.project import new_project
from mcore_mas.pipeline.suite import load_suite
from mcore_mas.pipeline.suite_file import SuiteError
from rollout.teams.roles import ROLES
from tests.support import reference
from tests.support.templates import byte_tokenizer

POLICIES = ("solver", "verifier")
NO_COLD_START = ["cold_start=null", "engine.max_length=256"]
SGLANG = ["engine=sglang", f"engine.python={sys.executable}", "engine.max_length=512"]
CHATML = [f"policies.{name}.chat_template=chatml" for name in POLICIES]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with 6 layers, 4 heads, 2 key/value heads and 4096 positions; return its folder.

    Its tokens are bytes, and it has no chat template.
    """
    folder = tmp_path_factory.mktemp("model")
    reference.make_model("qwen2", folder, layers=6)
    ends = ["<|im_start|>", "<|im_end|>"]
    return byte_tokenizer(folder, ends, eos_token="<|im_end|>")


def demo_problems(*overrides: str, check_files: bool = True) -> list[str]:
    """Return the problems of the demo with these overrides."""
    return suite_problems(load_suite("demo_math", overrides), check_files=check_files)


def model_problems(model: Path | str, *overrides: str) -> list[str]:
    """Return the problems of the demo with this model for both policies, without a cold start."""
    models = [f"policies.{name}.model={model}" for name in POLICIES]
    return demo_problems(*NO_COLD_START, *models, *overrides)


def set_machine(monkeypatch: pytest.MonkeyPatch, *, gpus: int, slurm: bool = False) -> None:
    """Let the check see this number of GPUs, a compiler, and Slurm's programs or no others."""
    monkeypatch.setattr(
        "mcore_mas.pipeline.check.shutil.which",
        lambda name, **_: name if slurm or name == "c++" else None,
    )
    monkeypatch.setattr("mcore_mas.pipeline.check.count_visible_gpus", lambda: gpus)


def test_the_demo_has_no_problems() -> None:
    assert demo_problems() == []


def test_problems_of_layout_length_and_machine_are_reported_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_machine(monkeypatch, gpus=0)
    lines = demo_problems(
        "cluster.device=auto",
        "policies.solver.tp=3",
        "engine.max_length=2048",
        "engine.device=cuda",
    )
    assert lines == [
        "run 'demo_math': policies.solver: tp: 3 does not divide the model's 8 heads; valid here: "
        "[1, 2, 4], nearest: 2",
        "run 'demo_math': policies.verifier: engine.max_length 2048 is more than the 1024 "
        "positions of results/demo_math/bootstrap/model; use at most 1024",
        "run 'demo_math': engine.device is cuda, but this machine has no GPU; set it to cpu",
    ]


@pytest.mark.parametrize(
    ("gpus", "overrides", "problem"),
    [
        (1, [], None),  # the demo runs on CPUs
        (0, ["cluster.device=auto"], None),
        (5, ["cluster.device=auto"], None),
        (
            1,
            ["cluster.device=auto"],
            "cluster.pool: split needs 5 GPUs (solver: trainer 2, engine 1; verifier: "
            "trainer 1, engine 1), and there are 1; use fewer ranks, or compute on CPUs: "
            "cluster.device: cpu, or more GPUs",
        ),
        (2, ["cluster.device=auto"], None),  # trainers and engines share them
        (2, ["cluster.device=auto", "cluster.pool=shared"], None),
        (
            2,
            ["cluster.device=auto", "cluster.address=10.0.0.1:6379"],
            None,
        ),  # the Ray cluster may have more
        (
            0,
            ["cluster.device=cuda"],
            "cluster.device is cuda, but this machine has no GPU; set it to auto or cpu",
        ),
        (
            8,
            [*SGLANG, "policies.verifier.overrides.engine.options={device: cpu}"],
            "policies.solver: cluster.device: cpu hides the GPUs from SGLang's servers; set it to "
            "auto or cuda",
        ),
    ],
)
def test_a_training_with_too_few_gpus_is_reported(
    monkeypatch: pytest.MonkeyPatch, gpus: int, overrides: list[str], problem: str | None
) -> None:
    set_machine(monkeypatch, gpus=gpus)
    expected = [f"run 'demo_math': {problem}"] if problem else []
    assert demo_problems(*overrides) == expected

    if gpus:
        # The GPUs of the machines that jobs are submitted to are not known.
        set_machine(monkeypatch, gpus=gpus, slurm=True)
        assert demo_problems(*overrides) == (expected if problem and "SGLang" in problem else [])


def test_a_server_needs_no_more_gpus_than_the_machine_of_its_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overrides = [*SGLANG, "cluster.device=auto", "policies.solver.overrides.engine.tp=16"]
    needed = (
        "run 'demo_math': an evaluation needs 16 GPUs of one machine for a server of solver "
        "(engine.tp 16), and "
    )
    set_machine(monkeypatch, gpus=2)
    lines = demo_problems(*overrides)
    here = "this machine has 2; lower engine.tp, or name servers elsewhere (engine.urls)"
    assert f"{needed}{here}" in lines

    # Jobs are submitted to machines with 8 GPUs, by default.
    set_machine(monkeypatch, gpus=2, slurm=True)
    lines = demo_problems(*overrides)
    assert any(line.startswith(f"{needed}node_gpus is 8; lower engine.tp") for line in lines)


def test_a_run_on_cpus_has_no_engine_or_retriever_on_a_gpu() -> None:
    with pytest.raises(
        SuiteError,
        match=r"policies\.solver: engine\.device is cuda, but cluster\.device: cpu hides the GPUs",
    ):
        load_suite("demo_math", ["engine.device=cuda"])
    lines = suite_problems(load_suite("demo_search", ["retriever.device=cuda"]))
    message = "retriever.device is cuda, but cluster.device: cpu hides the GPUs from it"
    assert any(message in line for line in lines)


def test_a_missing_model_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    missing, _ = model_problems("/models/none")
    assert (
        "policies.solver: /models/none: no model here (config.json is missing); name a Hugging "
        "Face folder" in missing
    )
    missing, _ = model_problems("Qwen/None")
    assert "`hf download Qwen/None`, or name a folder" in missing
    (tmp_path / "models").mkdir()
    missing, _ = model_problems("models/tiny")
    assert "models/tiny: no model here" in missing
    assert "hf download" not in missing


def test_a_base_model_needs_a_chat_template(model: Path) -> None:
    solver, verifier = model_problems(model)
    assert solver.startswith("run 'demo_math': policies.solver: ")
    assert "base model without a chat template" in solver
    assert "policies.verifier: " in verifier
    assert model_problems(model, *CHATML) == []


def test_a_downloaded_model_is_found_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_headers_and_tokenizer_of_a_model_are_read(
    broken: Callable[[Path], object], message: str, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    broken(folder)
    lines = model_problems(folder, *CHATML)
    assert lines
    assert all(message in line for line in lines)


CHATTING = """

async def chatting(task, team, env):
    reply = await team.chat("writer").say(env.reset(task))
    await team.act("editor", problem=task.prompt, draft=reply.text)
    await env.step(reply.text)
"""


@pytest.fixture
def restored_roles() -> Iterator[None]:
    """Remove the roles that a test has registered; the tokenizers of tiny models depend on them."""
    roles = dict(ROLES)
    yield
    ROLES.clear()
    ROLES.update(roles)


REWARDS = """

import time
calls = []

def counting(group):
    calls.append(group)
    return brief(group)

def failing(group):
    return group.trajectories[0].turns[0].no_such_field

def slow(group):
    time.sleep(600)
"""


@pytest.mark.usefixtures("restored_roles")
def test_the_reward_of_a_user_is_called_once_before_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = new_project("judges", tmp_path)
    with (project / "judges" / "reward.py").open("a") as file:
        file.write(REWARDS)
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setattr("mcore_mas.pipeline.prompt_check._REWARD_S", 0.1)

    def problems(reward: str) -> list[str]:
        suite = load_suite("judges.yaml", [f"reward.name='judges.reward:{reward}'"])
        return suite_problems(suite)

    assert problems("counting") == []
    (group,) = importlib.import_module("judges.reward").calls
    assert group.task.id == "train-0"
    assert [trajectory.id for trajectory in group.trajectories] == [
        f"check/train-0/{sample}" for sample in range(8)
    ]
    assert [turn.text for turn in group.trajectories[0].turns] == ["", ""]

    (problem,) = problems("failing")
    assert problem.startswith(
        "run 'judges': reward 'judges.reward:failing', called with an empty reply to task 'train-0': "
        "AttributeError: 'Turn' object has no attribute 'no_such_field' (reward.py:"
    )
    assert problems("slow") == []  # it is not waited for


@pytest.mark.usefixtures("restored_roles")
def test_prompts_that_are_too_long_with_their_tools_are_reported_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    project = new_project("novelists", tmp_path)
    with (project / "novelists" / "team.py").open("a") as file:
        file.write(CHATTING)
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)

    def check(*overrides: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["mcore-mas", "check", "novelists.yaml", *overrides])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    chats = "orchestra.name=novelists.team:chatting"
    tools = "+agents.writer.tools={calculator: {}}"
    assert check(chats) == (0, "ok: novelists\n")

    status, line = check(chats, tools)
    assert status == 1
    match = re.fullmatch(
        r"error: run 'novelists': task 'train-0': writer \(turn 0\): chat writer/0: prompt of (\d+) tokens, "
        r"and there is room for 120 beside the reply; raise engine.max_length \(128\), or shorten "
        r"the prompts\n",
        line,
    )
    assert match is not None, line
    needed = int(match[1]) + 8  # tokens of the reply
    assert check(chats, tools, f"engine.max_length={needed}")[0] == 0
    assert check(chats, tools, f"engine.max_length={needed - 1}")[0] == 1

    # The orchestra asks the editor without a chat, so that it could not call its tools.
    tools = "+agents.editor.tools={calculator: {}}"
    with pytest.raises(SuiteError) as refused:
        load_suite("novelists.yaml", [chats, tools])
    assert (
        "agent 'editor' has tools, and orchestra 'novelists.team:chatting' opens no chats with it in "
        "which to call them; see " in str(refused.value)
    )


def test_a_missing_api_key_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("rollout.engines.remote.keys._hidden_keys", {})  # of earlier tests
    overrides = ["coach=openai", "reward.name=coach"]
    assert demo_problems(*overrides) == [
        "run 'demo_math': coach.key_variable: OPENAI_API_KEY is not set here; export it with the "
        "key, or name a key_file"
    ]
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert demo_problems(*overrides) == []


def test_missing_programs_are_reported() -> None:
    (line,) = demo_problems(
        "~orchestra.options", "orchestra.name=program", "orchestra.options.command=[nowhere, a]"
    )
    assert (
        "orchestra.options.command: this machine has no program 'nowhere'; install it, or give "
        "its path" in line
    )
    (line,) = demo_problems("env={name: mcp, options: {servers: {a: {command: nowhere}}}}")
    assert "env.options.servers.a.command: this machine has no program 'nowhere'" in line


def test_a_missing_tracking_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_mas.tracking.writers.find_spec", lambda name: None)
    assert demo_problems("tracking=wandb") == [
        "run 'demo_math': tracking.further_trackers: wandb is not installed; pip install wandb, or remove it "
        "from the list"
    ]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            "sokoban",
            "expected rows of signs separated by spaces, all of one length); the task is of env 'plan_path'",
        ),
        (
            "blocksworld",
            "expected lines 'now: A B | C' and 'goal: C B A' with the same blocks); the task is of env",
        ),
    ],
)
def test_an_environment_that_cannot_begin_the_tasks_is_reported(env: str, message: str) -> None:
    (line,) = suite_problems(load_suite("demo_path", [f"env.name={env}"]))
    assert line.startswith(f"run 'demo_path': data: env '{env}' cannot begin task 'plan_path_5x5/")
    assert message in line


def test_missing_data_files_are_reported() -> None:
    overrides = [
        "~data",
        "+data={train: [a.parquet], validation: [a.parquet], test: [b.parquet]}",
        "cold_start=null",
    ]
    lines = [line for line in demo_problems(*overrides) if "data: " in line]
    assert [line.partition("data: ")[2] for line in lines] == [
        "a.parquet does not exist; name another one",
        "b.parquet does not exist; name another one",
    ]
    assert not demo_problems(*overrides, check_files=False)


def test_missing_published_files_have_a_source() -> None:
    lines = suite_problems(load_suite("drmas_t2_3b_shared_drmas"))
    (index,) = [line for line in lines if "retriever.folder: " in line]
    assert "data/wiki-18/index.json does not exist; it is made of" in index
    assert "the target `acquire` fetches it" in index
    encoder = (
        "retriever.encoder_folder: models/e5-base-v2 does not exist; it is intfloat/e5-base-v2"
    )
    assert any(encoder in line for line in lines)


def test_an_unknown_slot_of_a_template_is_refused() -> None:
    with pytest.raises(
        SuiteError,
        match=r"agent 'solver': orchestra 'solver_verifier' does not fill the slot \{problm\}",
    ):
        load_suite("demo_math", ["agents.solver.user='{problm}'"])
    with pytest.raises(
        SuiteError,
        match=r"agent 'solver': its user template: .*; write a brace that is text as \{\{ or \}\}",
    ):
        load_suite("demo_math", ["agents.solver.user='a { b'"])


WORLD = """
from rollout.records.trajectory import Task
from rollout.tasks.generators import Generator


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
    ("override", "message"),
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
def test_invalid_code_of_the_user_is_refused(own_world: None, override: str, message: str) -> None:
    with pytest.raises(SuiteError) as refused:
        load_suite(
            "demo_math",
            [override, "agents.solver.user='{problem}'", "agents.verifier.user='{problem}'"],
        )
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def own_task_problems(
    folder: Path, *overrides: str, tasks: int = 40, env: str = "own_world:Letters"
) -> list[str]:
    """Return the problems of the demo with the user's generator, as far as they concern tasks."""
    (folder / "config.json").write_text("{}")
    options = f"options: {{env: '{env}'}}"
    data = f"generator: 'own_world:MADE', train: {tasks}, validation: 1, test: 1, {options}"
    models = [f"policies.{name}.model={folder}" for name in POLICIES]
    lines = demo_problems("cold_start=null", *models, "~data", f"+data={{{data}}}", *overrides)
    return [line.partition("'demo_math': ")[2] for line in lines if ": data" in line]


@pytest.mark.parametrize("tasks", [0, 5])
def test_too_few_tasks_of_the_users_generator_are_reported(
    own_world: None, tmp_path: Path, tasks: int
) -> None:
    assert own_task_problems(tmp_path, "trainer.tasks_per_step=6", tasks=tasks) == [
        f"data.train: {tasks} tasks are fewer than trainer.tasks_per_step 6; add tasks, or lower it"
    ]


def test_environments_of_the_users_tasks_are_checked(own_world: None, tmp_path: Path) -> None:
    assert own_task_problems(tmp_path) == []
    assert own_task_problems(tmp_path, "env.name='own_world:makes'") == [
        "data: env 'own_world:makes': its method step must take (action) as an async function"
    ]
    (line,) = own_task_problems(tmp_path, env="own_world:Leters")
    assert line.startswith(
        "data: env 'own_world:Leters' cannot be imported: module 'own_world' has no attribute "
        "'Leters'"
    )


def test_runs_that_share_tasks_are_checked_with_their_own_settings(
    own_world: None, tmp_path: Path
) -> None:
    """Both runs have the same 10 tasks without answers; only run b needs answers, and more tasks."""
    generator = "generator: 'own_world:MADE', options: {env: 'own_world:Letters'}"
    shared = [
        "experiment=demo_math",
        "cold_start=null",
        *(f"policies.{name}.model={tmp_path}" for name in POLICIES),
        "~data",
        f"+data={{{generator}, train: 10, validation: 1, test: 1}}",
    ]
    a = [*shared, "env.name='own_world:Letters'", "trainer.tasks_per_step=2"]
    b = [*shared, "env.name=math", "trainer.tasks_per_step=64"]
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "s.yaml"
    file.write_text(json.dumps({"suite": "s", "experiments": {"a": a, "b": b}}))
    suite = load_suite(str(file))
    assert suite.task_owner == {"a": "a", "b": "a"}

    lines = [line for line in suite_problems(suite) if "policies." not in line]
    assert [line.partition(",")[0] for line in lines] == [
        "run 'b': tasks: 12 of 12 have no answer",
        "run 'b': data.train: 10 tasks are fewer than trainer.tasks_per_step 64; add tasks",
    ]


def test_all_unknown_keys_are_named_at_once() -> None:
    with pytest.raises(SuiteError) as refused:
        load_suite("demo_math", ["trainer.stepz=3", "engine.slotz=2"])
    keys = "engine.slotz: unknown key; nearest: slots; trainer.stepz: unknown key; nearest: steps"
    assert f"run 'demo_math': {keys} (" in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "keys"),
    [
        ("steps", 3, "trainer.steps"),
        ("max_tokens", 8, "agents.*.max_tokens or coach.max_tokens"),
    ],
)
def test_a_key_without_its_section_is_refused_with_the_full_key(
    key: str, value: int, keys: str
) -> None:
    with pytest.raises(SuiteError, match=re.escape(f"{key}: unknown key; write {keys} (")):
        load_suite("demo_math", [f"{key}={value}"])


def test_a_misspelt_model_folder_has_a_nearest_one(model: Path) -> None:
    missing, _ = model_problems(model.with_name(f"{model.name}x"))
    assert f"x: no model here (config.json is missing); nearest: {model}" in missing


@pytest.mark.parametrize(
    ("overrides", "status", "lines"),
    [([], 0, 1), (["policies.solver.tp=3", "policies.verifier.tp=3"], 1, 2)],
)
def test_the_command_prints_every_problem(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    overrides: list[str],
    status: int,
    lines: int,
) -> None:
    monkeypatch.setattr("sys.argv", ["mcore-mas", "check", "demo_math", *overrides])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_paths_that_are_relative_to_the_suite_file_have_a_hint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 8)
    (folder / "model").symlink_to(model)
    files = "train: train.jsonl, validation: train.jsonl, test: none.jsonl"
    overrides = [
        "experiment=demo_math",
        *NO_COLD_START,
        *(f"policies.{name}.model=model" for name in POLICIES),
        f"data={{format: plain, {files}, generator: null}}",
    ]
    suite = {"suite": "s", "experiments": {"a": overrides}}
    (folder / "s.yaml").write_text(json.dumps(suite))

    monkeypatch.chdir(tmp_path)
    lines = suite_problems(load_suite("mine/s.yaml"))
    hint = (
        f"paths are relative to the current folder, and this one exists in the suite's; cd {folder}"
    )
    assert (
        f"run 'a': policies.solver: model: no model here (config.json is missing); {hint}" in lines
    )
    assert f"run 'a': data: train.jsonl does not exist; {hint}" in lines
    assert "run 'a': data: none.jsonl does not exist; name another one" in lines

    monkeypatch.chdir(folder)
    lines = suite_problems(load_suite("s.yaml"))
    assert not [line for line in lines if "current folder" in line or "data: train.jsonl" in line]
    missing = "none.jsonl does not exist; name another one; nearest: train.jsonl"
    assert f"run 'a': data: {missing}" in lines


def test_overrides_of_a_suite_follow_those_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    runs = {"a": ["experiment=demo_math", "seed=5"], "b": ["experiment=demo_math"]}
    file.write_text(json.dumps({"suite": "s", "experiments": runs, "overrides": ["seed=7"]}))
    suite = load_suite(str(file), ["trainer.steps=3"])
    assert {run: config["seed"] for run, config in suite.runs.items()} == {"a": 7, "b": 7}
    assert [config["trainer"]["steps"] for config in suite.runs.values()] == [3, 3]
