"""HTTP client with one retry policy: exponential backoff with full jitter, never sooner than the server asked for."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import ipaddress
import json
import math
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import httpx
import tenacity
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

BACKOFF_S = 0.2  # mean of the first pause; doubles with each retry
MAX_BACKOFF_S = 20.0  # mean of the longest
MAX_REPLY_BYTES = 64 << 20
SHOWN = 200  # characters of a server's own words in an error
DIGEST_HEADER = "content-digest"
_BUSY = (408, 409, 425, 429)  # statuses below 500 that another try may change
# A machine that is cut off does not close its connections: the kernel asks it for a sign of life, and after a minute
# without one a request that waits for its answer fails as that of a connection that broke.
_SIGNS_OF_LIFE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (
        socket.IPPROTO_TCP,
        socket.TCP_USER_TIMEOUT,
        60_000,
    ),  # milliseconds that what is sent may go unconfirmed
]

Result = TypeVar("Result")


class Unanswered(Exception):
    """One request got no usable answer; another try may.

    Attributes:
        retry_after_s: seconds the server asked to wait, 0 if it did not say.
        unbilled: the server has certainly done no work on it.
    """

    def __init__(self, trouble: str, *, retry_after_s: float = 0.0, unbilled: bool = False) -> None:
        super().__init__(trouble)
        self.retry_after_s = retry_after_s
        self.unbilled = unbilled


class TimedOut(Unanswered):
    """The answer did not come within its time."""


class Refused(Exception):
    """The server answered with a status that no retry changes."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An answer, read whole."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body's JSON; Unanswered if it is none."""
        try:
            return json.loads(self.content)
        except ValueError as error:
            raise Unanswered(f"malformed reply: {error}") from None

    def succeeded(self) -> HttpReply:
        """Itself, if its status is 200; Unanswered if the server is busy or broken, Refused at any other."""
        if self.status == 200:
            return self
        raise failure_of(self.status, self.text, self.headers)


def failure_of(status: int, body: str, headers: Mapping[str, str]) -> Unanswered | Refused:
    """What a status other than 200 means: the server is busy or broken, or no retry changes its answer."""
    trouble = f"status {status}: {' '.join(body[:SHOWN].split())}"
    if status >= 500 or status in _BUSY:
        return Unanswered(trouble, retry_after_s=retry_after_s(headers), unbilled=True)
    return Refused(trouble)


class HttpClient:
    """Requests to one server, from one event loop after another, never from two at once.

    No proxy is taken from the environment, and redirects are not followed: neither loopback traffic nor a key goes
    anywhere else.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        connections: int = 100,
        timeout_s: float | None = None,
        proxy: str | None = None,
        most_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            token: the server's bearer token, if any.
            connections: at most open at once.
            timeout_s: of one request; None: no limit.
            most_bytes: of one answer.
        """
        self.url = url.rstrip("/")
        self._timeout_s, self._most_bytes, self._connections = timeout_s, most_bytes, connections
        self._headers, self._proxy = {"Authorization": f"Bearer {token}"} if token else {}, proxy
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free: list[
            httpx.AsyncClient
        ] = []  # of the loop, one connection each: a pool looks through all of its

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        timeout_s: float | None = None,
        heard: Callable[[bytes], None] | None = None,
    ) -> HttpReply:
        """Send one request with a JSON body, and read its answer whole, or give its parts to `heard` as they come.

        Raises:
            Unanswered: no connection, it broke, or the answer is too long.
            TimedOut: the answer took longer than `timeout_s`, or without it than the client's, once a connection was
                free for it.
        """
        timeout_s, loop = timeout_s or self._timeout_s, asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._free, self._slots = loop, [], asyncio.Semaphore(self._connections)
        free, slots = self._free, self._slots
        try:
            async with slots, asyncio.timeout(timeout_s):
                http = free.pop() if free else self._open()
                try:
                    return await self._exchange(http, method, path, body, heard)
                finally:
                    free.append(http)
        except TimeoutError:
            raise TimedOut(f"no answer within {timeout_s or 0:g} s") from None
        except httpx.RequestError as error:
            raise unanswered(error) from None

    def _open(self) -> httpx.AsyncClient:
        one = httpx.Limits(max_connections=1)
        way = httpx.AsyncHTTPTransport(
            trust_env=False,
            verify=trusted(),
            limits=one,
            proxy=self._proxy,
            socket_options=_SIGNS_OF_LIFE,
        )
        timeout = httpx.Timeout(None, connect=10.0)  # asyncio's is around it
        return httpx.AsyncClient(
            trust_env=False, headers=self._headers, timeout=timeout, transport=way
        )

    async def _exchange(
        self,
        http: httpx.AsyncClient,
        method: str,
        path: str,
        body: object,
        heard: Callable[[bytes], None] | None,
    ) -> HttpReply:
        content = bytearray()
        async with http.stream(method, self.url + path, json=body) as reply:  # json=None: no body
            async for part in reply.aiter_bytes():
                if heard is not None and reply.status_code == 200:
                    heard(part)
                    continue
                content += part
                if len(content) > self._most_bytes:
                    raise Unanswered(f"a reply of more than {self._most_bytes} bytes")
        said = (
            reply.headers.get(DIGEST_HEADER, "") if "content-encoding" not in reply.headers else ""
        )
        if heard is None and said.startswith("sha-256=:") and said != content_digest(content):
            raise Unanswered(f"a reply that is not what its {DIGEST_HEADER} says")
        return HttpReply(reply.status_code, reply.headers, bytes(content))

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        while self._free:
            await self._free.pop().aclose()


