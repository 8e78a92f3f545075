"""Tools that agents call in chats: a calculator, Python with files, search; what is offered, checked and limited."""

import ast
import asyncio
import inspect
import json
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from rollout.base.errors import EnvError
from rollout.base.options import json_schema, option_descriptions, options_model
from rollout.environments.protocol import AgentMistake, Env, ToolCall
from rollout.environments.running import PRINTED_CHARS, Tier, local_sandbox
from rollout.models.tool_calls import ToolSchema
from rollout.records.trajectory import ToolUse
from rollout.sandbox import Sandbox, Session
from rollout.sandbox.records import RunLimits, Verdict, render_result, truncate_middle


class ToolFailed(Exception):
    """A tool was called as it should be and did not work out; the message is its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool as agents are told of it, and what it does."""

    schema: ToolSchema
    run: Callable[..., Awaitable[str]]  # its arguments by name; raises AgentMistake or ToolFailed
    noted: bool = False  # the environment writes its calls down itself
    parallel: bool = (
        False  # calls of one reply may be under way at once, and no call changes what another finds
    )
    # When a trajectory is played again after a restart, its calls are made again, because their
    # effects are gone with the process, such as variables of a session. Without this, a call that
    # was answered before the restart gets its recorded result.
    again: bool = False


# opens tools for one trajectory; parameters `env` and `calls` get its environment and its `CallRecord`
ToolMaker = Callable[..., AbstractAsyncContextManager[list[Tool]]]


def tool_of(function: Callable[..., Awaitable[str]], **flags: bool) -> Tool:
    """The tool that an async function is, with flags of `Tool`: its keyword-only parameters are the arguments, its
    docstring the words.
    """
    parameters = json_schema(options_model(function))
    said = option_descriptions(function)
    for name, part in parameters.get("properties", {}).items():
        part.pop("title", None)
        part |= {"description": said[name]} if name in said else {}
    parameters.pop("title", None)
    about = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    schema = ToolSchema(name=function.__name__, description=about, parameters=parameters)
    return Tool(schema=schema, run=function, **flags)


def chosen_tool(tools: Mapping[str, Tool], name: str, arguments: object) -> Tool:
    """The tool of a call; AgentMistake if there is none or its schema forbids these, EnvError if that is no schema."""
    import jsonschema

    if name not in tools:
        raise AgentMistake(f"There is no tool '{name}'; tools: {', '.join(tools)}")
    try:
        jsonschema.validate(arguments, tools[name].schema.parameters)
    except jsonschema.ValidationError as error:
        place = "/".join(map(str, error.absolute_path)) or "arguments"
        raise AgentMistake(f"{name}: {place}: {error.message}") from error
    except Exception as error:
        raise EnvError(
            f"the schema of tool '{name}' failed ({type(error).__name__}: {error})"
        ) from error
    return tools[name]


async def call_tool(
    tools: Mapping[str, Tool], use: ToolUse, *, call_s: float, most_chars: int
) -> ToolCall:
    """Make a call that an agent asked for. What is wrong with it is its result, for the agent to read.

    Args:
        call_s: seconds that it may take.
        most_chars: of a result; of a longer one the middle is left out.

    Raises:
        EnvError: the tool failed for good, through nobody's fault here.
    """
    failed = True
    try:
        arguments = json.loads(use.arguments)
        tool = chosen_tool(tools, use.name, arguments)
        # a step of the environment's own has the run's limit: that a retriever is away is nothing to tell a model
        async with asyncio.timeout(None if tool.noted else call_s):
            result = await tool.run(**arguments)
        failed = False
    except TimeoutError:
        result = f"{use.name}: nothing came within {call_s:g} s"
    except (AgentMistake, ToolFailed) as error:
        result = str(error)
    shown = truncate_middle(result, most_chars)
    return ToolCall(tool=use.name, query=use.arguments, result=shown, failed=failed)


_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LARGEST_BITS = 4096  # of a number in a calculation


@asynccontextmanager
async def calculator_tools() -> AsyncIterator[list[Tool]]:
    """A calculator with exact fractions."""
    yield [tool_of(calculator, parallel=True)]


