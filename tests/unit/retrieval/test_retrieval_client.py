"""The client: shared requests, retries, deadlines, several servers, and outages."""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrieval import client as client_module
from retrieval.client import (
    BadRequest,
    NoRetriever,
    Passage,
    RetrievalClient,
    RetrievalError,
    RetrievalUnavailable,
)
from tests.support.retrieval import ONE_HIT, scripted_server, search_once, unused_url

pytestmark = pytest.mark.usefixtures("forked_programs")

Use = Callable[[RetrievalClient], Any]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(client_module, "POLL_S", 0.1)


def with_client(url: str, use: Use) -> Any:
    """Return what `use` returns for a client of the server at `url`."""

    async def run() -> Any:
        async with RetrievalClient(url) as client:
            return await use(client)

    return asyncio.run(run())


def test_searches_of_one_loop_iteration_share_a_post(
    server_url: str, passages: list[Passage]
) -> None:
    async def use(client: RetrievalClient) -> None:
        titles = [passage.title for passage in passages] * 3
        results = await asyncio.gather(*(client.search(title, 2) for title in titles))
        assert [hits[0].title for hits in results] == titles
        assert [len(hits) for hits in results] == [2] * 15
        assert client.posts == 1
        await asyncio.gather(client.search("weaver", 1), client.search("weaver", 3))
        assert client.posts == 3  # one for each k

    with_client(server_url, use)


def test_passages_come_by_id(server_url: str) -> None:
    async def use(client: RetrievalClient) -> None:
        assert [passage.title for passage in await client.passages("3", 9)] == ["Iron Bridge"]
        assert await client.passages("5") == []
        assert await client.passages("²", 1) == []
        with pytest.raises(BadRequest, match="id: String should match pattern"):
            await client.passages(" ")

    with_client(server_url, use)


@pytest.mark.slow
def test_many_and_long_queries_are_split_over_requests(server_url: str) -> None:
    async def use(client: RetrievalClient) -> None:
        await asyncio.gather(*(client.search(f"q{n}", 1) for n in range(257)))
        assert client.posts == 2
        # 12,000 bytes of JSON each, so 100 of them are over 1 MiB
        await asyncio.gather(*(client.search(f"{n:04}" + "\x01" * 1996, 1) for n in range(100)))
        assert client.posts == 4

    with_client(server_url, use)


def test_a_client_serves_one_event_loop_after_another(server_url: str) -> None:
    client = RetrievalClient(server_url)
    first = asyncio.run(client.search("Alice Walker", 1))
    assert asyncio.run(client.search("Alice Walker", 1)) == first
    assert first[0].id == "0"


def test_a_bad_query_fails_alone(server_url: str) -> None:
    async def use(client: RetrievalClient) -> None:
        good, *bad = await asyncio.gather(
            client.search("weaver"),
            client.search("  "),
            client.search("x" * 2001),
            client.search("x", 101),
            return_exceptions=True,
        )
        assert isinstance(good, list) and len(good) == 3
        assert [type(error) for error in bad] == [BadRequest] * 3

    with_client(server_url, use)


def test_a_cancelled_search_leaves_the_others_their_answer(server_url: str) -> None:
    async def use(client: RetrievalClient) -> None:
        leaving = asyncio.create_task(client.search("baker", 1))
        staying = asyncio.create_task(client.search("baker", 1))
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await staying)[0].id == "4"

    with_client(server_url, use)


def test_server_errors_and_malformed_replies_are_retried() -> None:
    replies = [(500, b"oops"), (200, b"<html>"), (200, b'{"result": []}'), (200, ONE_HIT)]
    with scripted_server(*replies) as url:
        passages, client = search_once(url)
    assert passages == [Passage("0", "x", score=0.5)]
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
def test_without_a_usable_answer_the_deadline_passes(reply: tuple[int, bytes]) -> None:
    # An attempt has as much time as all together. On a busy machine it may take longer than 0.3 s.
    message = r"gave no usable answer to /retrieve within 1\.5 s \((status 503: busy|malformed)"
    with scripted_server(reply) as url, pytest.raises(RetrievalUnavailable, match=message):
        search_once(url, timeout_s=1.5)


def test_a_refusal_is_not_retried() -> None:
    with scripted_server((401, b"no token"), (200, ONE_HIT)) as url:
        with pytest.raises(RetrievalError, match="status 401: no token") as caught:
            search_once(url)
        assert not isinstance(caught.value, RetrievalUnavailable)


