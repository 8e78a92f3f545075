"""HTTP server parts: read deadline, limits on bodies and connections, tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rollout.base.http_server import (
    BodyTooLarge,
    ListenError,
    has_token,
    listen,
    listener_url,
    open_listener,
    read_body,
    server_config,
)

TOKEN = "0123456789abcdef"
MAX_BODY_BYTES = 1000


async def echo(request: Request) -> Response:
    """Answer with the length of the body, after a pause if the query asks for one."""
    try:
        body = await read_body(request, MAX_BODY_BYTES)
    except BodyTooLarge as error:
        return PlainTextResponse(str(error), 413)
    await asyncio.sleep(float(request.query_params.get("pause_s", 0)))
    return JSONResponse(len(body))


@asynccontextmanager
async def echo_server(**options: Any) -> AsyncIterator[str]:
    """Serve `echo` in this event loop; yield its URL."""
    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    listener = open_listener("127.0.0.1", 0)
    config = server_config(app, drain_s=1, lifespan=False, **options)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener_url(listener)
    finally:
        server.should_exit = True
        await serving


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=60)


async def open_request(url: str, content_length: int) -> tuple[Any, asyncio.StreamWriter]:
    """Send a header and one byte of its body."""
    parts = httpx.URL(url)
    reader, writer = await asyncio.open_connection(parts.host, parts.port)
    header = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {content_length}\r\n\r\n"
    writer.write(header.encode() + b"x")
    return reader, writer


def test_an_unfinished_body_gets_408_and_other_requests_are_answered_meanwhile() -> None:
    async def run() -> None:
        async with echo_server(read_timeout_s=0.5) as url, client(url) as http:
            connections = [await open_request(url, content_length=99) for _ in range(50)]
            assert (await http.post("/", content=b"four")).json() == 4
            for reader, writer in connections:
                answer = await asyncio.wait_for(reader.read(), 60)  # until the server closes
                assert answer.startswith(b"HTTP/1.1 408 ")
                assert answer.endswith(b"the body was not complete within 0.5 s")
                writer.close()

    asyncio.run(run())


def test_the_deadline_covers_neither_a_slow_body_in_time_nor_the_answer() -> None:
    async def slow_body() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x"
            await asyncio.sleep(0.1)

    async def run() -> None:
        async with echo_server(read_timeout_s=1.0) as url, client(url) as http:
            assert (await http.post("/", content=slow_body())).json() == 3
            assert (await http.post("/?pause_s=1.5", content=b"x")).json() == 1

    asyncio.run(run())


def test_a_body_over_the_limit_gets_413_whether_declared_or_streamed() -> None:
    large = b"x" * (4 << 20)

    async def streamed() -> AsyncIterator[bytes]:
        yield large

    async def run() -> None:
        async with echo_server() as url, client(url) as http:
            for content in (large, streamed()):
                reply = await http.post("/", content=content)
                assert (reply.status_code, reply.text) == (413, "the body is over 1000 bytes")
            reader, writer = await open_request(url, content_length=1001)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "headers",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "content-length: 0\r\ntransfer-encoding: Chunked",
        "Content-Length: 5\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
    ],
)
def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(headers: str) -> None:
    body = "0\r\n\r\n"  # of no bytes in chunks, and of 5 bytes by its length
    second = "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"

    async def run() -> None:
        async with echo_server() as url:
            parts = httpx.URL(url)
            reader, writer = await asyncio.open_connection(parts.host, parts.port)
            first = f"POST / HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n{body}"
            writer.write((first + second).encode())
            answer = await asyncio.wait_for(reader.read(), 60)  # until the server closes
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.count(b"HTTP/1.1") == 1
            assert b"connection: close" in answer.lower()
            writer.close()

    asyncio.run(run())


def test_requests_get_503_while_more_connections_are_open_than_allowed() -> None:
    async def status(url: str) -> int:
        async with client(url) as http:
            return (await http.post("/", content=b"x")).status_code

    async def run() -> None:
        async with echo_server(max_connections=2) as url:
            parts = httpx.URL(url)
            _, first = await asyncio.open_connection(parts.host, parts.port)
            assert await status(url) == 200
            _, second = await asyncio.open_connection(parts.host, parts.port)
            assert await status(url) == 503
            for writer in (first, second):
                writer.close()
                await writer.wait_closed()
            while await status(url) != 200:
                await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ({"Authorization": f"Bearer {TOKEN}"}, True),
        ({"x-api-key": TOKEN}, True),
        ({"Authorization": f"Bearer {TOKEN}0"}, False),
        ({"x-api-key": "é"}, False),
        ({}, False),
    ],
)
def test_a_token_is_accepted_as_bearer_or_as_api_key(
    header: dict[str, str], accepted: bool
) -> None:
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in header.items()]
    request = Request({"type": "http", "headers": headers})
    assert has_token(request, TOKEN) is accepted


def test_a_server_that_cannot_listen_says_why(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short")
    with pytest.raises(ListenError, match="the token has 5 characters, expected at least 16"):
        listen("127.0.0.1", 0, tmp_path / "token")
    with pytest.raises(ListenError, match=r"host 0\.0\.0\.0 is not loopback; bind 127\.0\.0\.1"):
        listen("0.0.0.0", 0, None)

    (tmp_path / "token").write_text(f"{TOKEN}\n")
    listener, token = listen("127.0.0.1", 0, tmp_path / "token")
    assert token == TOKEN
    port = listener.getsockname()[1]
    with pytest.raises(ListenError, match="Address already in use; choose another --port"):
        listen("127.0.0.1", port, None)
    listener.close()
