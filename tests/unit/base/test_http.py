"""One retry policy: what is tried again, how often, and never sooner than the server asked for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import certifi
import pytest

from rollout.base.http import (
    HttpClient,
    HttpReply,
    Refused,
    Unanswered,
    is_loopback,
    retried,
    trusted,
)


def test_a_certificate_of_ones_own_is_trusted_where_the_environment_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")
    (tmp_path / "own.pem").write_text(first + end)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
    assert len(trusted.__wrapped__().get_ca_certs()) == 1
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert len(trusted.__wrapped__().get_ca_certs()) > 9


def failing(times: int, error: Callable[[], Exception]) -> tuple[Callable[[], object], list[int]]:
    """An attempt that fails that many times, and a list that grows with every attempt."""
    made: list[int] = []

    async def attempt() -> str:
        made.append(len(made))
        if len(made) <= times:
            raise error()
        return "answer"

    return attempt, made


def test_what_may_change_is_tried_again_and_the_last_trouble_is_told() -> None:
    attempt, made = failing(2, lambda: Unanswered("busy"))
    noted: list[int] = []
    assert (
        asyncio.run(retried(attempt, retries=2, backoff_s=0.001, note=lambda: noted.append(1)))
        == "answer"
    )
    assert (len(made), len(noted)) == (3, 2)
    attempt, made = failing(9, lambda: Unanswered("busy"))
    with pytest.raises(Unanswered, match="busy"):
        asyncio.run(retried(attempt, retries=2, backoff_s=0.001))
    assert len(made) == 3
    attempt, made = failing(9, lambda: Refused("status 401"))
    with pytest.raises(Refused):
        asyncio.run(retried(attempt, retries=2, backoff_s=0.001))
    assert len(made) == 1


def test_a_pause_is_as_long_as_the_server_asked_for_unless_patience_ends_before() -> None:
    attempt, _ = failing(1, lambda: Unanswered("busy", retry_after_s=0.2))
    began = time.monotonic()
    assert asyncio.run(retried(attempt, retries=1, backoff_s=0.001)) == "answer"
    assert time.monotonic() - began >= 0.2
    attempt, made = failing(1, lambda: Unanswered("busy", retry_after_s=60.0))
    with pytest.raises(Unanswered, match="busy"):
        asyncio.run(retried(attempt, retries=1, patience_s=1.0))
    assert len(made) == 1


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_a_busy_server_has_done_no_work(status: int) -> None:
    with pytest.raises(Unanswered, match=f"status {status}: slow down") as caught:
        HttpReply(status, {"retry-after": "3"}, b"slow\n down").succeeded()
    assert (caught.value.retry_after_s, caught.value.unbilled) == (3.0, True)


def test_other_statuses_are_refusals() -> None:
    with pytest.raises(Refused, match="status 404: nothing here"):
        HttpReply(404, {}, b"nothing here").succeeded()
    assert HttpReply(200, {}, b'{"a": 1}').succeeded().json() == {"a": 1}
    with pytest.raises(Unanswered, match="malformed reply"):
        HttpReply(200, {}, b"<html>").json()


def test_nobody_there_has_done_no_work() -> None:
    with pytest.raises(Unanswered) as caught:
        asyncio.run(HttpClient("http://127.0.0.1:9").send("GET", "/"))
    assert caught.value.unbilled


def test_a_connection_is_used_again_and_no_more_are_opened_than_may_be() -> None:
    opened: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(1)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                await asyncio.sleep(0.01)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            client = HttpClient(
                f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections=3
            )
            replies = await asyncio.gather(*(client.send("GET", "/") for _ in range(12)))
            assert [reply.content for reply in replies] == [b"ok"] * 12
            await asyncio.gather(*(client.send("GET", "/") for _ in range(3)))
            await client.aclose()

    asyncio.run(ask())
    asyncio.run(ask())  # another loop has connections of its own
    assert len(opened) == 6


def test_who_is_asked_is_watched_for_signs_of_life_while_an_answer_is_awaited() -> None:
    """As the kernel lists connections: a timer of kind 2 asks whether the other end is there."""
    timers: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)  # until the request is confirmed
        caller = f":{writer.get_extra_info('peername')[1]:04X}"
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        timers.extend(line[5][:2] for line in lines if line[1].endswith(caller))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()  # from Python 3.12 on a server waits for its connections

    async def ask() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            assert (await client.send("GET", "/")).status == 200
            await client.aclose()

    asyncio.run(ask())
    assert timers == ["02"]


def test_this_machine_is_told_by_address_or_name() -> None:
    known = {
        "127.0.0.1": True,
        "::1": True,
        "localhost": True,
        "10.0.0.1": False,
        "example.org": False,
    }
    assert {host: is_loopback(host) for host in known} == known
