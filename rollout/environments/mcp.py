"""Tool-calling environment: agents call tools of MCP servers, then answer.

`mcp_tools` starts servers for one trajectory and yields their tools, for chats and for `McpEnv`.
"""

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
from rollout.base.errors import EnvError, Unscorable
from rollout.base.yaml_files import read_yaml
from rollout.environments.protocol import AgentMistake, Step, ToolCall, last_tag
from rollout.environments.text_scores import REWARDS, AnswerReward, exact_match, normalise
from rollout.environments.tools import Tool, ToolFailed, chosen_tool
from rollout.models.tool_calls import ToolSchema
from rollout.records.call_record import CallRecord
from rollout.records.trajectory import Task

_CALL_FORM: str = read_yaml(Path(__file__).with_name("forms.yaml"))["call"]
_SHUTDOWN_S = 10.0  # servers that have not ended by then are cancelled
_COUNTED = ("calls", "bad_calls", "tool_errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """Command of a server that communicates over its standard input and output.

    Attributes:
        env: environment variables in addition to those that the server inherits: HOME, LOGNAME,
            PATH, SHELL, TERM and USER.
        outside: True if calls act outside the run, so that a restart must not repeat them.
    """

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    outside: bool = False


@asynccontextmanager
async def mcp_tools(
    *,
    servers: Mapping[str, McpServer],
    start_s: PositiveFloat = 30.0,
    calls: CallRecord | None = None,
) -> AsyncIterator[list[Tool]]:
    """Start MCP servers for one trajectory and yield their tools.

    Args:
        servers: command that starts each server, by the server's name.
        start_s: seconds within which all servers must have started.
        calls: record of the calls of servers that act outside the run.

    Raises:
        EnvError: the library is missing, a server does not start, or two have a tool of one name.
    """
    ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
    ready.add_done_callback(_mark_retrieved)
    closing = asyncio.Event()
    serving = asyncio.create_task(_serve(servers, calls or CallRecord(), ready, closing))
    try:
        done, _ = await asyncio.wait({ready}, timeout=start_s)
        if not done:
            raise EnvError(f"MCP servers {', '.join(servers)} did not start within {start_s:g} s")
        yield ready.result()
    finally:
        closing.set()
        # Servers that are still starting are cancelled at once: nothing looks at `closing` yet.
        if ready.done():
            await asyncio.wait({serving}, timeout=_SHUTDOWN_S)
        await cancel_tasks([serving])


def _mark_retrieved(future: asyncio.Future[list[Tool]]) -> None:
    """Look at the exception of a future, so that asyncio does not complain that nobody did.

    If the start times out, nobody awaits the future.
    """
    if not future.cancelled():
        future.exception()


async def _serve(
    servers: Mapping[str, McpServer],
    calls: CallRecord,
    ready: asyncio.Future[list[Tool]],
    closing: asyncio.Event,
) -> None:
    """Start the servers, set `ready` to their tools, and stop them when `closing` is set.

    This runs in a separate task, because the library requires that a connection is closed by the
    task that opened it.
    """
    tools: dict[str, Tool] = {}
    try:
        async with AsyncExitStack() as stack:
            for name, server in servers.items():
                for tool in await _start_server(stack, name, server, calls):
                    if tool.schema.name in tools:
                        raise EnvError(
                            f"two MCP servers have a tool '{tool.schema.name}'; "
                            "leave one of the servers out, or rename its tool"
                        )
                    tools[tool.schema.name] = tool
            ready.set_result(list(tools.values()))
            await closing.wait()
    except Exception as error:
        # After the start, the error of a server reaches the agent's next call instead.
        set_outcome(ready, _env_error("MCP servers", error))


async def _start_server(
    stack: AsyncExitStack, name: str, server: McpServer, calls: CallRecord
) -> list[Tool]:
    """Start a server, which lives until the stack is closed, and return its tools."""
    try:
        from mcp import ClientSession
        from mcp.client.stdio import StdioServerParameters, stdio_client
    except ImportError as error:
        raise EnvError("env mcp needs `pip install mcore-mas[mcp]`") from error
    server_log = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    try:
        parameters = StdioServerParameters(
            command=server.command, args=server.args, env=server.env, cwd=server.cwd
        )
        streams = await stack.enter_async_context(stdio_client(parameters, errlog=server_log))
        session = await stack.enter_async_context(ClientSession(*streams))
        await session.initialize()
        descriptions = await _list_tools(session)
    except Exception as error:
        raise _env_error(f"MCP server '{name}'", error) from error
    record = calls if server.outside else None
    return [_make_tool(session, description, record) for description in descriptions]


async def _list_tools(session: Any) -> list[Any]:
    """Return a server's descriptions of all its tools, which it may list on several pages.

    Args:
        session: `mcp.ClientSession` of the server.
    """
    from mcp.types import PaginatedRequestParams

    descriptions: list[Any] = []
    cursor = None
    while True:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        descriptions += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return descriptions


def _make_tool(session: Any, mcp_tool: Any, record: CallRecord | None) -> Tool:
    """Make a tool for agents from a tool of a server.

    The tool raises ToolFailed if the server reports a failure, and EnvError if the server breaks.

    Args:
        session: `mcp.ClientSession` of the server.
        mcp_tool: the server's description of the tool, an `mcp.types.Tool`.
        record: record of the calls, for a server whose calls must not be repeated when a trajectory
            is replayed after a restart; None if they may be repeated.
    """
    name = mcp_tool.name

    async def call_server(arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return the text of the result, and True if it is a failure."""
        try:
            result = await session.call_tool(name, arguments)
            parts = [
                part.text if part.type == "text" else f"[{part.type}]" for part in result.content
            ]
        except Exception as error:
            raise _env_error(f"MCP tool '{name}'", error) from error
        return "\n".join(parts), bool(result.is_error)

    async def run(**arguments: Any) -> str:
        if record is None:
            text, failed = await call_server(arguments)
        else:
            call = partial(call_server, arguments)
            text, failed = await record.once(tuple[str, bool], call, name, arguments)
        if failed:
            raise ToolFailed(text)
        return text

    schema = ToolSchema(
        name=name, description=mcp_tool.description or "", parameters=mcp_tool.input_schema
    )
    hints = mcp_tool.annotations
    read_only = bool(hints and hints.read_only_hint)
    # A replay always calls `run` again. With a record, `run` then returns the recorded result.
    return Tool(schema=schema, run=run, parallel=read_only, repeat_on_replay=True)


@dataclass(eq=False, kw_only=True)
class McpEnv:
    """A question to be answered with the tools of MCP servers, started for each trajectory.

    `<call>` with JSON calls a tool. `<answer>` ends the trajectory, and the answer is scored against
    the task's. Step number `max_turns` ends it too, with the answer "" if the text has no `<answer>`.
    Malformed calls, and failures that a tool reports, are observations. Metrics are `calls`,
    `bad_calls`, `tool_errors`, `answered` and `solved`.

    Args:
        servers: command that starts each server, by the server's name.
        max_turns: maximum number of steps; after them the trajectory ends.
        reward: score of the answer that becomes the outcome: `exact_match` or `token_f1`.
        deadline_s: seconds that a call of a tool may take.
        start_s: seconds within which all servers must have started.
        max_chars: maximum number of characters of a result that an agent is shown.
    """

    task: Task = field(kw_only=False)
    servers: Annotated[Mapping[str, McpServer], Field(min_length=1)]
    max_turns: PositiveInt = 10
    reward: AnswerReward = "exact_match"
    deadline_s: PositiveFloat = 30.0
    start_s: PositiveFloat = 30.0
    max_chars: PositiveInt = 4000
    _resources: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)
    # Tools by name; None before `open`.
    _tools: dict[str, Tool] | None = field(default=None, init=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False)
    _steps: int = field(default=0, init=False)

    async def open(self, task: Task, calls: CallRecord | None = None) -> None:
        """Start the servers."""
        tools = await self._resources.enter_async_context(
            mcp_tools(servers=self.servers, start_s=self.start_s, calls=calls)
        )
        self._tools = {tool.schema.name: tool for tool in tools}

    async def close(self) -> None:
        await self._resources.aclose()

    def reset(self, task: Task) -> str:
        """Start a task; return its prompt, the tools and the form of a call."""
        self.task = task
        descriptions = []
        for name, tool in (self._tools or {}).items():
            parameters = json.dumps(tool.schema.parameters)
            descriptions.append(f"- {name}: {tool.schema.description}\n  arguments: {parameters}")
        tools = "\n".join(descriptions)
        return f"{task.prompt}\n\nTools:\n{tools}\n\n{_CALL_FORM}"

    async def step(self, action: str) -> Step:
        """Call a tool, or answer."""
        if self._tools is None:
            raise EnvError("McpEnv.step before open")
        self._steps += 1
        answer = last_tag(action, "answer")
        if answer is not None:
            return self._score(answer)

        tool_calls: tuple[ToolCall, ...] = ()
        try:
            tool, arguments = _parse_call(last_tag(action, "call"), self._tools)
            tool_call = await self._call(tool, arguments)
            tool_calls = (tool_call,)
            observation = tool_call.result
        except AgentMistake as error:
            self._counts["bad_calls"] += 1
            observation = str(error)

        if self._steps == self.max_turns:
            return self._score("", tool_calls)
        return Step(observation=observation, tools=tool_calls, metrics=self._count_metrics())

    async def _call(self, tool: Tool, arguments: dict[str, Any]) -> ToolCall:
        """Call a tool within the deadline; if the tool reports a failure, its text is the result.

        Raises:
            EnvError: the server broke, or did not answer in time.
        """
        self._counts["calls"] += 1
        name = tool.schema.name
        failed = False
        try:
            async with asyncio.timeout(self.deadline_s):
                text = await tool.run(**arguments)
        except ToolFailed as error:
            text = str(error)
            failed = True
        except TimeoutError as error:
            raise EnvError(
                f"MCP tool '{name}' did not answer within {self.deadline_s:g} s"
            ) from error
        if failed:
            self._counts["tool_errors"] += 1
        return ToolCall(
            tool=name,
            query=json.dumps({"tool": name, "arguments": arguments}),
            result=text[: self.max_chars],
            failed=failed,
        )

    def _count_metrics(self) -> dict[str, float]:
        return {name: float(self._counts[name]) for name in _COUNTED}

    def _score(self, answer: str, tool_calls: tuple[ToolCall, ...] = ()) -> Step:
        """Score an answer, "" for none, and end the trajectory."""
        truths = self.task.answers
        if not truths:
            raise Unscorable(f"task {self.task.id} has no answers; an mcp task needs at least one")
        return Step(
            reward=REWARDS[self.reward](answer, truths),
            done=True,
            answer=normalise(answer),
            tools=tool_calls,
            metrics={
                **self._count_metrics(),
                "answered": float(bool(answer)),
                "solved": exact_match(answer, truths),
            },
        )


def _parse_call(call: str | None, tools: Mapping[str, Tool]) -> tuple[Tool, dict[str, Any]]:
    """Return the tool that a call names, and its arguments.

    Raises:
        AgentMistake: the call is malformed, there is no such tool, or it does not take these
            arguments.
    """
    try:
        fields = json.loads(call or "")
        name = fields["tool"]
        arguments = fields.get("arguments", {})
        # Surrogates cannot be sent to a server; encoding refuses them.
        json.dumps(arguments, ensure_ascii=False).encode()
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("expected a name and an object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AgentMistake(f"This is no call.\n{_CALL_FORM}") from error
    return chosen_tool(tools, name, arguments), arguments


def _env_error(subject: str, error: BaseException) -> EnvError:
    """Return an EnvError of one line for an error, or for the first one of a group.

    An EnvError is returned as it is.

    Args:
        subject: the server or tool that has failed, with which the message begins.
        error: error of the subject.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EnvError):
        return error
    first_line = (str(error).splitlines() or [""])[0]
    return EnvError(f"{subject} failed ({type(error).__name__}: {first_line})")
