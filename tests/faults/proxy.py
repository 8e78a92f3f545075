"""HTTP proxy that delays, drops, cuts or replaces answers, as networks and servers do."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

DELAY_S = 0.5


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes] | None:
    """Return the head and the body of an HTTP message; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    length = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", head)
    return head, await reader.readexactly(int(length[1]) if length else 0)


def cut(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    return head, body[: len(body) // 2]


def busy(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    return b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 0.1\r\ncontent-length: 0\r\n\r\n", b""


def garbage(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 20\r\n\r\n",
        b"<html>welcome</html>",
    )


FAULTS = {"cut": cut, "429": busy, "garbage": garbage}
NAMES = ("delay", "drop", *FAULTS)


class FaultProxy:
    """Proxy of the server `target`, some of whose answers have a fault.

    Attributes:
        target: address of the server, which may change while the proxy runs.
        faulty: name of the fault, and number of further POST requests that get it.
        done: number of faults so far, by name.
        url: URL of the running proxy.
    """

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self.faulty: tuple[str, int] = ("", 0)
        self.done = Counter[str]()
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await read_message(reader)
                if request is None:
                    return
                name, remaining = self.faulty
                if remaining and request[0].startswith(b"POST"):
                    self.faulty = (name, remaining - 1)
                    self.done[name] += 1
                else:
                    name = ""
                if name == "drop":
                    return
                if name == "delay":
                    await asyncio.sleep(DELAY_S)
                head, body = await self._forward(request)
                if name in FAULTS:
                    head, body = FAULTS[name](head, body)
                writer.writelines((head, body))
                await writer.drain()
                if name == "cut":
                    return
        except (OSError, asyncio.IncompleteReadError):
            pass  # if the server is gone, the client's connection is closed too
        finally:
            writer.close()

    async def _forward(self, request: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(self.target.hostname, self.target.port)
        try:
            writer.writelines(request)
            answer = await read_message(reader)
            if answer is None:
                raise ConnectionResetError
            return answer
        finally:
            writer.close()

    @contextmanager
    def running(self) -> Iterator[FaultProxy]:
        """Run the proxy in a thread for this block."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            server.close()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))  # lets the cancelled tasks end
            loop.close()