def test_a_token_is_sent(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("0123456789abcdef\n")
    received = []

    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.append(await reader.readuntil(b"\r\n\r\n"))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with RetrievalClient(
            f"http://127.0.0.1:{port}", token_file=token_file, timeout_s=0.2
        ) as client:
            with pytest.raises(RetrievalUnavailable):
                await client.search("q")
        server.close()

    asyncio.run(run())
    assert b"\r\nAuthorization: Bearer 0123456789abcdef\r\n" in received[0]


def test_servers_take_turns_and_a_dead_one_is_skipped() -> None:
    dead = unused_url()
    with scripted_server((200, ONE_HIT)) as first, scripted_server((200, ONE_HIT)) as second:

        async def run() -> tuple[int, int]:
            async with RetrievalClient(dead, first, second) as client:
                for _ in range(6):
                    assert [hit.id for hit in await client.search("q", 1)] == ["0"]
                return client.posts, client.retried

        # The first request goes to the dead server and then to another; the next five skip it.
        assert asyncio.run(run()) == (7, 1)


def test_more_searches_than_connections_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "MAX_CONNECTIONS", 2)
    with scripted_server((200, ONE_HIT)) as url:

        async def search(client: RetrievalClient, delay_s: float) -> None:
            await asyncio.sleep(delay_s)  # so that each search has a request of its own
            assert await client.search("q", 1)

        async def run() -> None:
            async with RetrievalClient(url, timeout_s=5) as client:
                await asyncio.gather(*(search(client, n / 1000) for n in range(20)))
                assert client.retried == 0

        asyncio.run(run())


def test_the_wait_for_a_connection_leaves_time_to_repeat_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "MAX_CONNECTIONS", 1)

    async def use(client: RetrievalClient) -> None:
        (slot,) = client._state().slots.values()
        async with slot:  # as a request that is under way
            search = asyncio.create_task(client.search("q", 1))
            await asyncio.sleep(2 * client.timeout_s)
        assert await search
        assert client.retried == 1

    async def run() -> None:
        async with RetrievalClient(url, timeout_s=0.5) as client:
            await use(client)

    with scripted_server((503, b"busy"), (200, ONE_HIT)) as url:
        asyncio.run(run())


def test_a_silent_server_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HEALTH_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NoRetriever, match=r"is unavailable \(TimeoutError\); is the"):
            search_once(url, timeout_s=0.2)


def test_requests_wait_for_a_server_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = int(unused_url().rpartition(":")[2])
    revived = []

    async def run() -> RetrievalClient:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ONE_HIT) + ONE_HIT)
            writer.close()

        async def start() -> asyncio.Server:
            while not caplog.messages:  # until a search has failed
                await asyncio.sleep(0.01)
            return await asyncio.start_server(answer, "127.0.0.1", port)

        starting = asyncio.create_task(start())
        url = f"http://127.0.0.1:{port}"
        async with RetrievalClient(
            url, patience_s=30, revive=lambda: revived.append(True)
        ) as client:
            results = await asyncio.gather(*(client.search("q", 1) for _ in range(3)))
            assert [hits[0].id for hits in results] == ["0"] * 3
        (await starting).close()
        return client

    with caplog.at_level(logging.WARNING, "retrieval.client"):
        client = asyncio.run(run())
    first, second = caplog.messages
    assert first.startswith("retriever: no server answers (All connection attempts failed): http")
    assert "answers again after 0 s" in second
    assert client.outages == 1
    assert revived


def test_patience_ends() -> None:
    with pytest.raises(NoRetriever, match="is the server running"):
        search_once(unused_url(), patience_s=0.2)


def test_requests_that_wait_together_give_up_together(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with RetrievalClient(unused_url(), patience_s=0.5) as client:
            for outages in (1, 2):  # a later request waits for a server again
                # Searches with another k are sent in another request.
                searches = [client.search("q", k) for k in (1, 2, 3)]
                results = await asyncio.gather(*searches, return_exceptions=True)
                assert [type(result) for result in results] == [NoRetriever] * 3
                assert client.outages == outages

    with caplog.at_level(logging.WARNING, "retrieval.client"):
        asyncio.run(run())
    assert ["the run waits at most 0.5 s" in line for line in caplog.messages] == [True] * 2


def test_a_client_needs_a_server() -> None:
    with pytest.raises(RetrievalError, match="needs the URL of at least one server"):
        search_once()
