"""The client and the sidecar: batching, retries, deadlines and typed failure."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
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
from retrieval.sidecar import Golden, probe, read_golden
from tests.support.retrieval import ONE_HIT, scripted, search


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


def test_passages_come_by_id(server_url: str) -> None:
    async def body() -> list[list[str]]:
        async with RetrievalClient(server_url) as client:
            with pytest.raises(BadRequest, match="id: String should match pattern"):
                await client.passages(" ")
            return [
                [p.title for p in await client.passages(id, around)]
                for id, around in (("3", 9), ("5", 0), ("²", 1))
            ]

    assert asyncio.run(body()) == [["Iron Bridge"], [], []]


@pytest.mark.parametrize(
    "body",
    [{}, {"ids": "0"}, {"ids": [0]}, {"ids": ["0"], "around": 6}, {"ids": ["0"], "around": True}],
)
def test_bad_requests_for_passages_are_422(server_url: str, body: dict[str, Any]) -> None:
    assert httpx.post(f"{server_url}/passages", json=body, trust_env=False).status_code == 422


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
            calls = (
                client.search("weaver"),
                client.search("  "),
                client.search("x" * 2001),
                client.search("x", 101),
            )
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
    with scripted(
        (500, b"oops"), (200, b"<html>"), (200, b'{"result": []}'), (200, ONE_HIT)
    ) as url:
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
    with (
        scripted((401, b"no token")) as url,
        pytest.raises(RetrievalError, match="status 401: no token") as caught,
    ):
        search(url)
    assert not isinstance(caught.value, RetrievalUnavailable)


def test_a_filter_that_a_server_refuses_is_whoever_asked_wrong() -> None:
    """It fails no trajectory: what the filter leaves is known to the server alone."""
    with (
        scripted((422, b'{"error": "where: 2000000 passages are so"}')) as url,
        pytest.raises(BadRequest, match="2000000 passages are so"),
    ):
        search(url, where={"language": "en"})
    with scripted((422, b"no such protocol")) as url, pytest.raises(RetrievalError) as caught:
        search(url)
    assert not isinstance(caught.value, BadRequest)


def test_a_silent_server_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HEALTH_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(NoRetriever, match=r"deadline of 0\.2 s passed"),
    ):
        search(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)


def test_probe_reports_recall_latency_and_size(
    server_url: str, passages: list[Passage], tmp_path: Path
) -> None:
    report = asyncio.run(probe(server_url, [Golden(passage.title) for passage in passages], k=2))
    assert (report["n"], report["recall_at_1"], report["recall_at_k"], report["ntotal"]) == (
        5,
        1.0,
        1.0,
        5,
    )
    assert 0 < report["latency_ms_median"] <= report["latency_ms_p99"] <= report["latency_ms_max"]
    assert (
        asyncio.run(probe(server_url, [Golden("Nowhere"), Golden("Alice Walker")]))["recall_at_1"]
        == 0.5
    )
    (tmp_path / "golden").write_text('{"query": "Alice Walker", "ids": ["0", "none"]}\n')
    found = asyncio.run(probe(server_url, read_golden(tmp_path / "golden"), k=5))
    assert (found["recall_at_1"], found["recall_at_k"]) == (0.5, 0.5)
    for line in ("x", '{"query": "a"}', '{"query": "", "ids": ["0"]}', '{"query": "a", "ids": []}'):
        (tmp_path / "golden").write_text(line + "\n")
        with pytest.raises(RetrievalError, match=r"golden:1: "):
            read_golden(tmp_path / "golden")
    with pytest.raises(RetrievalError, match="at least one query"):
        asyncio.run(probe(server_url, []))
