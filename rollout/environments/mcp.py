"""Tool-calling environment: agents call tools of MCP servers, then answer; each trajectory has servers of its own."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from rollout.base.async_tasks import cancel_tasks, set_outcome
from rollout.base.errors import EnvError
from rollout.base.yaml_files import read_yaml
from rollout.environments.protocol import AgentMistake, Step, ToolCall, last_tag
from rollout.environments.search import REWARDS, AnswerReward, exact_match, normalise
from rollout.environments.tools import Tool, ToolFailed, chosen_tool
from rollout.models.tool_calls import ToolSchema
from rollout.records.call_record import CallRecord
from rollout.records.trajectory import Task

_FORM: str = read_yaml(Path(__file__).with_name("forms.yaml"))["call"]
_END_S = 10.0  # for servers to end
_COUNTED = ("calls", "bad_calls", "tool_errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """What starts a server that speaks over its standard input and output."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] | None = (
        None  # besides the search path and home, which are all that it inherits
    )
    cwd: str | None = None
    outside: bool = False  # its calls act outside the run, so that a restart must not repeat them


@asynccontextmanager
async def mcp_tools(
    *,
    servers: Mapping[str, McpServer],
    start_s: PositiveFloat = 30.0,
    calls: CallRecord | None = None,
) -> AsyncIterator[list[Tool]]:
    """The tools of MCP servers, which each trajectory starts for itself.

    Args:
        servers: by name, what starts each.
        start_s: of all servers' start, in seconds.
        calls: record of the calls of servers that act outside the run.

    Raises:
        EnvError: the library is missing, a server does not start, or two have a tool of one name.
    """
    ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
    ready.add_done_callback(
        lambda _: None if ready.cancelled() else ready.exception()
    )  # perhaps nobody waits
    over = asyncio.Event()
    alive = asyncio.create_task(_live(servers, calls or CallRecord(), ready, over))
    try:
        done, _ = await asyncio.wait({ready}, timeout=start_s)
        if not done:
            raise EnvError(f"MCP servers {', '.join(servers)} did not start within {start_s:g} s")
        yield ready.result()
    finally:
        over.set()
        if ready.done():
            await asyncio.wait({alive}, timeout=_END_S)
        await cancel_tasks([alive])


async def _live(
    servers: Mapping[str, McpServer],
    calls: CallRecord,
    ready: asyncio.Future[list[Tool]],
    over: asyncio.Event,
) -> None:
    """Hold the servers: what opens their connections must be the task that closes them."""
    tools: dict[str, Tool] = {}
    try:
        async with AsyncExitStack() as stack:
            for server, settings in servers.items():
                for tool in await _started(stack, server, settings, calls):
                    if tool.schema.name in tools:
                        raise EnvError(
                            f"two MCP servers have a tool '{tool.schema.name}'; name one of them"
                        )
                    tools[tool.schema.name] = tool
            ready.set_result(list(tools.values()))
            await over.wait()
    except (
        Exception
    ) as grouped:  # of a server or the library; whoever waits for a call hears of it there
        set_outcome(ready, _failure("MCP servers", grouped))


async def _started(
    stack: AsyncExitStack, server: str, settings: McpServer, calls: CallRecord
) -> list[Tool]:
    """The tools of a server that is started, and lives as long as the stack is open."""
    try:
        from mcp import ClientSession
        from mcp.client.stdio import StdioServerParameters, stdio_client
    except ImportError as error:
        raise EnvError("env mcp needs `pip install mcore-mas[mcp]`") from error
    quiet = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  (its log)
    try:
        started = StdioServerParameters(
            command=settings.command, args=settings.args, env=settings.env, cwd=settings.cwd
        )
        streams = await stack.enter_async_context(stdio_client(started, errlog=quiet))
        session = await stack.enter_async_context(ClientSession(*streams))
        await session.initialize()
        listed = (await session.list_tools()).tools
    except Exception as error:
        raise _failure(f"MCP server '{server}'", error) from error
    record = calls if settings.outside else None
    return [_tool(session, about, record) for about in listed]


