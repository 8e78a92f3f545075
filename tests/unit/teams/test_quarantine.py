"""Hostile texts of models do not end a run: text is repaired, and failed trajectories are quarantined."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.corpus import Passage, RetrievalError
from rollout.base.errors import EnvError
from rollout.base.text import escape_text, valid_text
from rollout.config.orchestra import OrchestraConfig
from rollout.engines import PolicyReply
from rollout.environments import ENVS, TOOLS
from rollout.environments.games import GAMES
from rollout.environments.mcp import McpEnv, McpServer
from rollout.environments.protocol import Step, ToolCall
from rollout.environments.text_scores import REWARDS
from rollout.environments.tools import call_tool
from rollout.models.tool_calls import CALL_SPLITTERS, parse_reply
from rollout.orchestras import ORCHESTRAS
from rollout.records.files import read_trajectories, write_trajectories
from rollout.records.trajectory import (
    Completion,
    Message,
    Status,
    Task,
    ToolUse,
    Trajectory,
    VersionSpan,
)
from rollout.rewards.penalties import VALIDITY_RULES
from rollout.tasks.generators import GENERATORS
from rollout.teams.quarantine import Quarantined, quarantine_path, write_quarantined
from rollout.teams.roles import ROLES
from rollout.teams.team import RecordedReply
from rollout.teams.tree import Branching
from tests.support import casts, played
from tests.support.error_texts import without_location
from tests.support.play import SEED, STEP, TASK, Adder, collect, make_team
from tests.support.scripted_engine import ScriptedEngine

ROOT = Path(__file__).resolve().parents[3]
SERVER = Path(__file__).parents[2] / "support" / "mcp_server.py"
# It starts ten times as fast, for texts that call none of its tools.
UNUSED_SERVER = SERVER.with_name("plain_mcp_server.py")
OPENENV_SERVER = SERVER.with_name("openenv_server.py")


def test_a_quarantined_reply_has_the_experts_of_its_tokens(tmp_path: Path) -> None:
    completion = Completion(
        token_ids=(8, 2),
        logprobs=(-0.5, -0.25),
        finish_reason="stop",
        versions=(VersionSpan(version=3, start=0, end=2),),
        routing=bytes(range(256)),
    )
    reply = PolicyReply(text="t", prompt_ids=(5, 6, 7), completion=completion)
    messages = (Message(role="user", content="u"),)
    path = write_quarantined(
        tmp_path,
        replace(played.trajectory(played.turn(0)), status=Status.FAILED),
        task=TASK,
        seed=1,
        replies={7: RecordedReply(messages=messages, reply=reply)},
        error=ValueError("x"),
    )
    assert Quarantined.read(path).replies == {7: reply}


def test_trajectories_of_different_tasks_are_quarantined_in_different_files(tmp_path: Path) -> None:
    assert quarantine_path(tmp_path, 3, "train-1", 0) == tmp_path / "3-train-1-0.json"
    long_id = "x" * 200
    ids = ["a_b", "a/b", "a b", "一", "二", f"{long_id}1", f"{long_id}2"]
    names = [quarantine_path(tmp_path, 3, task_id, 0).name for task_id in ids]
    assert len(set(names)) == len(ids)
    assert names[0] == "3-a_b-0.json"
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,130}", name) for name in names)


def test_records_repair_invalid_text() -> None:
    assert Message(role="user", content="a\ud800b").content == "a\ufffdb"
    assert valid_text("\ud83d\ude00") == "😀"  # two halves of one character
    plain = "é😀"
    assert valid_text(plain) is plain
    assert (
        escape_text("\x1b]0;x\x07\r\u202ea\tb\n\x9b2J") == "\\x1b]0;x\\x07\\r\\u202ea\tb\n\\x9b2J"
    )


@pytest.mark.slow
def test_a_call_of_a_tool_with_half_a_character_is_answered(
    tmp_path: Path,
) -> None:
    servers = {"small": McpServer(command=sys.executable, args=[str(UNUSED_SERVER)])}
    task = Task(
        id="t", prompt="How much is 40 + 2?", answers=("42",), env="mcp", source="s", split="train"
    )
    trajectory, prompts = casts.play(
        "single",
        {"player": "tool_caller"},
        '<call>{"tool": "\\ud800"}</call>',
        "<answer>42</answer>",
        task=task,
        make_env=partial(McpEnv, servers=servers),
    )
    assert (trajectory.status, trajectory.outcome) == (Status.COMPLETED, 1.0)
    assert "There is no tool '\ufffd'" in prompts[1]
    write_trajectories(tmp_path / "one.parquet", [trajectory])
    assert read_trajectories(tmp_path / "one.parquet") == [trajectory]


class Breaks(Adder):
    """Environment that raises an unexpected error at the action 13."""

    async def step(self, action: str) -> Step:
        if action == "13":
            raise MemoryError("13")
        return await super().step(action)


async def one_step(task: Any, team: Any, env: Any) -> None:
    """Play one turn and one step; raise at the reply 7."""
    reply = await team.act("a", said="x")
    if reply.text == "7":
        raise RecursionError("seven")
    await env.step(reply.text)


def collected(folder: Path, replies: list[str], **options: Any) -> list[Any]:
    engine = ScriptedEngine(lambda _, call: (*replies[call].encode(), 0))
    run = collect(
        [TASK], make_team(engine), Breaks, one_step, group_size=len(replies), seed=SEED, step=STEP,
        quarantine=folder, **options,
    )  # fmt: skip
    return list(asyncio.run(run)[0].trajectories)


def test_a_defect_quarantines_its_trajectory_and_can_be_replayed(
    tmp_path: Path,
) -> None:
    played = collected(tmp_path, ["5", "13", "7", "6"])
    assert [t.status for t in played] == [
        Status.COMPLETED,
        Status.FAILED,
        Status.FAILED,
        Status.COMPLETED,
    ]
    assert [without_location(t.error) for t in played] == [
        "",
        "Defect: adder.step: MemoryError: 13",
        "Defect: orchestra: RecursionError: seven",
        "",
    ]
    assert [t.failure_reason for t in played] == ["", "quarantined", "quarantined", ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3-t-1.json", "3-t-2.json"]
    assert "MemoryError: 13" in json.loads((tmp_path / "3-t-1.json").read_text())["traceback"]
    for sample in (1, 2):
        quarantined = Quarantined.read(tmp_path / f"3-t-{sample}.json")
        assert (quarantined.task, quarantined.seed, quarantined.step, quarantined.sample) == (
            TASK,
            SEED,
            STEP,
            sample,
        )
        silent = ScriptedEngine({})  # a replay must not ask the engine
        team = quarantined.team(make_team(silent))
        for fixed, error in (
            (Breaks, played[sample].error),
            (Adder, "" if sample == 1 else played[sample].error),
        ):
            [group] = asyncio.run(
                collect([TASK], team, fixed, one_step, group_size=sample + 1, seed=SEED, step=STEP)
            )
            again = group.trajectories[sample]
            assert again.error == error
            assert [turn.text for turn in again.turns] == [
                turn.text for turn in played[sample].turns
            ]
        assert silent.calls == []


def test_a_failing_environment_maker_and_a_nan_reward_are_defects(
    tmp_path: Path,
) -> None:
    def fail(task: Task) -> Adder:
        raise KeyError("no such board")

    class NotANumber(Adder):
        async def step(self, action: str) -> Step:
            return Step(reward=float("nan"))

    for make_env, error in (
        (fail, "Defect: adder.open: KeyError: 'no such board'"),
        (NotANumber, "Defect: adder.step: its reward is nan; expected a finite number"),
    ):
        engine = ScriptedEngine(lambda *_: (*b"1", 0))
        run = collect(
            [TASK], make_team(engine), make_env, one_step, group_size=1, seed=SEED, step=STEP
        )
        assert without_location(asyncio.run(run)[0].trajectories[0].error) == error


def play_step(step: Any) -> Trajectory:
    """Return the trajectory of a team whose environment answers with this step."""

    class Fixed(Adder):
        async def step(self, action: str) -> Step:
            return step

    engine = ScriptedEngine(lambda *_: (*b"1", 0))
    run = collect([TASK], make_team(engine), Fixed, one_step, group_size=1, seed=SEED, step=STEP)
    return asyncio.run(run)[0].trajectories[0]


def test_rewards_and_metrics_of_numpy_and_torch_are_recorded(tmp_path: Path) -> None:
    values: dict[str, Any] = {"reward": torch.tensor(0.5), "metrics": {"parsed": np.float32(0.25)}}
    trajectory = play_step(Step(**values))
    assert trajectory.outcome == 0.5
    assert trajectory.metrics["parsed"] == 0.25
    write_trajectories(tmp_path / "t.parquet", [trajectory])
    [turn] = read_trajectories(tmp_path / "t.parquet")[0].turns
    assert turn.scores["team"] == 0.5


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"reward": torch.ones(2)}, "its reward is tensor([1., 1.]), of type Tensor"),
        ({"reward": None}, "its reward is None, of type NoneType"),
        ({"reward": "1"}, "its reward is '1', of type str"),
        ({"metrics": {"parsed": "yes"}}, "its metric 'parsed' is 'yes', of type str"),
        ({"answer": 5}, "its answer is 5; expected text, or None"),
    ],
)
def test_a_step_with_a_value_that_cannot_be_recorded_is_a_defect(
    values: dict[str, Any], error: str
) -> None:
    assert play_step(Step(**values)).error.startswith(f"Defect: adder.step: {error}")


@pytest.mark.parametrize("tree", [None, Branching(width=2)])
def test_a_defect_names_the_environment_of_the_config(
    tree: Branching | None,
) -> None:
    engine = ScriptedEngine(lambda *_: (*b"13", 0))
    run = collect(
        [TASK],
        make_team(engine),
        Breaks,
        one_step,
        group_size=1,
        seed=SEED,
        step=STEP,
        env="own:Breaks",
        tree=tree,
    )
    error = asyncio.run(run)[0].trajectories[0].error
    assert without_location(error) == "Defect: own:Breaks.step: MemoryError: 13"


PIECES = (
    "<answer>", "</answer>", "<verify>yes</verify>", "<verify>no</verify>", "\\boxed{", "}", "```python\n", "\n```",
    "####",
    "<call>", "</call>", '{"tool": "\\ud800", "arguments": {"a": 1e999}}', "[" * 2000, "../../etc/passwd", "a" * 300,
    "\x1b]0;owned\x07", "\r\n", "\x00", "\u202e", "\udcff.csv", "\ud800", "😀", "9" * 5000, "-0.0", "NaN", "<q 1>",
    "print(1)", "import os", "move 1 2", "up", "{said}", "%s", "\\frac{1}{0}", "x=" * 50,
)  # fmt: skip


def hostile(source: random.Random) -> str:
    """Return a random text of pieces that some parser reads, and characters of every plane."""
    parts = [
        source.choice(PIECES) if source.random() < 0.8 else chr(source.randrange(0x110000))
        for _ in range(6)
    ]
    return "".join(parts[: source.randrange(7)])


class Anything:
    """Environment with all abilities, which returns random texts and sometimes fails."""

    def __init__(self, task: Task, *, source: random.Random) -> None:
        self.source = source

    def text(self) -> str:
        if self.source.random() < 0.03:
            raise self.source.choice(
                [EnvError("down"), KeyError("odd"), UnicodeError("bad"), RecursionError("deep")]
            )
        return hostile(self.source)

    def reset(self, task: Task) -> str:
        return self.text()

    def state(self) -> str:
        return self.text()

    async def step(self, action: str) -> Step:
        return Step(
            observation=self.text(),
            reward=self.source.random(),
            done=self.source.random() < 0.5,
            answer=self.text(),
            tools=(ToolCall(tool="t", query=self.text(), result=self.text()),),
            passages=(self.text(),),
        )

    preview = step

    async def same(self, answer: str, other: str) -> bool:
        return self.source.random() < 0.5

    async def run(self, program: str) -> ToolCall:
        return ToolCall(tool="python", query=program, result=self.text())

    async def check(self, program: str, cases: Any) -> Step:
        return Step(observation=self.text(), metrics={"check_rate": self.source.random()})

    async def agreement(self, cases: Any) -> float | None:
        return self.source.choice([None, 0.5])

    async def files(self) -> dict[str, int]:
        return {self.text(): 1, "\udcff.csv": 3}

    async def forget(self) -> None:
        self.text()


def random_engine(source: random.Random) -> ScriptedEngine:
    return ScriptedEngine(
        lambda *_: (*valid_text(hostile(source)).encode().replace(b"\0", b" "), 0)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ORCHESTRAS))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_reply_or_observation_ends_a_collection(name: str, seed: int) -> None:
    source = random.Random(seed)
    config = yaml.safe_load(
        (ROOT / "configs" / "team" / f"{name}.yaml").read_text(encoding="utf-8")
    )
    roles = {
        agent: values.get("role", agent) for agent, values in (config.get("agents") or {}).items()
    }
    orchestra = OrchestraConfig(**config["orchestra"]).call
    env = partial(Anything, source=source)
    run = collect(
        [TASK], casts.make_team(random_engine(source), roles), env, orchestra, group_size=4,
        seed=seed, step=0,
    )  # fmt: skip
    trajectories = asyncio.run(run)[0].trajectories
    assert len(trajectories) == 4
    # only a failing environment may cause a defect of the orchestra
    for trajectory in trajectories:
        assert "quarantined" not in trajectory.metrics or any(
            broken in trajectory.error
            for broken in ("KeyError: 'odd'", "UnicodeError: bad", "RecursionError: deep")
        ), trajectory.error


class Library:
    """Retriever that returns random passages and sometimes fails."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    async def search(self, query: str, k: int) -> list[Passage]:
        if self.source.random() < 0.1:
            raise RetrievalError("away")
        return [
            Passage.compose(hostile(self.source), hostile(self.source), hostile(self.source))
            for _ in range(k)
        ]

    async def passages(self, id: str, around: int) -> list[Passage]:
        return await self.search(id, 1 + around)


