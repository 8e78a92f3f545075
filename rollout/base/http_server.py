"""HTTP server parts that the gateway, the studio and `mcore-mas serve` share.

`listen` opens a socket and reads the server's token, `server_config` configures uvicorn with a
deadline for request bodies, `read_body` reads a body of bounded size, and `answering` serves an
application inside the running event loop.
"""

import asyncio
import errno
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieval.regular_files import read_regular_text
from rollout.base.text import EscapingFormatter
from rollout.base.urls import is_loopback

READ_TIMEOUT_S = 10.0  # deadline of a request's body
SERVER = "HTTP server"  # name of the asyncio task that serves
_KEEP_ALIVE_S = 75  # a client's idle connection outlives the pauses between its calls
_MIN_TOKEN_CHARS = 16
_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"escaped": {"()": EscapingFormatter, "fmt": "%(levelname)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "escaped"}},
    "loggers": {"uvicorn": {"handlers": ["stderr"], "propagate": False}},
}


class BodyTooLarge(Exception):
    """A request's body is larger than the server accepts; the message gives the limit."""


class ListenError(ValueError):
    """The server cannot listen at an address; the message says where, why and what to do."""


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; port 0 takes any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener


def listener_url(listener: socket.socket) -> str:
    """Return the URL at which a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _read_token(host: str, token_file: Path | None) -> str | None:
    """Read the bearer token of a server from a file; None without a file, on loopback only.

    Raises:
        ValueError: there is no token and `host` is not loopback, or the token is too short.
        OSError: the file cannot be read.
    """
    if token_file is None:
        if not is_loopback(host):
            raise ValueError(f"host {host} is not loopback; bind 127.0.0.1, or give --token-file")
        return None

    token = read_regular_text(token_file).strip()
    if len(token) < _MIN_TOKEN_CHARS:
        raise ValueError(
            f"{token_file}: the token has {len(token)} characters, "
            f"expected at least {_MIN_TOKEN_CHARS}"
        )
    return token


def listen(host: str, port: int, token_file: Path | None) -> tuple[socket.socket, str | None]:
    """Return a listening socket and the bearer token that its server demands, if any.

    Raises:
        ListenError: the token cannot be used, or the address is taken or not allowed.
    """
    try:
        token = _read_token(host, token_file)
        return open_listener(host, port), token
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            reason = f"{error.strerror}; choose another --port, 0 for a free one"
        raise ListenError(f"cannot serve on {host}:{port}: {reason}") from None


def has_token(request: Request, token: str) -> bool:
    """Return True if a request carries the token.

    OpenAI's clients send it as a bearer token, Anthropic's in the header `x-api-key`.
    """
    expected = token.encode()
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    api_key = request.headers.get("x-api-key", "")
    return any(hmac.compare_digest(candidate.encode(), expected) for candidate in (bearer, api_key))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return a request's body.

    Raises:
        BodyTooLarge: the body, or its declared length, is over `max_bytes`. uvicorn drops the rest.
    """
    too_large = BodyTooLarge(f"the body is over {max_bytes} bytes")
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise too_large

    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


class ReadDeadline:
    """ASGI middleware that answers 408 if a request's body is not complete within `timeout_s`.

    uvicorn itself waits for the rest of a body without limit.
    """

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        deadline = asyncio.get_running_loop().time() + self._timeout_s
        body_complete = False

        async def receive_before_deadline() -> Message:
            nonlocal body_complete
            if body_complete:  # only a disconnect can follow, at any time
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                # Raised where the application reads the body, so that its own handler answers.
                detail = f"the body was not complete within {self._timeout_s:g} s"
                raise HTTPException(408, detail, headers={"Connection": "close"}) from None
            body_complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_before_deadline, send)


class UnclearLengthRefused:
    """ASGI middleware that refuses requests whose body has two lengths, and closes their connection.

    A request with Content-Length and Transfer-Encoding may be an attempt to smuggle a second one
    past a proxy that goes by the other header. RFC 9112 (section 6.1) demands that the connection
    is closed; h11 keeps it open.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if not {b"content-length", b"transfer-encoding"} <= names:
            await self._app(scope, receive, send)
            return
        refusal = PlainTextResponse(
            "the request has Content-Length and Transfer-Encoding; expected one of them",
            status_code=400,
            headers={"Connection": "close"},
        )
        await refusal(scope, receive, send)


def server_config(
    app: Starlette,
    *,
    drain_s: int,
    lifespan: bool,
    max_connections: int | None = None,
    read_timeout_s: float = READ_TIMEOUT_S,
) -> uvicorn.Config:
    """Return the uvicorn configuration of an application.

    Args:
        drain_s: seconds that requests in progress get when the server stops.
        lifespan: True if the application has startup and shutdown handlers.
        max_connections: open connections; while there are more, uvicorn answers every request with
            status 503. None: no limit.
        read_timeout_s: seconds within which a request's body must arrive.
    """
    return uvicorn.Config(
        UnclearLengthRefused(ReadDeadline(app, read_timeout_s)),
        http="h11",
        ws="none",
        lifespan="on" if lifespan else "off",
        # uvicorn refuses requests when the number of connections has reached the limit
        limit_concurrency=None if max_connections is None else max_connections + 1,
        log_config=_LOGGING,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_s,
        server_header=False,
    )


class _EmbeddedServer(uvicorn.Server):
    """A server in the event loop of a process that handles signals itself."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(server_config(app, drain_s=1, lifespan=False))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def abort(self) -> None:
        """Close listeners and connections after a failure, so that clients do not wait."""
        for server in getattr(self, "servers", ()):  # set once it listens
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


@asynccontextmanager
async def answering(
    app: Starlette, listener: socket.socket, on_failure: Callable[[str], None]
) -> AsyncIterator[None]:
    """Serve an application at a listening socket, on the running event loop, until the block ends.

    Args:
        on_failure: called with the reason if the server ends before the block does.
    """
    server = _EmbeddedServer(app)
    url = listener_url(listener)
    closing = False

    def report_failure(task: asyncio.Task[None]) -> None:
        if closing:
            return
        reason = "cancelled"
        if not task.cancelled():
            reason = repr(task.exception() or "it ended by itself")
        server.abort()
        on_failure(f"the HTTP server at {url} has ended ({reason})")

    serving = asyncio.create_task(server.serve(sockets=[listener]), name=SERVER)
    serving.add_done_callback(report_failure)
    try:
        yield
    finally:
        closing = True
        server.should_exit = True
        await asyncio.wait([serving])
        listener.close()
