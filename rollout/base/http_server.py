"""HTTP server parts: a listener, deadlines for requests, bodies within bounds, and a server inside an event loop."""

import asyncio
import errno
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollout.base.http import is_loopback
from rollout.base.processes import Restarts, say
from rollout.base.text import ShownFormatter

READ_S = 10.0  # for a whole request, from its first byte or the connection's start
TAKE_S, TAKE_BYTES = 30.0, 1 << 20  # of an answer so much is taken in so long, or all that is left
SERVER = "HTTP server"  # name of a task that serves
_MIN_TOKEN_CHARS = 16
_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"shown": {"()": ShownFormatter, "fmt": "%(levelname)s: %(message)s"}},
    "handlers": {"shown": {"class": "logging.StreamHandler", "formatter": "shown"}},
    "loggers": {"uvicorn": {"handlers": ["shown"], "propagate": False}},
}


class BodyTooLarge(Exception):
    """A request's body has more bytes than it may; the message says how many that is."""


class ListenError(ValueError):
    """Nobody can listen at an address: says at which, why, and what to do."""


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 asks the system for a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a listener is asked."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request, of at most `most` bytes; BodyTooLarge if it has more, or says so."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > most:
        raise BodyTooLarge(f"the body is over {most} bytes")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise BodyTooLarge(f"the body is over {most} bytes")
    return bytes(body)


class ClosingResponse(JSONResponse):
    """A connection's last, sent at once; the rest of the body is read and dropped, so that its sender hears it."""

    def __init__(
        self, content: object, status_code: int = 413, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(content, status_code, {**(headers or {}), "Connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})


def token_of(host: str, token_file: Path | None) -> str | None:
    """The bearer token in a file, without which a server listens on loopback only.

    Raises:
        ValueError: `host` is not loopback and there is none, or it is too short.
        OSError: the file cannot be read.
    """
    token = token_file.read_text().strip() if token_file else None
    if token is not None and len(token) < _MIN_TOKEN_CHARS:
        raise ValueError(
            f"{token_file}: the token has {len(token)} characters, expected at least {_MIN_TOKEN_CHARS}"
        )
    if token is None and not is_loopback(host):
        raise ValueError(f"host {host} is not loopback; bind 127.0.0.1, or give --token-file")
    return token


def listen(host: str, port: int, token_file: Path | None) -> tuple[socket.socket, str | None]:
    """A listening socket, and the token that its server asks for.

    Raises:
        ListenError: the token cannot be used, or nobody may listen there.
    """
    try:
        token = token_of(host, token_file)
        return bind(host, port), token
    except (OSError, ValueError) as error:
        said = str(error)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            said = f"{error.strerror}; choose another --port, 0 for a free one"
        raise ListenError(f"cannot serve on {host}:{port}: {said}") from None


def bears(request: Request, token: str) -> bool:
    """Whether a request carries the token, as a bearer's or in `x-api-key`, where Anthropic's clients put it."""
    wanted = token.encode()
    given = (
        request.headers.get("authorization", "").removeprefix("Bearer "),
        request.headers.get("x-api-key", ""),
    )
    return any(hmac.compare_digest(one.encode(), wanted) for one in given)


CROWDED = (
    "crowded"  # state of requests of a connection beyond as many as may be open: how many that is
)


class TimedProtocol(H11Protocol):
    """Uvicorn's protocol, which waits for ever for a request's rest and for an answer to be taken, with deadlines."""

    def __init__(self, *given: Any, most: int | None = None, **settings: Any) -> None:
        """Requests of a connection beyond `most` are `CROWDED`; the application refuses them."""
        super().__init__(*given, **settings)
        self._most = most

    _late: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most:
            self.app_state = {**self.app_state, CROWDED: self._most}
        transport.set_write_buffer_limits(
            high=0
        )  # `pause_writing` is when something waits to be taken
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._wait()
        super().data_received(data)
        if str(self.conn.their_state) not in (
            "IDLE",
            "SEND_BODY",
        ):  # h11's names: nothing of it is there yet, or part
            self._cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if (
            str(self.conn.their_state) == "SEND_BODY"
        ):  # the next request came with the one before, in part
            self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_taking()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self._cancel_taking()
        super().connection_lost(exc)

    def _await_taking(self) -> None:
        most = self.transport.get_write_buffer_size() - TAKE_BYTES
        self._untaken = self.loop.call_later(TAKE_S, self._check_taken, most)

    def _check_taken(self, most: int) -> None:
        if self.transport.get_write_buffer_size() > most:
            self.transport.abort()
        else:
            self._await_taking()

    def _cancel_taking(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def _wait(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(READ_S, self.transport.abort)

    def _cancel(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def server_config(
    app: Starlette, *, drain_s: int, lifespan: bool, most: int | None = None
) -> uvicorn.Config:
    """How our servers answer: quietly, without web sockets, and with `drain_s` seconds to end what runs.

    Args:
        most: connections, beyond which requests are `CROWDED`; None: any number.
    """
    return uvicorn.Config(
        app,
        http=partial(TimedProtocol, most=most),  # type: ignore[arg-type]
        ws="none",
        lifespan="on" if lifespan else "off",
        log_config=_LOGGING,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_s,
        server_header=False,
    )


class _Inner(uvicorn.Server):
    """A server that leaves signals to the process it is a part of."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(server_config(app, drain_s=1, lifespan=False))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def clear(self) -> None:
        """End what is left of it when it is lost: its listeners and connections, whose callers ask again."""
        for own in getattr(self, "servers", ()):
            own.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


@asynccontextmanager
async def answering(
    app: Starlette, listener: socket.socket, restarts: Restarts, lost: Callable[[str], None]
) -> AsyncIterator[None]:
    """Have `app` answer at `listener`, on the running event loop, until the block ends.

    A server that ends before is started again, with a line, as often as `restarts` has it; then `lost` is told of it.
    """
    server, closing = _Inner(app), False

    async def serve() -> None:
        """Serve until the block ends; a server closes the socket that it has, so each has its own."""
        nonlocal server
        while not closing:
            task = asyncio.create_task(server.serve(sockets=[listener.dup()]), name=SERVER)
            await asyncio.wait([task])
            if closing:
                return
            why = (
                "cancelled" if task.cancelled() else repr(task.exception() or "it ended by itself")
            )
            server.clear()
            what = f"the HTTP server at {url_of(listener)} is lost ({why})"
            if not restarts.take():
                lost(f"{what}, and may not start again this hour")
                return
            say(f"{what}; started again, {restarts.left} restarts left")
            server = _Inner(app)

    serving = asyncio.create_task(serve())
    try:
        yield
    finally:
        closing = server.should_exit = True
        await asyncio.wait([serving])
        listener.close()
