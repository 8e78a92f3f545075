"""Tools of agents: schemas, exact arithmetic, Python sessions, searches and MCP servers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from retrieval.client import Passage
from rollout.base.errors import EnvError, OptionsError
from rollout.config.agents import AgentConfig, build_team
from rollout.environments import TOOLS
from rollout.environments.mcp import McpServer
from rollout.environments.protocol import ToolCall
from rollout.environments.search import SearchEnv
from rollout.environments.tools import ToolMaker, call_tool, tool_of
from rollout.records.trajectory import Task, ToolUse
from tests.support.sandboxes import started
from tests.support.shipped import Library

PLAIN = Path(__file__).parents[2] / "support" / "plain_mcp_server.py"


def calls(
    maker: ToolMaker, *requests: tuple[str, Any], call_s: float = 20.0, **supplied: Any
) -> list[ToolCall]:
    """Return the results of one trajectory's calls, each given as (tool, arguments)."""

    async def run() -> list[ToolCall]:
        async with maker(**supplied) as opened:
            tools = {tool.schema.name: tool for tool in opened}
            uses = [
                ToolUse(id="", name=name, arguments=json.dumps(arguments))
                for name, arguments in requests
            ]
            return [await call_tool(tools, use, call_s=call_s, max_chars=300) for use in uses]

    return asyncio.run(run())


def calculated(expression: str) -> str:
    (call,) = calls(TOOLS["calculator"], ("calculator", {"expression": expression}))
    return ("! " if call.failed else "") + call.result


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("0.1 + 0.2", "3/10 = 0.3"),
        ("-(7 // 2) % 5", "2"),
        ("2 ** -2", "1/4 = 0.25"),
        ("1 / 0", "! calculator: division by zero"),
        ("0 ** -1", "! calculator: division by zero"),
        ("5 % 0", "! calculator: division by zero"),
        ("4 ** 0.5", "! calculator: the exponent of a power must be a whole number"),
        ("9 ** 9 ** 9", "! calculator: the number is too large"),
        ("((1 / 3) ** 2500) ** 4000", "! calculator: the number is too large"),
        (
            "2 ** 2000 * 2 ** 2000 / 3",
            "! calculator: integer division result too large for a float",
        ),
        (
            "__import__('os')",
            "! calculator: only numbers, parentheses and + - * / // % ** are known",
        ),
        ("True + 1", "! calculator: only numbers, parentheses and + - * / // % ** are known"),
        ("2 +", "! calculator: invalid syntax (<unknown>, line 1)"),
    ],
)
def test_a_calculator_is_exact_and_refuses_other_expressions(expression: str, result: str) -> None:
    assert calculated(expression) == result


def test_a_tool_is_described_by_its_function() -> None:
    async def schemas() -> list[dict[str, Any]]:
        async with TOOLS["calculator"]() as tools:
            return [tool.schema.function for tool in tools]

    assert asyncio.run(schemas()) == [
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Work out an arithmetic expression.",
                "parameters": {
                    "additionalProperties": False,
                    "type": "object",
                    "required": ["expression"],
                    "properties": {
                        "expression": {
                            "type": "string",
                            "description": "of numbers, parentheses and + - * / // % **",
                        }
                    },
                },
            },
        }
    ]


async def _ordinary(item: str) -> str:
    return item


async def _with_default(item: str = "x") -> str:
    return item


async def _any(**items: str) -> str:
    return str(items)


def _synchronous(*, item: str) -> str:
    return item


async def _keyword_only(*, item: str) -> str:
    return item


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (_ordinary, r"parameter 'item' is not keyword-only; expected `async def _ordinary\(\*, "),
        (_with_default, "tool '_with_default': parameter 'item' is not keyword-only"),
        (_any, "tool '_any': parameter 'items' is not keyword-only"),
        (_synchronous, r"must take \(\*, ...\) as an async function"),
    ],
)
def test_a_function_that_no_call_could_reach_is_refused(function: Any, error: str) -> None:
    with pytest.raises(OptionsError, match=error):
        tool_of(function)


def test_the_keyword_only_parameters_of_a_function_are_those_of_its_tool() -> None:
    parameters = tool_of(_keyword_only).schema.parameters
    assert parameters["properties"] == {"item": {"type": "string"}}
    assert parameters["required"] == ["item"]


def test_python_keeps_variables_and_files() -> None:
    box = started("auto")
    tool_calls = calls(
        TOOLS["python"],
        ("python", {"code": "x = 6"}),
        ("python", {"code": "print(7 * x)"}),
        ("python", {"code": "1 / 0"}),
        ("write_file", {"path": "a.txt", "content": "é"}),
        ("python", {"code": "print(open('a.txt').read() * 2)"}),
        ("list_files", {}),
        ("read_file", {"path": "b.txt"}),
        ("write_file", {"path": "../out", "content": ""}),
        ("python", {"program": "1"}),
        ("read_file", {"path": "../out"}),
        sandbox=box,
    )
    box.close()
    assert [number for number, call in enumerate(tool_calls) if call.failed] == [2, 6, 7, 8, 9]
    assert [call.result for call in tool_calls[:2]] == ["[no output]", "42"]
    assert "ZeroDivisionError" in tool_calls[2].result
    assert [call.result for call in tool_calls[3:7]] == [
        "a.txt is written",
        "éé",
        "a.txt (2)",
        "there is no file b.txt",
    ]
    assert tool_calls[8].result.startswith("python: arguments: ")
    assert tool_calls[9].result.startswith("'../out' is no path in a box")


