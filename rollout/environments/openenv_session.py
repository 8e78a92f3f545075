"""Sessions at servers that speak OpenEnv's protocol, and processes of such servers.

`open_session` connects to a server, and `OpenEnvServers` starts servers by a command.
"""

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import cycle
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from weakref import finalize

import aiohttp

from rollout.base.errors import EnvError
from rollout.base.http import ssl_context
from rollout.base.network import free_port
from rollout.base.processes import start_group, stop_group
from rollout.environments.protocol import AgentMistake

_MAX_MESSAGE_BYTES = 64 << 20
_QUOTED_CHARS = 500  # maximum length of a server's message or output in an error
_FULL = "CAPACITY_REACHED"  # code of a server that has as many sessions as it may
_FULL_PAUSE_S = 0.2  # pause before a session is tried again
_READY_PAUSE_S = 0.1  # pause before a server that starts is asked again
_CLOSE_S = 10.0  # seconds in which a server may close a session


class OpenEnvSession:
    """Session at a server over a WebSocket; the server makes an environment for each session."""

    def __init__(self, url: str, deadline_s: float) -> None:
        """Configure the session; `connect` opens it.

        Args:
            url: base URL of the server.
            deadline_s: seconds that a reply may take.
        """
        self._url = url
        self._deadline_s = deadline_s
        self._client = aiohttp.ClientSession()
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._has_hung = False

    async def connect(self) -> None:
        """Open the connection.

        Raises:
            Unreachable: no server answers at the URL.
            EnvError: a server answers, but has no WebSocket of OpenEnv's protocol.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                self._socket = await self._client.ws_connect(
                    f"{self._url}/ws", max_msg_size=_MAX_MESSAGE_BYTES, ssl=ssl_context()
                )
        except aiohttp.WSServerHandshakeError as error:
            raise EnvError(
                f"openenv: {self._url}/ws is no WebSocket (status {error.status}); expected a server "
                "of OpenEnv 0.2 or later"
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            message = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unreachable(f"openenv: {self._url} does not answer: {message}") from error

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message of this type and return the data of the reply.

        Raises:
            AgentMistake: the server says that an action does not have the form that it expects.
            SessionRefused: the server has as many sessions as it may.
            EnvError: any other error, no reply within the deadline, or a broken connection.
        """
        assert self._socket is not None
        try:
            async with asyncio.timeout(self._deadline_s):
                # A server that is full says so and closes the connection without reading.
                with suppress(ConnectionError):
                    await self._socket.send_json({"type": kind, "data": data})
                reply = await self._socket.receive_json()
        except TimeoutError as error:
            self._has_hung = True
            raise EnvError(
                f"openenv: the environment did not answer within {self._deadline_s:g} s"
            ) from error
        except (aiohttp.ClientError, TypeError, ValueError) as error:
            # aiohttp raises TypeError if the server closes the connection.
            raise EnvError(f"openenv: the session at {self._url} broke: {error}") from error

        content = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(content, dict):
            raise EnvError(f"openenv: {self._url} sent a message that has no data")
        if reply.get("type") != "error":
            return content
        code = content.get("code")
        message = str(content.get("message"))[:_QUOTED_CHARS]
        if code == _FULL:
            raise SessionRefused(f"openenv: {self._url} takes no more sessions: {message}")
        if code == "VALIDATION_ERROR" and kind == "step":
            raise AgentMistake(f"This is no action. {_validation_errors(content)}".strip())
        raise EnvError(f"openenv: the environment failed ({code}: {message})")

    async def close(self) -> None:
        """End the session, and give the server some seconds to free its environment.

        The server is not waited for if an earlier reply missed its deadline.
        """
        try:
            if self._socket is not None and not self._has_hung:
                with suppress(TimeoutError, ConnectionError, aiohttp.ClientError):
                    async with asyncio.timeout(_CLOSE_S):
                        await self._socket.send_json({"type": "close"})
                        await self._socket.receive()
                        await self._socket.close()
        finally:
            await self._client.close()


class SessionRefused(EnvError):
    """A server has as many sessions as it may."""


class Unreachable(EnvError):
    """No server answers at a URL."""


