"""Scripted server of OpenAI's chat API, whose responses can also be errors, late or missing."""

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
    """Response to one request.

    Attributes:
        hangs_up: close the connection without a response.
    """

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    hangs_up: bool = False


def says(
    text: str | None, *, prompt: int = 10, reply: int = 5, delay_s: float = 0.0, **extra: Any
) -> Response:
    """Return a completion with `text` and these numbers of tokens; `extra` are more fields."""
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
    """Requests to a running server.

    Attributes:
        bodies: parsed body of each request.
        headers: headers of each request.
        times: time.monotonic() at which each request arrived.
        busy: number of requests that are being answered.
        busiest: largest number of requests at a time.
    """

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    busy: int = 0
    busiest: int = 0

    def prompts(self) -> list[str]:
        """Return the last message of each request."""
        return [body["messages"][-1]["content"] for body in self.bodies]


@contextmanager
def chat_server(script: Script | Response) -> Iterator[ChatServer]:
    """Run a server for this block.

    Args:
        script: response as a function of (request body, number of earlier requests), or one
            response to every request.
    """
    lock = threading.Lock()
    stopping = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server_log.bodies)
                server_log.bodies.append(body)
                server_log.headers.append(dict(self.headers))
                server_log.times.append(time.monotonic())
                server_log.busy += 1
                server_log.busiest = max(server_log.busiest, server_log.busy)
            response = script if isinstance(script, Response) else script(body, number)
            stopping.wait(response.delay_s)
            with lock:
                server_log.busy -= 1
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
                self.close_connection = True  # the client has gone

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    server_log = ChatServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield server_log
    finally:
        stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()