GENERATED = {
    "code": "programs",
    "data_science": "tabular",
    "openenv": "openenv",
    "repository": "repositories",
    "search": "encyclopedia",
}
LIBRARIES = {"alfworld": "alfworld", "webshop": "web_agent_site"}  # optional packages


def task_and_env(name: str, source: random.Random) -> tuple[Task, Any]:
    """Return a task of a registered environment, and a function that makes the environment."""
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"needs the library of {name}")
    options: dict[str, Any] = {
        "mcp": {"servers": {"small": McpServer(command=sys.executable, args=[str(UNUSED_SERVER)])}},
        "gymnasium": {
            "id": "FrozenLake-v1",
            "actions": ["left", "down", "right", "up"],
            "make": {"render_mode": "ansi"},
        },
        "openenv": {
            "command": [sys.executable, str(OPENENV_SERVER), "{port}", "2"],
            "sessions": 2,
            "action": {"guess": "{json}"},
        },
        "search": {"retriever": Library(source)},
    }.get(name, {})
    if name in GAMES or name in GENERATED:
        task = GENERATORS[GENERATED.get(name, name)].tasks(1, {"train": 1})[0]
    else:
        task = replace(casts.SUM, env=name, answers=("3",))
    return task, partial(ENVS[name], **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ENVS) - {"verifiers"}))  # it gets no agent's text
