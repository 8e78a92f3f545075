"""The environment with a real MCP server, written and called with the official library."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.base.errors import EnvError
from rollout.environments.mcp import McpEnv, McpServer
from rollout.environments.protocol import Step
from rollout.orchestras.replies import parse_call_or_answer
from rollout.records.trajectory import Status, Task
from tests.support.casts import play, validity

SERVER = Path(__file__).parents[2] / "support" / "mcp_server.py"
PLAIN = {
    "plain": McpServer(command=sys.executable, args=[str(SERVER.with_name("plain_mcp_server.py"))])
}
SMALL = {"small": McpServer(command=sys.executable, args=[str(SERVER)])}
TASK = Task(
    id="t", prompt="How much is 40 + 2?", answers=("42",), env="mcp", source="s", split="train"
)
ROLES = {"player": "tool_caller"}


def call(tool: str, **arguments: Any) -> str:
    pairs = ", ".join(f'"{name}": {value}' for name, value in arguments.items())
    return f'<call>{{"tool": "{tool}", "arguments": {{{pairs}}}}}</call>'


async def stepped(env: McpEnv, actions: Sequence[str]) -> tuple[str, list[Step]]:
    try:
        await env.open(TASK)
        return env.reset(TASK), [await env.step(action) for action in actions]
    finally:
        await env.close()


def steps(*actions: str, servers: Any = SMALL, **options: Any) -> tuple[str, list[Step]]:
    return asyncio.run(stepped(McpEnv(TASK, servers=servers, **options), actions))


@pytest.mark.slow
def test_tools_are_listed_called_and_counted_and_the_server_ends_with_the_trajectory() -> None:
    malformed_calls = [
        "<call>add 40 and 2</call>",
        '<call>{"tool": ["add"]}</call>',
        '<call>{"tool": "add", "arguments": [40, 2]}</call>',
        f"<call>{'[' * 100_000}</call>",
        '<call>{"tool": "add", "arguments": {"a": "\\ud800"}}</call>',
    ]
    shown, results = steps(
        call("add", a=40, b=2),
        call("divide", a=1, b=0),
        call("add", a='"x"', b=2),
        call("multiply", a=1),
        *malformed_calls,
        call("pid"),
        "<answer> 42. </answer>",
        max_turns=99,
    )
    assert shown.startswith(
        "How much is 40 + 2?\n\nTools:\n- add: Add two numbers.\n  arguments: {"
    )
    assert '"required": ["a", "b"]' in shown
    assert "<call>" in shown

    total, failure, wrong_type, unknown, *malformed, pid, answer = results
    assert total.observation == "42"
    assert not total.done
    assert not total.tools[0].failed
    assert "Error executing tool divide" in failure.observation  # as the tool reports it
    assert failure.tools[0].failed
    assert "add: a: 'x' is not of type 'integer'" in wrong_type.observation
    assert wrong_type.tools == ()
    assert unknown.observation.startswith("There is no tool 'multiply'; tools: add, divide")
    assert len(malformed) == 5
    assert all(step.observation.startswith("This is no call.") for step in malformed)

    assert (answer.reward, answer.done, answer.answer) == (1.0, True, "42")
    assert answer.metrics == {
        "calls": 3.0,
        "bad_calls": 7.0,
        "tool_errors": 1.0,
        "answered": 1.0,
        "solved": 1.0,
    }
    assert not psutil.pid_exists(int(pid.observation))


def test_one_agent_calls_and_answers() -> None:
    replies = [f"<think>hm</think>{call('add', a=40, b=2)}", "no idea", "<answer>42</answer>"]
    trajectory, prompts = play(
        "single", ROLES, *replies, task=TASK, make_env=partial(McpEnv, servers=PLAIN)
    )
    assert (trajectory.outcome, trajectory.answer) == (1.0, "42")
    assert validity(trajectory) == [True, False, True]
    assert f"{call('add', a=40, b=2)}\n42\n" in prompts[1]
    assert "This is no call." in prompts[2]
    assert [(event.tool, event.result) for event in trajectory.tools] == [("add", "42")]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (call("crash"), "MCP tool 'crash' failed"),
        (call("wait"), r"MCP tool 'wait' did not answer within 0\.3 s"),
    ],
)
def test_a_server_that_breaks_or_is_late_fails_the_trajectory(action: str, message: str) -> None:
    make_env = partial(McpEnv, servers=PLAIN, deadline_s=0.3)
    trajectory, _ = play("single", ROLES, action, task=TASK, make_env=make_env)
    assert (trajectory.status, trajectory.outcome) == (Status.FAILED, None)
    with pytest.raises(EnvError, match=message):
        raise EnvError(trajectory.error)


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ({"none": McpServer(command="/no/such/program")}, "MCP server 'none' failed"),
        (
            {"dumb": McpServer(command=sys.executable, args=["-c", "print('hello')"])},
            "MCP server 'dumb' failed",
        ),
        ({"one": PLAIN["plain"], "two": PLAIN["plain"]}, "two MCP servers have a tool 'add'"),
        ({"mute": McpServer(command="sleep", args=["60"])}, "did not start within 0.5 s"),
    ],
)
def test_a_server_that_does_not_start_is_an_error_of_one_line(servers: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message) as caught:
        steps("x", servers=servers, start_s=0.5 if "mute" in servers else 60.0)
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(EnvError, match=r"pip install mcore-mas\[mcp\]"):
        steps("x")


def test_a_step_before_open_and_a_task_without_answers_are_errors() -> None:
    with pytest.raises(EnvError, match="before open"):
        asyncio.run(McpEnv(TASK, servers={}).step("x"))
    nothing = Task(id="t", prompt="", answers=(), env="mcp", source="s", split="train")
    env = McpEnv(nothing, servers={})

    async def main() -> None:
        await env.open(nothing)
        env.reset(nothing)
        try:
            await env.step("<answer>1</answer>")
        finally:
            await env.close()

    with pytest.raises(EnvError, match="task t has no answers"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<call> {} </call>", "<call>{}</call>"),
        ("<call>{}</call> so <answer>4</answer>", "<answer>4</answer>"),
        ("<think><answer>4</answer></think> hm", None),
        ("nothing", None),
    ],
)
def test_a_reply_is_a_call_or_an_answer(text: str, value: str | None) -> None:
    assert parse_call_or_answer(text) == value