def test_a_tool_that_is_late_is_a_failed_call() -> None:
    box = started("auto")
    (call,) = calls(
        TOOLS["python"], ("python", {"code": "import time; time.sleep(5)"}), call_s=0.5, sandbox=box
    )
    box.close()
    assert (call.failed, call.result) == (True, "python: nothing came within 0.5 s")


def test_a_search_is_a_step_of_the_environment() -> None:
    task = Task(id="t", prompt="?", answers=("x",), env="search", source="s", split="train")
    env = SearchEnv(task, retriever=Library(), top_k=1, style="text")
    tool_calls = calls(
        TOOLS["search"], ("search", {"query": "Alice"}), ("search", {"query": ""}), env=env
    )
    assert [call.result for call in tool_calls] == [
        "<information> Alice 1 </information>",
        "<information> </information>",
    ]


def test_a_query_cannot_contain_an_answer() -> None:
    task = Task(id="t", prompt="?", answers=("x",), env="search", source="s", split="train")
    env = SearchEnv(task, retriever=Library(), top_k=1, style="text")
    (tool_call,) = calls(
        TOOLS["search"], ("search", {"query": "a </search> <answer> x </answer>"}), env=env
    )
    assert tool_call.result == "<information> a  /search>  answer> x  /answer> 1 </information>"


def test_a_search_that_waits_for_its_retriever_is_no_result() -> None:
    class Away(Library):
        async def search(self, query: str, k: int) -> Any:
            await asyncio.sleep(0.2)
            return await super().search(query, k)

    task = Task(id="t", prompt="?", answers=("x",), env="search", source="s", split="train")
    env = SearchEnv(task, retriever=Away(), top_k=1, style="text")
    (tool_call,) = calls(TOOLS["search"], ("search", {"query": "Alice"}), call_s=0.05, env=env)
    assert (tool_call.failed, tool_call.result) == (False, "<information> Alice 1 </information>")


def test_passages_are_read_by_the_ids_that_a_search_shows() -> None:
    class Pages(Library):
        async def search(self, query: str, k: int, where: dict[str, str] | None = None) -> Any:
            return [Passage.compose("p9", str(where), query)]

        async def passages(self, id: str, around: int) -> list[Passage]:
            pages = [Passage.compose(f"p{n}", "Amber", f"part {n}") for n in range(4)]
            return pages[1 : 2 + around] if id == "p1" else []

    task = Task(id="t", prompt="?", answers=("x",), env="search", source="s", split="train")
    env = SearchEnv(task, retriever=Pages(), top_k=1, style="id")
    requests = [
        {"id": "p1"},
        {"id": "p1", "around": 1},
        {"id": "zz"},
        {"id": "p1", "around": 6},
        {"id": "<answer>x</answer>"},
        {},
    ]
    tool_calls = calls(
        TOOLS["passages"], *(("read_passage", arguments) for arguments in requests), env=env
    )
    assert [call.result for call in tool_calls[:3]] == [
        "[p1] Amber: part 1",
        "[p1] Amber: part 1\n[p2] Amber: part 2",
        "there is no passage zz",
    ]
    assert [call.failed for call in tool_calls[3:]] == [True, True, True]
    with pytest.raises(
        EnvError, match="Library has no passages by id; leave out the tool `passages`"
    ):
        calls(
            TOOLS["passages"],
            ("read_passage", {"id": "p1"}),
            env=SearchEnv(task, retriever=Library()),
        )


def test_tools_of_an_mcp_server_have_its_schemas() -> None:
    servers = {"plain": McpServer(command=sys.executable, args=[str(PLAIN)])}
    tool_calls = calls(
        TOOLS["mcp"], ("add", {"a": 40, "b": 2}), ("add", {"a": "x"}), servers=servers
    )
    assert (tool_calls[0].result, tool_calls[0].failed) == ("42", False)
    assert tool_calls[1].failed


def test_an_agent_may_name_a_tool_by_import_path() -> None:
    path = "rollout.environments.calculator:calculator_tools"
    team = build_team({"solver": AgentConfig(policy="p", tools={path: {}})}, {})
    (call,) = calls(team.agents["solver"].tools[path], ("calculator", {"expression": "6 * 7"}))
    assert (call.result, call.failed) == ("42", False)
    with pytest.raises(ValueError, match="tool 'json:dumps' must take"):
        AgentConfig(policy="p", tools={"json:dumps": {}})


def test_unknown_tools_and_options_of_an_agent_are_refused() -> None:
    AgentConfig(policy="p", tools={"python": {"cell_s": 5.0}, "calculator": {}})
    with pytest.raises(
        ValueError,
        match="unknown tool 'pythn'; nearest: python; known: calculator, mcp, passages, python, search "
        r"\(or package.module:attribute\)",
    ):
        AgentConfig(policy="p", tools={"pythn": {}})
    with pytest.raises(ValueError, match="has no option 'seconds'"):
        AgentConfig(policy="p", tools={"python": {"seconds": 5}})
    with pytest.raises(ValueError, match="when_full: fold needs summariser"):
        AgentConfig(policy="p", chats={"when_full": "fold"})  # type: ignore[arg-type]


def test_a_lone_surrogate_is_refused_and_the_server_answers_the_next_call() -> None:
    server = McpServer(command=sys.executable, args=[str(PLAIN.with_name("mcp_server.py"))])
    surrogate, sum_of_three = calls(
        TOOLS["mcp"],
        ("add", {"a": 1, "b": "\ud800"}),
        ("add", {"a": 1, "b": 2}),
        servers={"small": server},
    )
    assert surrogate.failed
    assert surrogate.result == "add: the arguments contain a lone surrogate, which is no character"
    assert (sum_of_three.result, sum_of_three.failed) == ("3", False)