def test_no_action_breaks_an_environment(name: str, tmp_path: Path) -> None:
    async def steps(task: Task, team: Any, env: Any) -> None:
        env.reset(task)
        for _ in range(3):
            await env.step(hostile(source))

    for seed in range(12 if name in GAMES or name == "math" else 3):
        source = random.Random(seed)
        task, make_env = task_and_env(name, source)
        run = collect(
            [task], make_team(ScriptedEngine({})), make_env, steps, group_size=2, seed=seed, step=0
        )
        trajectories = asyncio.run(run)[0].trajectories
        assert [t.error for t in trajectories if "quarantined" in t.metrics] == []
        write_trajectories(tmp_path / "all.parquet", trajectories)
        assert read_trajectories(tmp_path / "all.parquet") == list(trajectories)


def anything(source: random.Random, depth: int = 0) -> Any:
    """Return a random JSON value."""
    kinds = [
        lambda: hostile(source),
        lambda: source.choice([None, True, -1, 10**30, 1e308, float("nan")]),
    ]
    if depth < 2:
        kinds += [
            lambda: [anything(source, depth + 1) for _ in range(2)],
            lambda: {hostile(source): anything(source, 2)},
        ]
    return source.choice(kinds)()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TOOLS))
def test_no_call_breaks_a_tool(name: str) -> None:
    """Calls with random arguments have a result; only an unavailable tool raises EnvError."""
    source = random.Random(name)

    async def calls() -> int:
        task, make_env = task_and_env("search", source)
        tool_options = {
            "search": {"env": make_env(task)},
            "passages": {"env": make_env(task)},
        }
        tool_options["mcp"] = {
            "servers": {"small": McpServer(command=sys.executable, args=[str(SERVER)])}
        }
        failures = 0
        async with TOOLS[name](**tool_options.get(name, {})) as opened:
            tools = {tool.schema.name: tool for tool in opened}
            for number in range(60 if name != "python" else 20):
                tool = tools[source.choice(list(tools))]
                parameters = list(tool.schema.parameters.get("properties", {}))
                random_arguments = {name: anything(source) for name in parameters}
                hostile_arguments = {name: hostile(source) for name in parameters}
                arguments = source.choice([random_arguments, anything(source), hostile_arguments])
                use = ToolUse(
                    id=str(number), name=tool.schema.name, arguments=json.dumps(arguments)
                )
                try:
                    call = await call_tool(tools, use, call_s=10.0, max_chars=200)
                    assert isinstance(call.result, str)
                except EnvError:
                    failures += 1
        return failures

    assert asyncio.run(calls()) <= (20 if name in ("search", "passages") else 0)


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=8)).map("".join))
def test_no_text_breaks_a_parser_of_replies(text: str) -> None:
    for name, role in ROLES.items():
        assert isinstance(role.parse(text), str | None), name
    for form in CALL_SPLITTERS:
        for use in parse_reply(text, form, "c").calls:
            assert isinstance(use.name, str) and use.arguments.encode() is not None
    for name, rule in VALIDITY_RULES.items():
        assert isinstance(rule(text), bool), name
    for name, reward in REWARDS.items():
        assert 0 <= reward(text, ["x"]) <= 1, name
