"""Concurrent tool calls of one reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollout.engines import EngineClient
from rollout.environments.tools import Tool, tool_of
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Sampling, Status, Trajectory
from rollout.teams.roles import Agent, ChatRules, Role
from rollout.teams.team import Team
from tests.support.play import SEED, STEP, TASK, Adder, collect, number
from tests.support.scripted_engine import ScriptedEngine
from tests.support.templates import call


def meeting(parallel: bool, *, fails: str = "") -> tuple[Any, list[str]]:
    """Return a maker of the tools `meet`, whose calls wait for each other, and `pass_by`, and their log."""
    log: list[str] = []

    @asynccontextmanager
    async def tools() -> AsyncIterator[list[Tool]]:
        barrier = asyncio.Barrier(2)

        async def meet(*, who: str) -> str:
            """Wait for somebody."""
            log.append(f"{who} comes")
            if who == fails:
                raise RuntimeError("lost")
            await barrier.wait()
            await asyncio.sleep(0.02 if who == "Ann" else 0)  # the first call ends last
            log.append(f"{who} goes")
            return f"{who} was there"

        async def pass_by(*, who: str) -> str:
            """Do not wait."""
            log.append(f"{who} passes")
            return f"{who} passed"

        yield [tool_of(meet, parallel=parallel), tool_of(pass_by)]

    return tools, log


def calls(*arguments: tuple[str, str]) -> str:
    return "\n".join(call(name, f'{{"who":"{who}"}}') for name, who in arguments)


def meet(renderer: Renderer, tools: Any, *replies: str, **rules: Any) -> Trajectory:
    async def orchestra(task: Any, team: Any, env: Any) -> None:
        chat = team.chat("a")
        await chat.say("go")
        await chat.run(max_turns=1)
        await env.step("1")

    engine = ScriptedEngine(
        lambda prompt, n: (*renderer.encode([*replies, "done"][n]), renderer.stop[0])
    )
    role = Role(name="r", system="S", user="", parse=number)
    sampling = Sampling(max_tokens=400)
    a = Agent(
        name="a",
        role=role,
        policy="p",
        sampling=sampling,
        chats=ChatRules(**rules),
        tools={"met": tools},
    )
    team = Team({"a": a}, {"p": EngineClient(engine=engine, renderer=renderer)})
    (group,) = asyncio.run(
        collect([TASK], team, Adder, orchestra, group_size=1, seed=SEED, step=STEP)
    )
    return group.trajectories[0]


TWO = (("meet", "Ann"), ("meet", "Bob"))


def test_calls_of_parallel_tools_are_made_concurrently(qwen: Renderer) -> None:
    tools, log = meeting(parallel=True)
    trajectory = meet(qwen, tools, calls(("pass_by", "Cy"), TWO[0], ("pass_by", "Di"), TWO[1]))
    assert trajectory.error == ""
    assert log.index("Bob comes") < log.index("Ann goes") > log.index("Bob goes")
    results = [
        message.content for message in trajectory.turns[1].messages if message.role == "tool"
    ]
    assert results == ["Cy passed", "Ann was there", "Di passed", "Bob was there"]
    assert [event.result for event in trajectory.tools] == [
        "Cy passed",
        "Di passed",
        "Ann was there",
        "Bob was there",
    ]


def test_calls_of_other_tools_are_made_in_order(qwen: Renderer) -> None:
    tools, log = meeting(parallel=False)
    trajectory = meet(qwen, tools, calls(*TWO), call_s=0.05)
    assert log == ["Ann comes", "Bob comes"]  # the calls never meet
    assert [event.result for event in trajectory.tools] == ["meet: nothing came within 0.05 s"] * 2


def test_limits_hold_for_concurrent_calls(qwen: Renderer) -> None:
    tools, log = meeting(parallel=True)
    trajectory = meet(qwen, tools, calls(*TWO, ("meet", "Eve")), calls_per_turn=2)
    results = [
        message.content for message in trajectory.turns[1].messages if message.role == "tool"
    ]
    assert results == [
        "Ann was there",
        "Bob was there",
        "This call was not made: a reply may make 2.",
    ]
    tools, log = meeting(parallel=True)
    trajectory = meet(qwen, tools, calls(*TWO, ("meet", "Eve")), calls=2, call_s=5.0)
    assert "all 2 calls are spent" in trajectory.turns[1].messages[-1].content
    assert len(trajectory.tools) == 2 and not any("Eve" in line for line in log)


def test_a_broken_tool_cancels_concurrent_calls(qwen: Renderer) -> None:
    tools, log = meeting(parallel=True, fails="Bob")
    trajectory = meet(qwen, tools, calls(*TWO))
    assert trajectory.status is Status.FAILED and "RuntimeError: lost" in trajectory.error
    assert log == ["Ann comes", "Bob comes"]
