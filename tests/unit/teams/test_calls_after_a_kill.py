"""A trajectory that a kill interrupted is played again, and its calls that act outside are not repeated."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from retrieval.client import Passage
from rollout.engines import EngineClient
from rollout.environments.search import SearchEnv
from rollout.environments.tools import Tool, tool_of
from rollout.records.collection_log import CollectionLog
from rollout.records.trajectory import Completion, Sampling, Trajectory
from rollout.teams.roles import Agent, Role
from rollout.teams.team import Team
from rollout.teams.tree import Branching
from tests.faults.forked import forked
from tests.support.play import SEED, STEP, TASK, Adder, collect, number
from tests.support.scripted_engine import ScriptedEngine
from tests.support.templates import renderer_of

SIZE = 4  # trajectories, of two calls of tools each


class Retriever:
    """Retriever that logs every query and returns a different passage each time."""

    def __init__(self, file: Path) -> None:
        self.file = file

    async def search(self, query: str, k: int) -> list[Passage]:
        return [Passage.compose("0", "T", note(self.file, query))]


def note(file: Path, text: str) -> str:
    with file.open("a") as out:
        out.write(f"{text}\n")
    return os.urandom(4).hex()


@asynccontextmanager
async def tools(folder: Path) -> AsyncIterator[list[Tool]]:
    session: list[str] = []

    async def send(*, to: str) -> str:
        """Send a letter, which cannot be undone."""
        return note(folder / "sent", to)

    async def remember(*, text: str) -> str:
        """Remember something for as long as this trajectory goes on."""
        session.append(text)
        note(folder / "remembered", text)
        return " ".join(session)

    yield [tool_of(send), tool_of(remember, repeat_on_replay=True)]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


REPLIES = [
    call("send", to="a") + call("remember", text="x"),
    call("send", to="a") + call("remember", text="y"),
    "7",
]


async def orchestra(task: Any, team: Any, env: Any) -> None:
    chat = team.chat("a")
    await chat.say((await env.step("<search> before </search>")).observation)
    await chat.run(max_turns=5)
    await chat.say((await env.step("<search> after </search>")).observation)
    await env.step("<answer> 7 </answer>")


def collected(folder: Path, dies_at: int | None = None, **options: Any) -> Sequence[Trajectory]:
    """Collect a group; kill the process at the policy's call `dies_at`."""
    renderer = renderer_of("qwen2.5", folder)

    def reply_ids(prompt: Sequence[int], number: int) -> list[int]:
        if number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        calls = renderer.decode_prompt(prompt).count("<tool_response>")
        return [*renderer.encode(REPLIES[min(calls // 2, 2)]), renderer.stop[0]]

    role = Role(name="r", system="", user="{conversation}", parse=number)
    agent = Agent(
        name="a",
        role=role,
        policy="p",
        sampling=Sampling(max_tokens=400),
        tools={"t": partial(tools, folder)},
    )
    team = Team(
        {"a": agent}, {"p": EngineClient(engine=ScriptedEngine(reply_ids), renderer=renderer)}
    )
    make_env = partial(SearchEnv, retriever=Retriever(folder / "searched"))
    options["log"] = CollectionLog(folder / "log.jsonl")
    played = collect(
        [TASK], team, make_env, orchestra, group_size=SIZE, seed=SEED, step=STEP, **options
    )
    return asyncio.run(played)[0].trajectories


def counts(folder: Path) -> tuple[int, int]:
    return tuple(len((folder / name).read_text().split()) for name in ("sent", "searched"))  # type: ignore[return-value]


@pytest.mark.parametrize("dies_at", [5, 9, 14])
def test_after_a_kill_no_letter_is_sent_twice(tmp_path: Path, dies_at: int) -> None:
    assert forked(partial(collected, tmp_path, dies_at), tmp_path / "log") == -signal.SIGKILL
    sent, searched = counts(tmp_path)
    assert 0 < sent + searched < 4 * SIZE
    resumed = collected(tmp_path)
    assert counts(tmp_path)[0] == 2 * SIZE
    assert counts(tmp_path)[1] >= 2 * SIZE  # an interrupted trajectory searches again
    assert [t.error for t in resumed] == [""] * SIZE
    # Tools with `repeat_on_replay` are called again, so that their state is restored.
    for trajectory in resumed:
        assert [event.result for event in trajectory.tools if event.tool == "remember"] == [
            "x",
            "x y",
        ]
    assert len((tmp_path / "remembered").read_text().split()) > 2 * SIZE
    sent: set[str] = set()
    for trajectory in resumed:
        sent.update(event.result for event in trajectory.tools if event.tool == "send")
    assert len(sent) == 2 * SIZE


async def with_helper(task: Any, team: Any, env: Any, *, repeat_on_replay: bool) -> None:
    """Orchestra whose agent a has a tool that asks agent b."""

    async def ask_helper() -> str:
        """Ask the helper."""
        reply = await team.act("b", conversation="help")
        return str(reply.text)

    chat = team.chat("a", tools=[tool_of(ask_helper, repeat_on_replay=repeat_on_replay)])
    await chat.say("begin")
    await chat.run(max_turns=3)
    await env.step("7")


def collected_with_helper(
    folder: Path, *, repeat_on_replay: bool, dies_at: int | None = None
) -> Trajectory:
    """Collect one trajectory of `with_helper`; kill the process at the policy's call `dies_at`."""
    renderer = renderer_of("qwen2.5", folder)

    def reply_ids(prompt: Sequence[int], number: int) -> list[int]:
        if number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        text = renderer.decode_prompt(prompt)
        reply = call("ask_helper") if "begin" in text and "<tool_response>" not in text else "7"
        return [*renderer.encode(reply), renderer.stop[0]]

    role = Role(name="r", system="", user="{conversation}", parse=number)
    sampling = Sampling(max_tokens=400)
    agents = {name: Agent(name=name, role=role, policy="p", sampling=sampling) for name in "ab"}
    client = EngineClient(engine=ScriptedEngine(reply_ids), renderer=renderer)
    played = collect(
        [TASK],
        Team(agents, {"p": client}),
        Adder,
        partial(with_helper, repeat_on_replay=repeat_on_replay),
        group_size=1,
        seed=SEED,
        step=STEP,
        log=CollectionLog(folder / "log.jsonl"),
    )
    return asyncio.run(played)[0].trajectories[0]


@pytest.mark.parametrize("repeat_on_replay, agents", [(True, ["a", "b", "a"]), (False, ["a", "a"])])
def test_a_tool_that_asks_agents_has_to_be_called_again_after_a_kill(
    tmp_path: Path, repeat_on_replay: bool, agents: Sequence[str]
) -> None:
    """Without the call, the trajectory has the tool's result but not the turn of the agent."""
    play_once = partial(collected_with_helper, tmp_path, repeat_on_replay=repeat_on_replay)
    assert forked(partial(play_once, dies_at=2), tmp_path / "log") == -signal.SIGKILL
    resumed = play_once()
    assert (resumed.error, [turn.agent for turn in resumed.turns]) == ("", agents)
    assert [event.result for event in resumed.tools] == ["7"]


def test_equal_calls_of_branches_get_their_own_recorded_results(tmp_path: Path) -> None:
    """The results of the tool depend on the branch; after a kill each branch gets its own again."""

    @asynccontextmanager
    async def diary() -> AsyncIterator[list[Tool]]:
        pages: list[str] = []

        async def write(*, page: str) -> str:
            """Write a page."""
            pages.append(page)
            return "written"

        async def read() -> str:
            """Read it all."""
            note(tmp_path / "read", "")
            return " ".join(pages)

        yield [tool_of(write, repeat_on_replay=True), tool_of(read)]

    class Seeded(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            if len(self.calls) == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            answered = renderer.decode_prompt(prompt_ids).count("<tool_response>")
            write_page = call("write", page=str(sampling.seed % 97))
            replies = [write_page, call("read"), call("read"), "1"]
            reply = replies[min(answered, 3)]
            self._script = lambda *_: [*renderer.encode(reply), renderer.stop[0]]
            return await super().generate(prompt_ids, sampling)

    async def one_chat(task: Any, team: Any, env: Any) -> None:
        chat = team.chat("a")
        await chat.say("?")
        await chat.run(max_turns=5)
        await env.step("1")

    renderer = renderer_of("qwen2.5", tmp_path)

    def texts_and_results(log: str, dies_at: int = -1) -> list[tuple[str, str]]:
        engine = Seeded({})
        engine.dies_at = dies_at  # type: ignore[attr-defined]
        role = Role(name="r", system="", user="{conversation}", parse=number)
        agent = Agent(
            name="a", role=role, policy="p", sampling=Sampling(max_tokens=400), tools={"t": diary}
        )
        team = Team({"a": agent}, {"p": EngineClient(engine=engine, renderer=renderer)})
        record = CollectionLog(tmp_path / log)
        played = collect(
            [TASK],
            team,
            Adder,
            one_chat,
            group_size=1,
            seed=SEED,
            step=STEP,
            tree=Branching(width=3),
            log=record,
        )
        [trajectory] = asyncio.run(played)[0].trajectories
        assert trajectory.error == ""
        return [(turn.node, turn.text) for turn in trajectory.turns] + [
            (e.node, e.result) for e in trajectory.tools
        ]

    expected = texts_and_results("whole")
    assert len({result for _, result in expected if result.isdecimal()}) > 1
    assert forked(partial(texts_and_results, "killed", 10), tmp_path / "log") == -signal.SIGKILL
    before = len((tmp_path / "read").read_text().split("\n"))
    assert texts_and_results("killed") == expected
    assert len((tmp_path / "read").read_text().split("\n")) - before < before
