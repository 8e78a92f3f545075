"""The server process: its start, its options and its end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.usefixtures("forked_programs")
ROOT = Path(__file__).resolve().parents[3]
SERVE = [sys.executable, "-m", "retrieval.server"]


def start(*args: object) -> subprocess.CompletedProcess[str]:
    """Start a server that is expected to end at once."""
    command = [*SERVE, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_port_in_use_is_one_line_and_code_2(index_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        result = start("--index", index_dir, "--port", port)
    assert result.returncode == 2
    assert result.stderr == (
        f"retrieval server: cannot listen on 127.0.0.1:{port} (Address already in use); "
        "choose another --port\n"
    )


def test_a_host_that_is_not_loopback_needs_a_token(index_dir: Path, tmp_path: Path) -> None:
    result = start("--index", index_dir, "--host", "0.0.0.0")
    assert result.returncode == 2
    assert result.stderr == (
        "retrieval server: host 0.0.0.0 is not a loopback address; "
        "listen on 127.0.0.1, or set --token-file\n"
    )
    (tmp_path / "token").write_text("short")
    result = start("--index", index_dir, "--token-file", tmp_path / "token")
    assert result.returncode == 2
    assert "5 characters, expected at least 16" in result.stderr


@contextmanager
def running(command: list[str], ready: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.URL]]:
    """Run a server until the block ends; yield its process and its URL once it is ready."""
    options = ["--ready-file", str(ready), "--die-with-parent", str(os.getpid())]
    process = subprocess.Popen([*command, *options], cwd=ROOT, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        values = json.loads(ready.read_text())
        assert values["pid"] == process.pid
        yield process, httpx.URL(values["url"])
    finally:
        process.kill()
        process.wait()


def request(query: str) -> bytes:
    body = json.dumps({"queries": [query]})
    head = "POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def wait_for_metric(url: httpx.URL, line: str) -> None:
    deadline = time.monotonic() + 60
    while line not in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
        assert time.monotonic() < deadline, line
        time.sleep(0.02)


@pytest.mark.slow
def test_sigterm_drains_and_exits_with_0(index_dir: Path, tmp_path: Path) -> None:
    # Requests wait in the queue for others while the signal arrives.
    command = [*SERVE, "--index", str(index_dir), "--max-wait-ms", "1500"]
    with running(command, tmp_path / "ready.json") as (process, url):
        address = (url.host, url.port or 0)
        with socket.create_connection(address) as leaving:
            leaving.sendall(request("Alice Walker"))
            wait_for_metric(url, "retriever_queued 1")
        wait_for_metric(url, "retriever_dropped_total 1")
        with socket.create_connection(address) as connection:
            connection.sendall(request("Alice Walker"))
            wait_for_metric(url, "retriever_queued 1")
            process.send_signal(signal.SIGTERM)
            connection.settimeout(120)
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert process.wait(120) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


SLOW_SERVER = """
import sys, time
from retrieval import searcher, server

search = searcher.Searcher.search

def slow_search(self, queries, *args):
    if "slow" in queries:
        time.sleep(600)
    return search(self, queries, *args)

searcher.Searcher.search = slow_search
server.DRAIN_S = 1
server.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_running_search_does_not_delay_the_end(index_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW_SERVER, "--index", str(index_dir)]
    with (
        running(command, tmp_path / "ready.json") as (process, url),
        socket.create_connection((url.host, url.port or 0)) as connection,
    ):
        connection.sendall(request("slow"))
        wait_for_metric(url, "retriever_searches_total 1")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