def content_digest(body: bytes | bytearray) -> str:
    """What stands in `DIGEST_HEADER` of an answer with this body (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


@functools.cache  # they take 50 ms to read
def trusted() -> ssl.SSLContext:
    """The certificates of public authorities, or of those in SSL_CERT_FILE or SSL_CERT_DIR."""
    return httpx.create_ssl_context()


def unanswered(error: httpx.RequestError) -> Unanswered:
    """What went wrong below HTTP."""
    unsent = (
        httpx.ConnectError,
        httpx.ConnectTimeout,
        httpx.PoolTimeout,
        httpx.ProxyError,
        httpx.UnsupportedProtocol,
    )
    return Unanswered(str(error) or type(error).__name__, unbilled=isinstance(error, unsent))


async def retried(
    attempt: Callable[[], Awaitable[Result]],
    *,
    retries: int,
    backoff_s: float | None = None,
    patience_s: float = math.inf,
    note: Callable[[], None] | None = None,
) -> Result:
    """What `attempt` gives, which is made again as long as it raises `Unanswered`.

    Args:
        retries: further attempts after the first.
        backoff_s: mean of the first pause; None: `BACKOFF_S`.
        patience_s: no pause may reach past that many seconds from now.
        note: called before each further attempt.

    Raises:
        Unanswered: the last attempt's.
    """
    backoff_s = BACKOFF_S if backoff_s is None else backoff_s
    jitter = tenacity.wait_random_exponential(multiplier=2 * backoff_s, max=2 * MAX_BACKOFF_S)

    def pause_s(state: tenacity.RetryCallState) -> float:
        failure = state.outcome.exception() if state.outcome else None
        return max(jitter(state), failure.retry_after_s if isinstance(failure, Unanswered) else 0.0)

    attempts = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(Unanswered),
        stop=tenacity.stop_after_attempt(retries + 1) | tenacity.stop_before_delay(patience_s),
        wait=pause_s,
        before_sleep=(lambda _: note()) if note else None,
        reraise=True,
    )
    return await attempts(attempt)


def retry_after_s(headers: Mapping[str, str], now: float | None = None) -> float:
    """Seconds to wait according to `retry-after-ms` or `Retry-After` (seconds or a date), 0 without either."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if value.replace(".", "", 1).isdecimal():
            return float(value) * unit_s
        if value:
            try:
                return max(
                    0.0,
                    parsedate_to_datetime(value).timestamp()
                    - (time.time() if now is None else now),
                )
            except ValueError:
                continue
    return 0.0


def without_proxy(*hosts: str) -> dict[str, str]:
    """Variables of the environment of a client that is to ask `hosts` through no proxy."""
    named = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    direct = (
        named if named == ["*"] else [*named, *hosts]
    )  # which stands for all hosts only by itself
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(dict.fromkeys(filter(None, direct))))


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine, by its address or as localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port above 65535
        usable = False
    if not usable:
        raise PydanticCustomError(
            "option", "expected http(s)://host/path, with a port from 1 to 65535 if any"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "may hold no user, password or query; keys go into key_variable or key_file"
        )
    return url


Url = Annotated[str, AfterValidator(_url)]  # of a server, in a config; without credentials


def check_private(name: str, url: str | None) -> None:
    """Refuse a URL over which a key would travel in the clear.

    Raises:
        ValueError: it would; `name` is what the URL is of.
    """
    parts = urlsplit(url or "")
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ValueError(f"{name}: http would show the key to the network; use https")
