"""The client and the sidecar: batching, retries, deadlines and typed failure."""

import asyncio
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from retrieval.client import (
    BadRequest,
    Passage,
    RetrievalClient,
    RetrievalError,
    RetrievalUnavailable,
    RetrieverSidecar,
    probe,
)

ONE_HIT = b'{"result": [[{"document": {"id": "0", "contents": "x"}, "score": 0.5}]]}'


@contextmanager
def scripted(*replies: tuple[int, bytes]) -> Iterator[str]:
    """A server that gives these replies in turn, then the last one for ever."""
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def search(url: str, query: str = "q", k: int = 1, **options: float) -> tuple[list[Passage], RetrievalClient]:
    async def body() -> tuple[list[Passage], RetrievalClient]:
        async with RetrievalClient(url, **options) as client:  # type: ignore[arg-type]
            return await client.search(query, k), client

    return asyncio.run(body())


def test_calls_of_one_tick_share_a_post(server_url: str, passages: list[Passage]) -> None:
    async def body() -> None:
        async with RetrievalClient(server_url) as client:
            titles = [passage.title for passage in passages] * 3
            found = await asyncio.gather(*(client.search(title, 2) for title in titles))
            assert [hits[0].title for hits in found] == titles
            assert [len(hits) for hits in found] == [2] * 15
            assert client.posts == 1
            await asyncio.gather(client.search("weaver", 1), client.search("weaver", 3))
            assert client.posts == 3  # one for each k

    asyncio.run(body())


def test_many_and_long_queries_are_split_to_fit_the_server(server_url: str) -> None:
    async def body() -> None:
        async with RetrievalClient(server_url) as client:
            await asyncio.gather(*(client.search(f"q{n}", 1) for n in range(257)))
            assert client.posts == 2
            # 12 000 bytes each in JSON, so 200 of them are over 1 MiB; cut to 256 tokens, they encode quickly
            await asyncio.gather(*(client.search(f"{n:04}" + "\x01" * 1996, 1) for n in range(100)))
            assert client.posts == 4

    asyncio.run(body())


def test_one_client_serves_one_event_loop_after_another(server_url: str) -> None:
    client = RetrievalClient(server_url)
    first = asyncio.run(client.search("Alice Walker", 1))
    assert asyncio.run(client.search("Alice Walker", 1)) == first
    assert first[0].id == "0"


def test_a_bad_query_fails_alone(server_url: str) -> None:
    async def body() -> None:
        async with RetrievalClient(server_url) as client:
            calls = (client.search("weaver"), client.search("  "), client.search("x" * 2001), client.search("x", 101))
            good, *bad = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(good, list) and len(good) == 3
            assert [type(error) for error in bad] == [BadRequest] * 3

    asyncio.run(body())


def test_a_cancelled_call_leaves_the_others_their_answer(server_url: str) -> None:
    async def body() -> None:
        async with RetrievalClient(server_url) as client:
            leaving, staying = (asyncio.create_task(client.search("baker", 1)) for _ in range(2))
            await asyncio.sleep(0)
            leaving.cancel()
            assert (await staying)[0].id == "4"

    asyncio.run(body())


def test_server_errors_and_malformed_replies_are_retried() -> None:
    with scripted((500, b"oops"), (200, b"<html>"), (200, b'{"result": []}'), (200, ONE_HIT)) as url:
        found, client = search(url)
    assert found == [Passage("0", "x", score=0.5)]
    assert (client.posts, client.retried) == (4, 3)


@pytest.mark.parametrize(
    "reply",
    [
        (503, b"busy"),
        (200, b'{"result": [[]]}'),
        (200, ONE_HIT.replace(b"0.5", b"NaN")),
        (200, ONE_HIT.replace(b'"x"', b"null")),
        (200, b'{"result": [[{"id": "0", "contents": "x"}]]}'),
    ],
)
def test_no_usable_answer_is_unavailable_never_a_result(reply: tuple[int, bytes]) -> None:
    with scripted(reply) as url, pytest.raises(RetrievalUnavailable, match="is unavailable"):
        search(url, retries=1)


def test_a_refusal_is_not_retried() -> None:
    with scripted((401, b"no token")) as url, pytest.raises(RetrievalError, match="status 401: no token") as caught:
        search(url)
    assert not isinstance(caught.value, RetrievalUnavailable)


def test_a_silent_server_meets_the_deadline() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RetrievalUnavailable, match=r"deadline of 0\.2 s passed"),
    ):
        search(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)


def test_probe_reports_recall_latency_and_size(server_url: str, passages: list[Passage]) -> None:
    report = probe(server_url, passages, k=2)
    assert (report["n"], report["recall_at_1"], report["recall_at_k"], report["ntotal"]) == (5, 1.0, 1.0, 5)
    assert 0 < report["latency_ms_median"] <= report["latency_ms_max"]
    assert probe(server_url, [Passage.compose("9", "Nowhere", "x"), passages[0]])["recall_at_1"] == 0.5
    with pytest.raises(RetrievalError, match="at least one passage"):
        probe(server_url, [])


@pytest.mark.slow
def test_a_server_killed_midway_is_unavailable(index_dir: Path, tmp_path: Path) -> None:
    sidecar = RetrieverSidecar(index_dir, log_path=tmp_path / "server.log")
    with sidecar as url:

        async def body() -> None:
            async with RetrievalClient(url, retries=2) as client:
                assert (await client.search("Alice Walker", 1))[0].id == "0"
                assert sidecar.pid is not None
                os.kill(sidecar.pid, signal.SIGSTOP)  # the request reaches a server that can no longer answer
                asked = asyncio.create_task(client.search("Hugo Brandt", 1))
                await asyncio.sleep(0.2)
                os.kill(sidecar.pid, signal.SIGKILL)
                with pytest.raises(RetrievalUnavailable, match="is the server running"):
                    await asked
                assert client.retried == 2

        asyncio.run(body())
    with pytest.raises(RetrievalError, match="needs a running server"):
        probe(sidecar, [Passage("0", "x")])


@pytest.mark.slow
def test_a_sidecar_that_cannot_start_says_why(index_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(index_dir.parent, tmp_path / "copy")
    (tmp_path / "copy/index/vectors.faiss").write_bytes(b"x")
    with (
        pytest.raises(RetrievalError, match=r"ended with code 2; it last said: .*vectors\.faiss: sha256"),
        RetrieverSidecar(tmp_path / "copy/index"),
    ):
        pass
    with pytest.raises(RetrievalError, match=r"not ready after 0\.1 s"), RetrieverSidecar(index_dir, timeout_s=0.1):
        pass