async def calculator(*, expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: of numbers, parentheses and + - * / // % **
    """
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(value.numerator) if value.denominator == 1 else f"{value} = {float(value):.12g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise AgentMistake(f"calculator: {error or type(error).__name__}") from error


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _value(left), _value(right)
            if power.denominator != 1 or abs(power) * _bits(base) > _LARGEST_BITS:
                raise ValueError("a power must be a whole number, and not too large")
            value = Fraction(base**power.numerator)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only numbers, parentheses and + - * / // % ** are known")
    if _bits(value) > _LARGEST_BITS:
        raise ValueError("the number is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


@asynccontextmanager
async def python_tools(
    *,
    files: bool = True,
    cell_s: PositiveFloat = 10.0,
    memory_mb: PositiveInt = 512,
    cores: PositiveInt = 1,
    disk_mb: PositiveInt = 64,
    tier: Tier = "auto",
    sandbox: Sandbox | None = None,
) -> AsyncIterator[list[Tool]]:
    """Python whose variables stay from call to call, in a folder of its own; it opens with the first call.

    Args:
        files: whether the agent may also read, write and list files of that folder directly.
        cell_s: seconds of a program on the clock.
        memory_mb: memory of a program.
        cores: that a program computes on, with all that it starts.
        disk_mb: size of the folder, and of a file in it.
        tier: how programs are isolated on this machine.
    """
    limits = RunLimits(
        wall_s=cell_s, memory_mb=memory_mb, cores=cores, disk_mb=disk_mb, file_mb=disk_mb
    )
    opened: list[Session] = []
    opening = asyncio.Lock()
    async with AsyncExitStack() as stack:

        async def session() -> Session:
            async with opening:
                if not opened:
                    own = sandbox or local_sandbox(tier)
                    opened.append(await stack.enter_async_context(own.session(limits)))
            return opened[0]

        async def python(*, code: str) -> str:
            """Run Python code. Variables and files stay for later calls; print what you want to see.

            Args:
                code: a program, or some lines of one
            """
            result = await (await session()).run(code)
            shown = render_result(result, PRINTED_CHARS)
            if result.verdict is not Verdict.OK:
                raise ToolFailed(shown)
            return shown

        yield [
            tool_of(tool, again=True) for tool in (python, *(_file_tools(session) if files else ()))
        ]


def _file_tools(session: Callable[[], Awaitable[Session]]) -> list[Callable[..., Awaitable[str]]]:
    async def read_file(*, path: str) -> str:
        """Read a text file of the working folder."""
        try:
            content = await (await session()).get(path)
        except ValueError as error:
            raise ToolFailed(str(error)) from error
        if content is None:
            raise ToolFailed(f"there is no file {path}")
        return content.decode(errors="replace")

    async def write_file(*, path: str, content: str) -> str:
        """Write a text file of the working folder."""
        try:
            await (await session()).put(path, content.encode())
        except (OSError, ValueError) as error:
            raise ToolFailed(f"{path} cannot be written: {error}") from error
        return f"{path} is written"

    async def list_files() -> str:
        """List the files of the working folder with their sizes in bytes."""
        sizes = await (await session()).files()
        return (
            "\n".join(f"{name} ({size})" for name, size in sorted(sizes.items()))
            or "there are no files"
        )

    return [read_file, write_file, list_files]


@asynccontextmanager
async def search_tools(*, env: Env) -> AsyncIterator[list[Tool]]:
    """Yield the search of the environment `search`, which counts and records every query."""

    async def search(*, query: str) -> str:
        """Search the corpus for passages about a query."""
        untagged = query.replace("<", " ")  # so that it ends no tag of the environment
        return (await env.step(f"<search> {untagged} </search>")).observation

    yield [tool_of(search, noted=True, parallel=True)]


_Id = Annotated[
    str, Field(min_length=1, max_length=500, pattern=r"^[^<>]+$")
]  # no tag of the environment's


@asynccontextmanager
async def passage_tools(*, env: Env) -> AsyncIterator[list[Tool]]:
    """Passages of the environment `search` by their ids, which its style `id` shows."""

    async def read_passage(*, id: _Id, around: Annotated[int, Field(ge=0, le=5)] = 0) -> str:
        """Read a passage of the corpus by its id.

        Args:
            id: of the passage, as a search shows it in brackets.
            around: how many passages before and after it in its document to read too.
        """
        return (await env.step(f"<read> {id} +{around} </read>")).observation

    yield [tool_of(read_passage, noted=True, parallel=True)]
