"""HTTP client with one retry policy: exponential backoff with full jitter.

`HttpClient` sends requests to one server. `retry` repeats a call while it raises `Unanswered`,
but never sooner than the server asked.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx
import tenacity

BACKOFF_S = 0.2  # mean of the first pause; doubles with each retry
MAX_BACKOFF_S = 20.0  # mean of the longest pause
MAX_REPLY_BYTES = 64 << 20
_CONNECT_TIMEOUT_S = 10.0
_QUOTED_CHARS = 200  # length of a quoted server's reply in an error message
_RETRIED_STATUSES = (408, 409, 425, 429)  # below 500; another attempt may succeed
# A machine that is cut off does not close its connections. The kernel probes them, so that a
# request to such a machine fails after about a minute instead of waiting for its reply without end.
_KEEPALIVE_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),  # seconds without traffic before the first probe
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),  # seconds between probes
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),  # probes without an answer
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),  # milliseconds without acknowledgement
]

Result = TypeVar("Result")


class Unanswered(Exception):
    """A request got no usable reply; another attempt may get one.

    Attributes:
        retry_after_s: seconds that the server asked to wait, 0 if it named none.
        unbilled: True if a provider does not charge for the request, because it did not arrive or
            the reply is an error status.
    """

    def __init__(self, message: str, *, retry_after_s: float = 0.0, unbilled: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.unbilled = unbilled


class TimedOut(Unanswered):
    """The reply did not arrive within the timeout."""


class Refused(Exception):
    """The server answered with a status that a retry does not change."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A complete reply."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """The body as text; bytes that are not UTF-8 are replaced."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """Parse the body as JSON; raise Unanswered if it is malformed."""
        try:
            return json.loads(self.content)
        except ValueError as error:
            raise Unanswered(f"malformed reply: {error}") from None

    def raise_for_status(self) -> HttpReply:
        """Return this reply if its status is 200.

        Raises:
            Unanswered: the server is busy or broken.
            Refused: any other status.
        """
        if self.status == 200:
            return self
        raise error_for_status(self.status, self.text, self.headers)


def error_for_status(status: int, body: str, headers: Mapping[str, str]) -> Unanswered | Refused:
    """Return the error for a status other than 200: Unanswered if a retry may help, or Refused."""
    message = f"status {status}: {' '.join(body[:_QUOTED_CHARS].split())}"
    if status >= 500 or status in _RETRIED_STATUSES:
        return Unanswered(message, retry_after_s=retry_after_s(headers), unbilled=True)
    return Refused(message)


def error_for_transport(error: httpx.RequestError) -> Unanswered:
    """Convert a failure below HTTP, such as a refused or broken connection, to Unanswered."""
    not_sent = (
        httpx.ConnectError,
        httpx.ConnectTimeout,
        httpx.PoolTimeout,
        httpx.ProxyError,
        httpx.UnsupportedProtocol,
    )
    message = str(error) or type(error).__name__
    return Unanswered(message, unbilled=isinstance(error, not_sent))


@dataclass(slots=True)
class _Pool:
    """Connections of one event loop.

    Each is an httpx client with a single connection: httpx's own pool searches all of its
    connections for every request.
    """

    loop: asyncio.AbstractEventLoop
    slots: asyncio.Semaphore
    idle: list[httpx.AsyncClient] = field(default_factory=list)


class HttpClient:
    """Requests to one server.

    A client may be used from several event loops one after another, but not from two at once.
    Proxies of the environment are ignored and redirects are not followed, so that neither loopback
    traffic nor a key goes to another host.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        connections: int = 100,
        timeout_s: float | None = None,
        proxy: str | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """Configure the client; no connection is opened.

        Args:
            token: bearer token of the server.
            connections: maximum number of open connections.
            timeout_s: seconds for one request; None: no limit.
            proxy: URL of a proxy for all requests.
            max_reply_bytes: maximum size of a reply; one that `on_chunk` of `send` takes has no limit.
        """
        self.url = url.rstrip("/")
        self.max_reply_bytes = max_reply_bytes
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connections = connections
        self._timeout_s = timeout_s
        self._proxy = proxy
        self._pool: _Pool | None = None

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        timeout_s: float | None = None,
        on_chunk: Callable[[bytes], None] | None = None,
    ) -> HttpReply:
        """Send one request and read its reply.

        Args:
            body: is sent as JSON; None: no body.
            timeout_s: overrides the client's timeout. Waiting for a free connection does not count.
            on_chunk: is called with each part of a reply of status 200 as it arrives; the returned
                reply then has no content, and its size is not limited.

        Raises:
            TimedOut: the reply took longer than the timeout.
            Unanswered: no connection, a broken one, or a reply that is too large.
        """
        if timeout_s is None:
            timeout_s = self._timeout_s
        pool = self._pool_of_running_loop()
        try:
            async with pool.slots, asyncio.timeout(timeout_s):
                connection = pool.idle.pop() if pool.idle else self._open_connection()
                try:
                    return await self._exchange(connection, method, path, body, on_chunk)
                finally:
                    pool.idle.append(connection)
        except TimeoutError:
            raise TimedOut(f"no answer within {timeout_s or 0:g} s") from None
        except httpx.RequestError as error:
            raise error_for_transport(error) from None

    def _pool_of_running_loop(self) -> _Pool:
        loop = asyncio.get_running_loop()
        if self._pool is None or self._pool.loop is not loop:
            self._pool = _Pool(loop=loop, slots=asyncio.Semaphore(self._connections))
        return self._pool

    def _open_connection(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(
            trust_env=False,
            verify=ssl_context(),
            limits=httpx.Limits(max_connections=1),
            proxy=self._proxy,
            socket_options=_KEEPALIVE_OPTIONS,
        )
        return httpx.AsyncClient(
            trust_env=False,
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            transport=transport,
        )

    async def _exchange(
        self,
        connection: httpx.AsyncClient,
        method: str,
        path: str,
        body: object,
        on_chunk: Callable[[bytes], None] | None,
    ) -> HttpReply:
        content = bytearray()
        async with connection.stream(method, self.url + path, json=body) as response:
            async for chunk in response.aiter_bytes():
                if on_chunk is not None and response.status_code == 200:
                    on_chunk(chunk)
                    continue
                content += chunk
                if len(content) > self.max_reply_bytes:
                    raise Unanswered(f"a reply of more than {self.max_reply_bytes} bytes")

        return HttpReply(response.status_code, response.headers, bytes(content))

    async def aclose(self) -> None:
        """Close the idle connections of the running event loop."""
        idle = self._pool_of_running_loop().idle
        while idle:
            await idle.pop().aclose()


@functools.cache  # loading the certificates takes 50 ms
def ssl_context() -> ssl.SSLContext:
    """Return a context that trusts public authorities, or those in SSL_CERT_FILE/_DIR."""
    return httpx.create_ssl_context()


async def retry(
    attempt: Callable[[], Awaitable[Result]],
    *,
    retries: int,
    backoff_s: float | None = None,
    patience_s: float = math.inf,
    note: Callable[[], None] | None = None,
) -> Result:
    """Return the result of `attempt`, which is repeated while it raises Unanswered.

    Args:
        retries: further attempts after the first.
        backoff_s: mean of the first pause; None: `BACKOFF_S`.
        patience_s: no pause may end later than this many seconds from now.
        note: is called before each pause.

    Raises:
        Unanswered: the last attempt's.
    """
    if backoff_s is None:
        backoff_s = BACKOFF_S
    backoff = tenacity.wait_random_exponential(multiplier=2 * backoff_s, max=2 * MAX_BACKOFF_S)

    def pause_s(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        requested_s = error.retry_after_s if isinstance(error, Unanswered) else 0.0
        return max(backoff(state), requested_s)

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(Unanswered),
        stop=tenacity.stop_after_attempt(retries + 1) | tenacity.stop_before_delay(patience_s),
        wait=pause_s,
        before_sleep=(lambda _: note()) if note else None,
        reraise=True,
    )
    return await retrying(attempt)


def retry_after_s(headers: Mapping[str, str], now: float | None = None) -> float:
    """Return the pause that a reply asks for, in seconds; 0 if it asks for none.

    It is read from `retry-after-ms`, or from `Retry-After` as seconds or as a date.

    Args:
        now: POSIX time; None: the clock's.
    """
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if value.replace(".", "", 1).isdecimal():
            return float(value) * unit_s
        if not value:
            continue
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            continue
        return max(0.0, date.timestamp() - (time.time() if now is None else now))
    return 0.0
