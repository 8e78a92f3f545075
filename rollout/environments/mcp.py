"""Tool-calling environment: agents call tools of MCP servers, then answer; each trajectory has servers of its own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rollout.base.errors import EnvError
from rollout.base.task_group import cancel_tasks
from rollout.environments.protocol import Step, ToolCall, last_tag
from rollout.environments.search import exact_match, normalise, token_f1
from rollout.records.trajectory import Task

_SCORES = {"exact_match": exact_match, "token_f1": token_f1}
_FORM = """Call a tool: <call>{"tool": "name", "arguments": {...}}</call>
Or end with the answer alone: <answer> your answer </answer>"""
_END_S = 10.0  # for servers to end


class BadArguments(ValueError):
    """A tool call that cannot be made: the model's mistake, whose message may be shown to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """What starts a server that speaks over its standard input and output."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] | None = None  # besides the search path and home, which are all that it inherits
    cwd: str | None = None


class McpEnv:
    """A question and the tools of some servers, for one trajectory.

    `<call>` with JSON calls a tool; `<answer>`, or the `max_turns`th step, ends it, and the answer is scored
    against the task's. Calls that cannot be made, and errors that a tool itself reports, are the agent's to read.
    Metrics: `calls`, `bad_calls`, `tool_errors`, `answered`, `solved`.
    """

    def __init__(
        self,
        servers: Mapping[str, McpServer],
        *,
        max_turns: int = 10,
        reward: Literal["exact_match", "token_f1"] = "exact_match",
        deadline_s: float = 30.0,
        start_s: float = 30.0,
        max_chars: int = 4000,
    ) -> None:
        """An environment whose servers have not started.

        Args:
            servers: by name, what starts each.
            deadline_s: of a call.
            start_s: of all servers' start.
            max_chars: shown of a result.
        """
        self._servers = servers
        self._max_turns = max_turns
        self._reward = reward
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._max_chars = max_chars
        self._tools: dict[str, tuple[Any, Any]] = {}  # session and description, by name
        self._alive: asyncio.Task[None] | None = None
        self._running = False  # all servers have started
        self._over = asyncio.Event()
        self._task: Task | None = None
        self._counts = dict.fromkeys(("calls", "bad_calls", "tool_errors"), 0.0)
        self._steps = 0

    async def open(self, task: Task) -> None:
        """Start the servers and ask for their tools.

        Raises:
            EnvError: the library is missing, or a server does not start.
        """
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ready.add_done_callback(lambda _: None if ready.cancelled() else ready.exception())  # perhaps nobody waits
        self._alive = asyncio.create_task(self._live(ready))
        try:
            await asyncio.wait_for(asyncio.shield(ready), self._start_s)
        except TimeoutError as error:
            raise EnvError(
                f"MCP servers {', '.join(self._servers)} did not start within {self._start_s:g} s"
            ) from error

    async def close(self) -> None:
        """End the servers."""
        if self._alive is None:
            return
        self._over.set()
        if self._running:
            await asyncio.wait({self._alive}, timeout=_END_S)
        await cancel_tasks([self._alive])

    def reset(self, task: Task) -> str:
        """Start `task`; returns its prompt, the tools and how to call them."""
        self._task = task
        about = (
            f"- {name}: {tool.description or ''}\n  arguments: {json.dumps(tool.input_schema)}"
            for name, tool in self._listed()
        )
        return f"{task.prompt}\n\nTools:\n{chr(10).join(about)}\n\n{_FORM}"

    async def step(self, action: str) -> Step:
        """Call a tool, or answer.

        Raises:
            EnvError: the environment is not open, or a server is late or broken.
        """
        if self._task is None or self._alive is None:
            raise EnvError("McpEnv.step before open and reset")
        self._steps += 1
        answer, call = last_tag(action, "answer"), last_tag(action, "call")
        if answer is not None:
            return self._score(self._task, answer)
        tools: tuple[ToolCall, ...] = ()
        try:
            name, arguments = self._read(call)
            tools = (await self._call(name, arguments),)
            observation = tools[0].result
        except BadArguments as error:
            self._counts["bad_calls"] += 1
            observation = str(error)
        if self._steps == self._max_turns:
            return self._score(self._task, "", tools)
        return Step(observation=observation, tools=tools, metrics=dict(self._counts))

    async def _live(self, ready: asyncio.Future[None]) -> None:
        """Hold the servers: what opens their connections must be the task that closes them."""
        try:
            async with AsyncExitStack() as stack:
                for server, settings in self._servers.items():
                    await self._start(stack, server, settings)
                self._running = True
                ready.set_result(None)
                await self._over.wait()
        except Exception as grouped:  # of a server or the library; whoever waits for a call hears of it there
            error = _innermost(grouped)
            if not ready.done():
                ready.set_exception(error if isinstance(error, EnvError) else EnvError(_why("MCP servers", error)))

    async def _start(self, stack: AsyncExitStack, server: str, settings: McpServer) -> None:
        try:
            from mcp import ClientSession
            from mcp.client.stdio import StdioServerParameters, stdio_client
        except ImportError as error:
            raise EnvError("env mcp needs `pip install mcore-mas[mcp]`") from error
        quiet = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  (its log)
        try:
            streams = await stack.enter_async_context(
                stdio_client(StdioServerParameters(**asdict(settings)), errlog=quiet)
            )
            session = await stack.enter_async_context(ClientSession(*streams))
            await session.initialize()
            listed = (await session.list_tools()).tools
        except Exception as error:
            raise EnvError(_why(f"MCP server '{server}'", error)) from error
        for tool in listed:
            if tool.name in self._tools:
                raise EnvError(f"two MCP servers have a tool '{tool.name}'; name one of them")
            self._tools[tool.name] = session, tool

    def _listed(self) -> list[tuple[str, Any]]:
        return [(name, tool) for name, (_, tool) in self._tools.items()]

    def _read(self, call: str | None) -> tuple[str, dict[str, Any]]:
        import jsonschema

        try:
            fields = json.loads(call or "")
            name, arguments = fields["tool"], fields.get("arguments", {})
            json.dumps(arguments, ensure_ascii=False).encode()  # refuses text that no message can hold
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadArguments(f"This is no call.\n{_FORM}") from error
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise BadArguments(f"This is no call.\n{_FORM}")
        if name not in self._tools:
            raise BadArguments(f"There is no tool '{name}'; tools: {', '.join(self._tools)}")
        try:
            jsonschema.validate(arguments, self._tools[name][1].input_schema)
        except jsonschema.ValidationError as error:
            place = "/".join(map(str, error.absolute_path)) or "arguments"
            raise BadArguments(f"{name}: {place}: {error.message}") from error
        except Exception as error:  # of a schema that is none
            raise EnvError(_why(f"the schema of MCP tool '{name}'", error)) from error
        return name, arguments

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolCall:
        session, _ = self._tools[name]
        self._counts["calls"] += 1
        try:
            async with asyncio.timeout(self._deadline_s):
                result = await session.call_tool(name, arguments)
            text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
            failed = bool(result.is_error)
        except TimeoutError as error:
            raise EnvError(f"MCP tool '{name}' did not answer within {self._deadline_s:g} s") from error
        except Exception as error:
            raise EnvError(_why(f"MCP tool '{name}'", error)) from error
        self._counts["tool_errors"] += failed
        query = json.dumps({"tool": name, "arguments": arguments})
        return ToolCall(tool=name, query=query, result=text[: self._max_chars], failed=failed)

    def _score(self, task: Task, answer: str, tools: tuple[ToolCall, ...] = ()) -> Step:
        if not task.answers:
            raise EnvError(f"task {task.id} has no answers; an mcp task needs at least one")
        reward = _SCORES[self._reward](answer, task.answers)
        solved = exact_match(answer, task.answers)
        metrics = {**self._counts, "answered": float(bool(answer)), "solved": solved}
        return Step(reward=reward, done=True, answer=normalise(answer), tools=tools, metrics=metrics)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _why(what: str, error: BaseException) -> str:
    """One line on what went wrong, the innermost of grouped errors."""
    error = _innermost(error)
    lines = str(error).splitlines() or [""]
    return f"{what} failed ({type(error).__name__}: {lines[0]})"