def _tool(session: Any, about: Any, record: CallRecord | None) -> Tool:
    """A tool as its server tells of it; what it says was a failure is one, and that the server broke an EnvError."""
    name = about.name

    async def answer(arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            result = await session.call_tool(name, arguments)
            text = "\n".join(
                part.text if part.type == "text" else f"[{part.type}]" for part in result.content
            )
        except Exception as error:
            raise _failure(f"MCP tool '{name}'", error) from error
        return text, bool(result.is_error)

    async def run(**arguments: Any) -> str:
        if record is None:
            text, failed = await answer(arguments)
        else:
            call = partial(answer, arguments)
            text, failed = await record.once(tuple[str, bool], call, name, arguments)
        if failed:
            raise ToolFailed(text)
        return text

    schema = ToolSchema(
        name=name, description=about.description or "", parameters=about.input_schema
    )
    hints = about.annotations
    return Tool(schema=schema, run=run, parallel=bool(hints and hints.read_only_hint), again=True)


@dataclass(eq=False, kw_only=True)
class McpEnv:
    """A question to be answered with the tools of MCP servers, which each trajectory starts for itself.

    `<call>` with JSON calls a tool; `<answer>`, or the `max_turns`th step, ends it, and the answer is scored
    against the task's. Calls that cannot be made, and errors that a tool itself reports, are the agent's to read.
    Metrics: `calls`, `bad_calls`, `tool_errors`, `answered`, `solved`.

    Args:
        servers: by name, what starts each.
        max_turns: steps at most.
        reward: of an answer.
        deadline_s: of a call, in seconds.
        start_s: of all servers' start, in seconds.
        max_chars: shown of a result.
    """

    task: Task = field(kw_only=False)
    servers: Annotated[Mapping[str, McpServer], Field(min_length=1)]
    max_turns: PositiveInt = 10
    reward: AnswerReward = "exact_match"
    deadline_s: PositiveFloat = 30.0
    start_s: PositiveFloat = 30.0
    max_chars: PositiveInt = 4000
    _opened: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)
    _tools: dict[str, Tool] | None = field(default=None, init=False)  # by name; None before open
    _counts: Counter[str] = field(default_factory=Counter, init=False)  # of _COUNTED
    _steps: int = field(default=0, init=False)

    async def open(self, task: Task, calls: CallRecord | None = None) -> None:
        tools = await self._opened.enter_async_context(
            mcp_tools(servers=self.servers, start_s=self.start_s, calls=calls)
        )
        self._tools = {tool.schema.name: tool for tool in tools}

    async def close(self) -> None:
        await self._opened.aclose()

    def reset(self, task: Task) -> str:
        """Start `task`; returns its prompt, the tools and how to call them."""
        self.task = task
        about = (
            f"- {name}: {tool.schema.description}\n  arguments: {json.dumps(tool.schema.parameters)}"
            for name, tool in (self._tools or {}).items()
        )
        return f"{task.prompt}\n\nTools:\n{chr(10).join(about)}\n\n{_FORM}"

    async def step(self, action: str) -> Step:
        """Call a tool, or answer."""
        if self._tools is None:
            raise EnvError("McpEnv.step before open")
        self._steps += 1
        answer, call = last_tag(action, "answer"), last_tag(action, "call")
        if answer is not None:
            return self._score(answer)
        tools: tuple[ToolCall, ...] = ()
        try:
            tool, arguments = _read(call, self._tools)
            tools = (await self._call(tool, arguments),)
            observation = tools[0].result
        except AgentMistake as error:
            self._counts["bad_calls"] += 1
            observation = str(error)
        if self._steps == self.max_turns:
            return self._score("", tools)
        return Step(observation=observation, tools=tools, metrics=self._counted())

    async def _call(self, tool: Tool, arguments: dict[str, Any]) -> ToolCall:
        self._counts["calls"] += 1
        name, failed = tool.schema.name, False
        try:
            async with asyncio.timeout(self.deadline_s):
                text = await tool.run(**arguments)
        except ToolFailed as error:
            text, failed = str(error), True
        except TimeoutError as error:
            raise EnvError(
                f"MCP tool '{name}' did not answer within {self.deadline_s:g} s"
            ) from error
        self._counts["tool_errors"] += failed
        query = json.dumps({"tool": name, "arguments": arguments})
        return ToolCall(tool=name, query=query, result=text[: self.max_chars], failed=failed)

    def _counted(self) -> dict[str, float]:
        return {name: float(self._counts[name]) for name in _COUNTED}

    def _score(self, answer: str, tools: tuple[ToolCall, ...] = ()) -> Step:
        truths = self.task.answers
        if not truths:
            raise EnvError(f"task {self.task.id} has no answers; an mcp task needs at least one")
        reward = REWARDS[self.reward](answer, truths)
        metrics = {
            **self._counted(),
            "answered": float(bool(answer)),
            "solved": exact_match(answer, truths),
        }
        return Step(
            reward=reward, done=True, answer=normalise(answer), tools=tools, metrics=metrics
        )


def _read(call: str | None, tools: Mapping[str, Tool]) -> tuple[Tool, dict[str, Any]]:
    """The tool that a call names, and its arguments; AgentMistake if it cannot be made."""
    try:
        fields = json.loads(call or "")
        name, arguments = fields["tool"], fields.get("arguments", {})
        json.dumps(arguments, ensure_ascii=False).encode()  # refuses text that no message can hold
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("expected a name and an object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AgentMistake(f"This is no call.\n{_FORM}") from error
    return chosen_tool(tools, name, arguments), arguments


def _failure(what: str, error: BaseException) -> EnvError:
    """One line on what went wrong, the innermost of grouped errors; our own as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = str(error).splitlines() or [""]
    return (
        error
        if isinstance(error, EnvError)
        else EnvError(f"{what} failed ({type(error).__name__}: {lines[0]})")
    )
