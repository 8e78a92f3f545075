"""Tools that agents call in chats: Python with files, search, and passages by their ids."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from rollout.environments.protocol import Env
from rollout.environments.running import PRINTED_CHARS, Tier, local_sandbox
from rollout.environments.tools import Tool, ToolFailed, tool_of
from rollout.sandbox import Sandbox, Session
from rollout.sandbox.records import RunLimits, Verdict, render_result


@asynccontextmanager
async def python_tools(
    *,
    files: bool = True,
    cell_s: PositiveFloat = 10.0,
    memory_mb: PositiveInt = 512,
    cores: PositiveInt = 1,
    disk_mb: PositiveInt = 64,
    tier: Tier = "auto",
    # In place of this process's sandbox, such as one that tests share.
    sandbox: Sandbox | None = None,
) -> AsyncIterator[list[Tool]]:
    """Yield a tool that runs Python in one session, and tools for the files of its folder.

    Variables and files last from call to call. The session opens with the first call.

    Args:
        files: if true, there are also tools that read, write and list files of the folder.
        cell_s: seconds of wall time that a program may take.
        memory_mb: memory that a program may use.
        cores: cores that a program and its children share.
        disk_mb: largest size of the folder, and of each file in it.
        tier: tier of isolation of programs on this machine.
    """
    limits = RunLimits(
        wall_s=cell_s, memory_mb=memory_mb, cores=cores, disk_mb=disk_mb, file_mb=disk_mb
    )
    session: Session | None = None
    opening = asyncio.Lock()
    async with AsyncExitStack() as stack:

        async def open_session() -> Session:
            """Return the session; open it at the first call."""
            nonlocal session
            async with opening:
                if session is None:
                    runner = sandbox or local_sandbox(tier)
                    session = await stack.enter_async_context(runner.session(limits))
            return session

        async def python(*, code: str) -> str:
            """Run Python code. Variables and files stay for later calls; print what you want to see.

            Args:
                code: a program, or some lines of one
            """
            result = await (await open_session()).run(code)
            text = render_result(result, PRINTED_CHARS)
            if result.verdict is not Verdict.OK:
                raise ToolFailed(text)
            return text

        functions: list[Callable[..., Awaitable[str]]] = [python]
        if files:
            functions += _file_functions(open_session)
        yield [tool_of(function, repeat_on_replay=True) for function in functions]


def _file_functions(
    open_session: Callable[[], Awaitable[Session]],
) -> list[Callable[..., Awaitable[str]]]:
    """Return functions that read, write and list the files of a session's folder."""

    async def read_file(*, path: str) -> str:
        """Read a text file of the working folder."""
        try:
            content = await (await open_session()).get(path)
        except ValueError as error:
            raise ToolFailed(str(error)) from error
        if content is None:
            raise ToolFailed(f"there is no file {path}")
        return content.decode(errors="replace")

    async def write_file(*, path: str, content: str) -> str:
        """Write a text file of the working folder."""
        try:
            await (await open_session()).put(path, content.encode())
        except (OSError, ValueError) as error:
            raise ToolFailed(f"{path} cannot be written: {error}") from error
        return f"{path} is written"

    async def list_files() -> str:
        """List the files of the working folder with their sizes in bytes."""
        sizes = await (await open_session()).files()
        if not sizes:
            return "there are no files"
        return "\n".join(f"{path} ({size})" for path, size in sorted(sizes.items()))

    return [read_file, write_file, list_files]


@asynccontextmanager
async def search_tools(*, env: Env) -> AsyncIterator[list[Tool]]:
    """Yield a tool that searches through the environment `search`, which counts and records queries."""

    async def search(*, query: str) -> str:
        """Search the corpus for passages about a query."""
        without_tags = query.replace("<", " ")  # the query must not end the environment's tag
        step = await env.step(f"<search> {without_tags} </search>")
        return step.observation

    yield [tool_of(search, recorded_by_env=True, parallel=True)]


# Without angle brackets, which could form a tag of the environment.
_PassageId = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^<>]+$")]


@asynccontextmanager
async def passage_tools(*, env: Env) -> AsyncIterator[list[Tool]]:
    """Yield a tool that reads a passage by its id.

    The environment `search` shows agents the ids if its option `style` is `id`.
    """

    async def read_passage(*, id: _PassageId, around: Annotated[int, Field(ge=0, le=5)] = 0) -> str:
        """Read a passage of the corpus by its id.

        Args:
            id: id of the passage, as a search shows it in brackets.
            around: number of neighbouring passages on each side, in the same document, to read as well.
        """
        step = await env.step(f"<read> {id} +{around} </read>")
        return step.observation

    yield [tool_of(read_passage, recorded_by_env=True, parallel=True)]
