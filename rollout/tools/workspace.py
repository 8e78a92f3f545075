"""Tools in a sandbox session: Python programs or cells, and the files of its work folder."""

from __future__ import annotations

from typing import Any, Protocol

from rollout.base.errors import EnvError
from rollout.sandbox.records import Result, Verdict
from rollout.tools.protocol import BadArguments, check_arguments

NO_OUTPUT = "[no output]"
PYTHON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string"}},
    "required": ["code"],
    "additionalProperties": False,
}
_ENDINGS = {
    Verdict.TLE: "out of time",
    Verdict.MLE: "out of memory",
    Verdict.OLE: "too much output",
    Verdict.RE: "it failed",
}


class Runner(Protocol):
    """A sandbox, or one session of it."""

    async def run(self, source: str) -> Result:
        """Run a program or a cell.

        Raises:
            SandboxError: nothing is known about it.
        """


class Python:
    """The tool `python`."""

    name = "python"
    description = "Run Python code; returns what it prints."
    schema = PYTHON_SCHEMA

    def __init__(self, runner: Runner, *, max_chars: int = 4000) -> None:
        """Code goes to `runner`; of longer output the middle is left out."""
        self._runner = runner
        self._max_chars = max_chars

    async def __call__(self, **arguments: Any) -> str:
        """What the code printed, then what it wrote to stderr, then how it ended if not well."""
        check_arguments(self.name, self.schema, arguments)
        return render(await self._runner.run(arguments["code"]), self._max_chars)


def render(result: Result, max_chars: int) -> str:
    """A result as a model reads it."""
    parts = [result.stdout.rstrip(), result.stderr.rstrip()]
    text = _shorten("\n".join(part for part in parts if part), max_chars)
    ending = _ENDINGS.get(result.verdict)
    if ending and not (result.verdict is Verdict.RE and result.stderr):
        text = f"{text}\n[{ending}]".lstrip()
    return text or NO_OUTPUT


def _shorten(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


FILES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "action": {"enum": ["list", "read", "write"]},
        "path": {"type": "string", "minLength": 1, "maxLength": 200},
        "content": {"type": "string"},
    },
    "required": ["action"],
    "additionalProperties": False,
}
_NEEDED = {"list": (), "read": ("path",), "write": ("path", "content")}


class Folder(Protocol):
    """A session of the sandbox, as far as its files go."""

    async def put(self, name: str, content: bytes) -> None: ...

    async def get(self, name: str) -> bytes | None: ...

    async def files(self) -> dict[str, int]: ...


class Files:
    """The tool `files`."""

    name = "files"
    description = "List the files of the work folder, read one, or write one."
    schema = FILES_SCHEMA

    def __init__(self, folder: Folder, *, max_chars: int = 8000) -> None:
        """Files are those of `folder`; of a longer one the beginning is read."""
        self._folder = folder
        self._max_chars = max_chars

    async def __call__(self, **arguments: Any) -> str:
        """The listing, the file's text, or what was written.

        Raises:
            BadArguments: there is no such file, it is no text, or the folder does not take it.
            EnvError: the sandbox failed.
        """
        check_arguments(self.name, self.schema, arguments)
        action = arguments["action"]
        for name in _NEEDED[action]:
            if name not in arguments:
                raise BadArguments(f"files: {action} needs {name}")
        try:
            return await self._do(action, arguments.get("path", ""), arguments.get("content", ""))
        except EnvError:
            raise
        except (OSError, ValueError) as error:  # a path that leads out, a link in the way, no room left
            raise BadArguments(f"files: {error}") from error

    async def _do(self, action: str, path: str, content: str) -> str:
        if action == "list":
            found = sorted((await self._folder.files()).items())
            return "\n".join(f"{name} ({size} bytes)" for name, size in found) or "[no files]"
        if action == "write":
            await self._folder.put(path, content.encode())
            return f"{path} has {len(content.encode())} bytes."
        data = await self._folder.get(path)
        if data is None:
            raise BadArguments(f"files: there is no file {path}")
        text = data.decode()  # what is no text is a ValueError
        return text if len(text) <= self._max_chars else f"{text[: self._max_chars]}\n[... of {len(text)} characters]"
