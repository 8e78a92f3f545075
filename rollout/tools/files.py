"""Files for agents: the work folder of a session, listed, read and written by name."""

from __future__ import annotations

from typing import Any, Protocol

from rollout.envs.protocol import EnvError
from rollout.tools.protocol import BadArguments, check_arguments

SCHEMA: dict[str, Any] = {
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
    schema = SCHEMA

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
