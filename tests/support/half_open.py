"""Requests that are never finished, and how long a server keeps their connections."""

from __future__ import annotations

import asyncio
import contextlib
import time


async def _seconds_open(port: int, text: bytes, beginning: bytes) -> float:
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    with contextlib.suppress(ConnectionError):
        said = await asyncio.wait_for(reader.read(), 20)
        assert said.startswith(beginning), said
    writer.close()
    return time.monotonic() - began


async def hold_open(port: int, path: str, headers: str = "", *, status: int) -> list[float]:
    """Leave 300 requests to a server unfinished, all at once; seconds until each one's connection was closed.

    A quarter each: no byte; half a request line; a whole header and one byte of 99; this behind a whole request, in one
    packet, which has to be answered with `status`.

    Raises:
        TimeoutError: one was still open after 20 s.
    """
    lacking = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}Content-Length: 99\r\n\r\n{{".encode()
    )
    whole = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode()
    kinds = (
        (b"", b""),
        (b"POST /retr", b""),
        (lacking, b""),
        (whole + lacking, f"HTTP/1.1 {status}".encode()),
    )
    return await asyncio.gather(*(_seconds_open(port, *kind) for kind in kinds * 75))
