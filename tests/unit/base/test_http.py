"""HTTP client: connections, certificates, statuses and retries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import certifi
import pytest

from rollout.base.http import (
    HttpClient,
    HttpReply,
    Refused,
    TimedOut,
    Unanswered,
    retry,
    retry_after_s,
    ssl_context,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class Flaky:
    """A call that raises the error the first few times."""

    error: Exception
    failures: int
    attempts: int = 0

    async def __call__(self) -> str:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise self.error
        return "reply"


def exchange(handler: Handler, use: Callable[[str], Awaitable[None]]) -> None:
    """Serve `handler` on a free port of an event loop, and await `use` with its URL."""

    async def run() -> None:
        async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
            await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    asyncio.run(run())


def test_the_environment_may_name_other_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")
    (tmp_path / "one.pem").write_text(first + end)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "one.pem"))
    assert len(ssl_context.__wrapped__().get_ca_certs()) == 1
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert len(ssl_context.__wrapped__().get_ca_certs()) > 9


def test_an_unanswered_call_is_retried_and_its_last_error_raised() -> None:
    notes: list[None] = []
    call = Flaky(Unanswered("busy"), failures=2)
    reply = asyncio.run(retry(call, retries=2, backoff_s=0.001, note=lambda: notes.append(None)))
    assert (reply, call.attempts, len(notes)) == ("reply", 3, 2)

    call = Flaky(Unanswered("busy"), failures=9)
    with pytest.raises(Unanswered, match="busy"):
        asyncio.run(retry(call, retries=2, backoff_s=0.001))
    assert call.attempts == 3


def test_a_refused_call_is_not_retried() -> None:
    call = Flaky(Refused("status 401"), failures=9)
    with pytest.raises(Refused):
        asyncio.run(retry(call, retries=2, backoff_s=0.001))
    assert call.attempts == 1


def test_a_pause_is_as_long_as_the_server_asks_unless_patience_ends_before() -> None:
    began = time.monotonic()
    call = Flaky(Unanswered("busy", retry_after_s=0.2), failures=1)
    assert asyncio.run(retry(call, retries=1, backoff_s=0.001)) == "reply"
    assert time.monotonic() - began >= 0.2

    call = Flaky(Unanswered("busy", retry_after_s=60.0), failures=1)
    with pytest.raises(Unanswered, match="busy"):
        asyncio.run(retry(call, retries=1, patience_s=1.0))
    assert call.attempts == 1


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_a_request_to_a_busy_server_may_be_repeated_and_costs_nothing(status: int) -> None:
    with pytest.raises(Unanswered, match=f"status {status}: slow down") as caught:
        HttpReply(status, {"retry-after": "3"}, b"slow\n down").raise_for_status()
    assert caught.value.retry_after_s == 3.0
    assert caught.value.unbilled


def test_other_statuses_are_refusals() -> None:
    with pytest.raises(Refused, match="status 404: nothing here"):
        HttpReply(404, {}, b"nothing here").raise_for_status()
    assert HttpReply(200, {}, b'{"a": 1}').raise_for_status().json() == {"a": 1}
    with pytest.raises(Unanswered, match="malformed reply"):
        HttpReply(200, {}, b"<html>").json()


def test_a_refused_connection_has_cost_nothing() -> None:
    with pytest.raises(Unanswered) as caught:
        asyncio.run(HttpClient("http://127.0.0.1:9").send("GET", "/"))
    assert caught.value.unbilled


def test_a_late_or_large_reply_is_unanswered() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def wait(url: str) -> None:
        with pytest.raises(TimedOut, match=r"no answer within 0\.1 s"):
            await HttpClient(url, timeout_s=0.1).send("GET", "/")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        writer.close()

    async def read(url: str) -> None:
        with pytest.raises(Unanswered, match="a reply of more than 1 bytes"):
            await HttpClient(url, max_reply_bytes=1).send("GET", "/")

    exchange(silent, wait)
    exchange(answer, read)


def test_connections_are_reused_within_their_limit_and_not_by_another_event_loop() -> None:
    opened: list[None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(None)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                await asyncio.sleep(0.01)
                writer.write(OK)
        writer.close()

    async def use(url: str) -> None:
        client = HttpClient(url, connections=3)
        replies = await asyncio.gather(*(client.send("GET", "/") for _ in range(12)))
        assert [reply.content for reply in replies] == [b"ok"] * 12
        await asyncio.gather(*(client.send("GET", "/") for _ in range(3)))
        await client.aclose()

    exchange(serve, use)
    exchange(serve, use)
    assert len(opened) == 6


def test_the_kernel_probes_a_server_while_its_reply_is_awaited() -> None:
    """/proc/net/tcp shows the timer of each connection; 02 is the keepalive timer."""
    timers: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)  # until the request is acknowledged
        client_port = f":{writer.get_extra_info('peername')[1]:04X}"
        server_port = f":{writer.get_extra_info('sockname')[1]:04X}"
        # A connection that has ended with another server may have had the same port of the client.
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        for row in rows:
            if row[1].endswith(client_port) and row[2].endswith(server_port):
                timers.append(row[5][:2])
        writer.write(OK)
        writer.close()  # from Python 3.12 on, a server waits for its connections

    async def use(url: str) -> None:
        client = HttpClient(url)
        assert (await client.send("GET", "/")).status == 200
        await client.aclose()

    exchange(serve, use)
    assert timers == ["02"]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0.0),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 40.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:10 GMT"}, 0.0),
        ({"retry-after": "-5"}, 0.0),
        ({"retry-after": "soon"}, 0.0),
        ({"retry-after": "nan"}, 0.0),
    ],
)
def test_retry_after_is_read_in_all_its_forms(headers: dict[str, str], seconds: float) -> None:
    assert retry_after_s(headers, now=60.0) == seconds
