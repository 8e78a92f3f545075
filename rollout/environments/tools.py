"""Tools that agents call in chats: their schemas, and calls that are checked and limited.

The tools themselves are in `calculator`, `chat_tools` and `mcp`.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from rollout.base.errors import EnvError, OptionsError
from rollout.base.options import json_schema, option_descriptions, options_model
from rollout.base.signatures import check_call
from rollout.base.text import truncate_middle
from rollout.environments.protocol import AgentMistake, ToolCall
from rollout.models.tool_calls import ToolSchema
from rollout.records.trajectory import ToolUse


class ToolFailed(Exception):
    """A well-formed call of a tool failed; the message is the result of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that agents may call.

    Attributes:
        schema: name, description and parameters, as agents are shown them.
        run: makes a call with the arguments by name; raises AgentMistake or ToolFailed.
        recorded_by_env: True if a call is a step of the environment, which records it.
        parallel: True if calls of one reply may run at the same time, because no call changes the
            result of another.
        repeat_on_replay: True if calls are made again when a trajectory is replayed after a
            restart, because their effects are lost with the process, such as variables of a
            session. If False, a call that was answered before the restart gets its recorded result.
    """

    schema: ToolSchema
    run: Callable[..., Awaitable[str]]
    recorded_by_env: bool = False
    parallel: bool = False
    repeat_on_replay: bool = False


# Opens tools for one trajectory. Its parameters `env` and `calls`, if it has them, get the
# trajectory's environment and its `CallRecord`, and tests may pass `sandbox`; the others are options of
# the config.
ToolMaker = Callable[..., AbstractAsyncContextManager[list[Tool]]]


def tool_of(function: Callable[..., Awaitable[str]], **flags: bool) -> Tool:
    """Make a tool of an async function.

    Args:
        function: makes a call. Its keyword-only parameters are those of the tool. The first
            paragraph of its docstring describes the tool, and its `Args:` describe the parameters.
        flags: boolean fields of `Tool`.

    Raises:
        OptionsError: the function is not async, has a parameter that is not keyword-only, or the
            type of a parameter cannot be read or checked.
    """
    name = function.__name__
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            raise OptionsError(
                f"tool '{name}': parameter '{parameter.name}' is not keyword-only; expected "
                f"`async def {name}(*, ...)`"
            )
    check_call(f"tool '{name}'", function, (), coroutine=True)
    parameters = json_schema(options_model(function))
    parameters.pop("title", None)
    descriptions = option_descriptions(function)
    for key, schema_of_parameter in parameters.get("properties", {}).items():
        schema_of_parameter.pop("title", None)
        if key in descriptions:
            schema_of_parameter["description"] = descriptions[key]

    first_paragraph = (inspect.getdoc(function) or "").partition("\n\n")[0]
    schema = ToolSchema(
        name=name,
        description=" ".join(first_paragraph.split()),
        parameters=parameters,
    )
    return Tool(schema=schema, run=function, **flags)


def chosen_tool(tools: Mapping[str, Tool], name: str, arguments: object) -> Tool:
    """Return the tool with this name, if it takes these arguments.

    Raises:
        AgentMistake: there is no such tool, or its schema does not allow the arguments.
        EnvError: the schema is invalid.
    """
    import jsonschema

    if name not in tools:
        raise AgentMistake(f"There is no tool '{name}'; tools: {', '.join(tools)}")
    tool = tools[name]
    try:
        jsonschema.validate(arguments, tool.schema.parameters)
    except jsonschema.ValidationError as error:
        location = "/".join(map(str, error.absolute_path)) or "arguments"
        raise AgentMistake(f"{name}: {location}: {error.message}") from error
    except Exception as error:
        raise EnvError(
            f"the schema of tool '{name}' failed ({type(error).__name__}: {error})"
        ) from error
    return tool


def _read_arguments(use: ToolUse) -> Any:
    """Return the arguments of a call.

    Raises:
        AgentMistake: they contain a lone surrogate; sending it would break an MCP connection.
    """
    arguments = json.loads(use.arguments)
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise AgentMistake(
            f"{use.name}: the arguments contain a lone surrogate, which is no character"
        ) from error
    return arguments


async def call_tool(
    tools: Mapping[str, Tool], use: ToolUse, *, call_s: float, max_chars: int
) -> ToolCall:
    """Make a call that an agent requested; if the call is wrong or fails, the result says why.

    Args:
        tools: the agent's tools by name.
        use: name and arguments as the agent wrote them.
        call_s: seconds after which the call has failed; a tool that steps the environment has the
            run's deadline instead.
        max_chars: maximum length of the result; the middle of a longer one is left out.

    Raises:
        EnvError: the tool failed for good, and not through the agent's fault.
    """
    failed = True
    try:
        arguments = _read_arguments(use)
        tool = chosen_tool(tools, use.name, arguments)
        # If a tool that steps the environment is late, the run's deadline fails the trajectory. A
        # tool result would show the model an outage that is not its fault.
        deadline_s = None if tool.recorded_by_env else call_s
        async with asyncio.timeout(deadline_s):
            result = await tool.run(**arguments)
        failed = False
    except TimeoutError:
        result = f"{use.name}: nothing came within {call_s:g} s"
    except (AgentMistake, ToolFailed) as error:
        result = str(error)
    return ToolCall(
        tool=use.name,
        query=use.arguments,
        result=truncate_middle(result, max_chars),
        failed=failed,
    )