async def open_session(
    find_url: Callable[[], Awaitable[str]],
    reset: Mapping[str, Any],
    *,
    deadline_s: float,
    patience_s: float,
    restarts: bool,
) -> tuple[OpenEnvSession, dict[str, Any]]:
    """Open a session and reset its environment; wait while the server has no free session.

    Args:
        find_url: returns the base URL of a server.
        reset: arguments of the reset.
        deadline_s: seconds that a reply may take.
        patience_s: seconds for which refused sessions are tried again.
        restarts: True if `find_url` starts a server again that has ended; sessions at a server that
            does not answer are then tried again too.

    Returns:
        The session, and the data of the first observation.

    Raises:
        EnvError: the server does not answer, is full, or cannot reset its environment.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + patience_s
    while True:
        session = OpenEnvSession(await find_url(), deadline_s)
        try:
            await session.connect()
            return session, await session.ask("reset", reset)
        except (SessionRefused, Unreachable) as error:
            await session.close()
            may_recover = restarts or isinstance(error, SessionRefused)
            if not may_recover or loop.time() > give_up_at:
                raise
            await asyncio.sleep(_FULL_PAUSE_S)
        except BaseException:
            await session.close()
            raise


def _validation_errors(content: Mapping[str, Any]) -> str:
    """Return the fields of an action that are wrong, as pydantic reports them."""
    errors = []
    for error in content.get("errors", []):
        path = ".".join(str(part) for part in error.get("loc", ()))
        errors.append(f"{path}: {error.get('msg')}")
    return "; ".join(errors)[:_QUOTED_CHARS]


@cache
def servers_of(command: tuple[str, ...], number: int) -> "OpenEnvServers":
    """Return this process's servers of a command; the first call makes them."""
    return OpenEnvServers(command, number)


class OpenEnvServers:
    """Processes of a server, started by a command when they are first used.

    They run until this process ends. A server that has ended is started again at its next use.
    """

    def __init__(self, command: Sequence[str], number: int) -> None:
        """Configure the servers.

        Args:
            command: program and arguments, in which `{port}` is replaced by a free port.
            number: number of processes.
        """
        self._servers_in_turn = cycle([_Server(command) for _ in range(number)])

    async def url(self, start_s: float) -> str:
        """Return the URL of the next server in turn; start the server if it does not run.

        Args:
            start_s: seconds within which a server must have started.

        Raises:
            EnvError: the server cannot be started, or ended before it was ready.
        """
        server = next(self._servers_in_turn)
        return await server.url(start_s)


class _Server:
    """Process of a server, which is started again at its next use if it has ended."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._is_ready = False
        # The server's output, whose last line is quoted in errors; the file is deleted with this object.
        self._output = NamedTemporaryFile(prefix="openenv-")  # noqa: SIM115 -- outlives this method

    async def url(self, start_s: float) -> str:
        """Return the URL of the process when it listens; start the process if it does not run.

        Raises:
            EnvError: the process cannot be started, ended, or did not listen within `start_s` seconds.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        give_up_at = asyncio.get_running_loop().time() + start_s
        async with aiohttp.ClientSession() as client:
            while not self._is_ready:
                if self._process is not None and self._process.poll() is not None:
                    raise EnvError(f"openenv: the server ended: {self._last_line()}")
                if asyncio.get_running_loop().time() > give_up_at:
                    raise EnvError(
                        f"openenv: the server did not listen at {self._url} within {start_s:g} s: "
                        f"{self._last_line()}"
                    )
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with client.get(f"{self._url}/health", timeout=_timeout(5.0)) as reply:
                        self._is_ready = reply.status == 200
                if not self._is_ready:
                    await asyncio.sleep(_READY_PAUSE_S)
        return self._url

    def _start(self) -> None:
        port = free_port()
        self._is_ready = False
        self._url = f"http://127.0.0.1:{port}"
        command = [part.replace("{port}", str(port)) for part in self._command]
        try:
            self._process = start_group(command, log=Path(self._output.name))
        except OSError as error:
            raise EnvError(f"openenv: '{command[0]}' cannot be started: {error}") from error
        finalize(self, stop_group, self._process)

    def _last_line(self) -> str:
        lines = Path(self._output.name).read_text("utf-8", "replace").strip().splitlines()
        return lines[-1][-_QUOTED_CHARS:] if lines else "it printed nothing"


def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)
