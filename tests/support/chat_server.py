"""A server that speaks OpenAI's chat protocol and can answer well, badly, late or not at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Response:
    """What the server does with one request."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    hangs_up: bool = False  # closes the connection without an answer


def says(
    text: str | None, *, prompt: int = 10, reply: int = 5, delay_s: float = 0.0, **extra: Any
) -> Response:
    """A completion with `text` and the given counts of tokens."""
    body = {
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": reply},
    }
    return Response(json.dumps({**body, **extra}).encode(), delay_s=delay_s)


Script = Callable[[dict[str, Any], int], Response]


@dataclass
class ChatServer:
    """What was asked of a running server."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # monotonic seconds at which requests came
    busy: int = 0
    busiest: int = 0  # most requests at once

    def prompts(self) -> list[str]:
        """The last message of each request."""
        return [body["messages"][-1]["content"] for body in self.bodies]


@contextmanager
def chat_server(script: Script | Response) -> Iterator[ChatServer]:
    """Answer by `script`: a function of (request body, request number from 0), or one response for ever."""
    lock = threading.Lock()
    stopping = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(seen.bodies)
                seen.bodies.append(body)
                seen.headers.append(dict(self.headers))
                seen.times.append(time.monotonic())
                seen.busy += 1
                seen.busiest = max(seen.busiest, seen.busy)
            response = script if isinstance(script, Response) else script(body, number)
            stopping.wait(response.delay_s)
            with lock:
                seen.busy -= 1
            if response.hangs_up:
                self.close_connection = True
                return
            try:
                self.send_response(response.status)
                for name, value in response.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(response.body)))
                self.end_headers()
                self.wfile.write(response.body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client did not wait

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    seen = ChatServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield seen
    finally:
        stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()
