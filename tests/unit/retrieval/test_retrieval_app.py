"""Routes of the server: wire format, limits, errors and deadlines."""

import asyncio
import json
import socket
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval import app as app_module
from retrieval import wire
from retrieval.app import build_app
from retrieval.batcher import Batcher
from retrieval.corpus import Passage, RetrievalError
from retrieval.encoder import Encoder
from retrieval.index import Index
from retrieval.searcher import Searcher

pytestmark = pytest.mark.usefixtures("forked_programs")


# One client for all requests, because each client reads the certificates of the system
CLIENT = httpx.Client(timeout=30, trust_env=False)


def post(url: str, body: Any) -> httpx.Response:
    return CLIENT.post(f"{url}/retrieve", json=body)


def post_bytes(url: str, content: Any) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return CLIENT.post(f"{url}/retrieve", content=content, headers=headers)


def get(url: str) -> httpx.Response:
    return CLIENT.get(url)


def test_with_scores_documents_are_wrapped(server_url: str, passages: list[Passage]) -> None:
    queries = ["Alice Walker", "Iron Bridge mayor"]
    reply = post(server_url, {"queries": queries, "topk": 2, "return_scores": True})
    assert reply.status_code == 200
    alice, iron = reply.json()["result"]
    assert [set(item) for item in alice + iron] == [{"document", "score"}] * 4
    assert alice[0]["document"] == {"id": "0", "contents": passages[0].contents}
    assert iron[0]["document"]["id"] == "3"
    assert 1 >= alice[0]["score"] > alice[1]["score"]


@pytest.mark.parametrize(
    "extra", [{}, {"topk": None}, {"topk": 0}, {"topk": 3.0}, {"topk": 3, "return_scores": False}]
)
def test_without_scores_documents_are_bare_and_topk_defaults_to_3(
    server_url: str, extra: dict[str, Any]
) -> None:
    # With two queries, a server could return the documents of one query as two answers.
    result = post(server_url, {"queries": ["Hugo Brandt", "Amber Falls"], **extra}).json()["result"]
    assert [len(row) for row in result] == [3, 3]
    assert [row[0]["id"] for row in result] == ["2", "1"]
    assert set(result[0][0]) == {"id", "contents"}


def test_topk_above_the_corpus_gives_all_of_it(server_url: str) -> None:
    (row,) = post(server_url, {"queries": ["weaver"], "topk": 100}).json()["result"]
    assert sorted(document["id"] for document in row) == ["0", "1", "2", "3", "4"]


def test_no_queries_give_no_rows(server_url: str) -> None:
    assert post(server_url, {"queries": []}).json() == {"result": []}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "Input should be an object"),
        ({}, "expected either queries, such as .*, or one query"),
        ({"queries": ["a"], "query": "a"}, "expected either queries, such as .*, or one query"),
        ({"query": None}, "query: Input should be a valid string"),
        ({"queries": "Alice"}, "queries: Input should be a valid array"),
        ({"queries": ["a", 1]}, r"queries\.1: Input should be a valid string"),
        ({"queries": ["  "]}, r"queries\.0: String should match pattern"),
        ({"query": ""}, "query: String should have at least 1 character"),
        ({"queries": ["x" * 2001]}, "should have at most 2000 characters"),
        ({"queries": ["a"] * 4097}, "queries: List should have at most 4096 items"),
        ({"queries": ["a"] * 410, "topk": 100}, "queries times topk is 41000, at most 40960"),
        ({"queries": ["a"], "topk": 101}, "topk: Input should be less than or equal to 100"),
        ({"queries": ["a"], "topk": -1}, "topk: Input should be greater than or equal to 0"),
        ({"queries": ["a"], "topk": 100_000_000}, "topk: "),
        ({"queries": ["a"], "topk": True}, "topk: Input should be a valid integer"),
        ({"queries": ["a"], "topk": False}, "topk: Input should be a valid integer"),
        ({"queries": ["a"], "topk": 3.5}, "topk: Input should be a valid integer"),
        ({"queries": ["a"], "topk": "3.0"}, "topk: Input should be a valid integer"),
        ({"queries": ["a"], "return_scores": 1}, "return_scores: Input should be a valid boolean"),
    ],
)
def test_bad_requests_get_422_and_the_reason(server_url: str, body: Any, message: str) -> None:
    reply = post(server_url, body)
    assert reply.status_code == 422
    with pytest.raises(RetrievalError, match=message):
        raise RetrievalError(reply.json()["error"])


@pytest.mark.parametrize(
    "body",
    [{}, {"ids": "0"}, {"ids": [0]}, {"ids": ["0"], "around": 6}, {"ids": ["0"], "around": True}],
)
def test_bad_requests_for_passages_get_422(server_url: str, body: dict[str, Any]) -> None:
    assert CLIENT.post(f"{server_url}/passages", json=body).status_code == 422


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"queries": ["\\ud800"]}'])
def test_bodies_that_are_no_usable_json_get_422(server_url: str, body: bytes) -> None:
    assert post_bytes(server_url, body).status_code == 422


def test_another_content_type_gets_422(server_url: str) -> None:
    reply = httpx.post(f"{server_url}/retrieve", content=b'{"queries": ["a"]}', trust_env=False)
    assert reply.status_code == 422


def test_a_large_body_gets_413_also_if_the_client_sends_all_of_it_first(server_url: str) -> None:
    assert post(server_url, {"queries": ["x" * (1 << 21)]}).status_code == 413
    parts = (b" " * 65536 for _ in range(17))
    assert post_bytes(server_url, parts).status_code == 413
    for _ in range(3):
        connection = HTTPConnection(httpx.URL(server_url).netloc.decode(), timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/retrieve", b" " * (1 << 24), headers)
        assert connection.getresponse().status == 413
        connection.close()
    assert post(server_url, {"queries": ["still here"]}).status_code == 200


def test_health_ready_and_info(server_url: str, index_dir: Path) -> None:
    assert get(f"{server_url}/health").json() == {"status": "alive"}
    ready = get(f"{server_url}/ready")
    assert (ready.status_code, ready.json()) == (200, {"ready": True})
    info = get(f"{server_url}/info").json()
    manifest = json.loads((index_dir / "index.json").read_text())
    del manifest["sha256"]
    assert {key: info[key] for key in manifest} == manifest
    assert info["counts"]["searches"] >= 1


def test_metrics_count_requests(server_url: str) -> None:
    def read() -> dict[str, float]:
        lines = get(f"{server_url}/metrics").text.splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}

    before = read()
    for _ in range(2):
        post(server_url, {"queries": ["counted one", "counted two"]})
    after = read()
    difference = {name: after[name] - before[name] for name in after}
    assert difference["retriever_searched_total"] == 2
    assert difference["retriever_cached_total"] == 2
    assert difference["retriever_latency_seconds_count"] == 2
    assert difference['retriever_latency_seconds_bucket{le="+Inf"}'] == 2
    assert difference["retriever_batch_size_sum"] == 2
    assert after["retriever_queued"] == 0


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/retrieve"), ("POST", "/health"), ("PUT", "/")]
)
def test_other_methods_and_paths_are_4xx(server_url: str, method: str, path: str) -> None:
    assert CLIENT.request(method, server_url + path).status_code in (404, 405)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)
FIELDS = {"topk": JSON | st.integers(-1, 101), "return_scores": JSON | st.booleans()}
BODIES = JSON | st.fixed_dictionaries(
    {"queries": JSON | st.lists(st.text(max_size=30), max_size=5)}, optional=FIELDS
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True)
@given(body=BODIES.map(json.dumps).map(str.encode) | st.binary(max_size=60))
def test_no_body_makes_the_server_fail(server_url: str, body: bytes) -> None:
    """Any body gets an answer of the right shape, or 422."""
    reply = post_bytes(server_url, body)
    assert reply.status_code in (200, 422), (body, reply.text)
    if reply.status_code == 422:
        assert reply.json()["error"]
        return
    request = json.loads(body)
    rows = reply.json()["result"]
    assert [len(row) for row in rows] == [min(5, request.get("topk") or 3)] * len(
        request["queries"]
    )
    documents = [item.get("document", item) for row in rows for item in row]
    assert {document["id"] for document in documents} <= {"0", "1", "2", "3", "4"}


@pytest.fixture(scope="module")
def searcher(index_dir: Path, encoder: Encoder) -> Searcher:
    return Searcher(Index.open(index_dir), encoder)


@pytest.mark.slow
def test_a_token_guards_all_routes_but_health_and_the_document(searcher: Searcher) -> None:
    batcher = Batcher(searcher.encode, searcher.search)
    transport = httpx.ASGITransport(build_app(searcher, batcher, "0123456789abcdef"))

    async def main() -> None:
        running = asyncio.create_task(batcher.run())
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for path in ("/health", "/openapi.json"):
                assert (await client.get(path)).status_code == 200
            for path in ("/info", "/ready", "/metrics"):
                assert (await client.get(path)).status_code == 401
            body = {"queries": ["a"]}
            for token, status in (
                (b"0123456789abcdee", 401),
                (b"\xff", 401),
                (b"0123456789abcdef", 200),
            ):
                headers = {b"Authorization": b"Bearer " + token}
                reply = await client.post("/retrieve", json=body, headers=headers)
                assert reply.status_code == status
        running.cancel()

    asyncio.run(main())


def test_a_large_answer_is_serialised_outside_the_event_loop(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "LARGE_ANSWER", 2)
    render_response = wire.render_response
    on_event_loop: list[bool] = []

    def record_thread(*args: Any) -> dict[str, Any]:
        on_event_loop.append(threading.current_thread() is threading.main_thread())
        return render_response(*args)

    monkeypatch.setattr(wire, "render_response", record_thread)
    batcher = Batcher(searcher.encode, searcher.search)
    transport = httpx.ASGITransport(build_app(searcher, batcher))

    async def main() -> None:
        running = asyncio.create_task(batcher.run())
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for k in (2, 3):
                reply = await client.post("/retrieve", json={"queries": ["a"], "topk": k})
                assert len(reply.json()["result"][0]) == k
        running.cancel()

    asyncio.run(main())
    assert on_event_loop == [True, False]


def test_a_body_that_does_not_arrive_in_time_gets_408(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "READ_DEADLINE_S", 0.5)
    batcher = Batcher(searcher.encode, searcher.search)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(searcher, batcher), log_level="error"))
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = b'{"queries": ["Alice Walker"]}'

    async def send(*parts: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.1)
        status_line = await reader.readline()
        writer.close()
        return status_line

    async def main() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        unfinished, in_parts = await asyncio.gather(
            send(head + length, body[:5]), send(head, length, body[:5], body[5:])
        )
        assert unfinished.startswith(b"HTTP/1.1 408")
        assert in_parts.startswith(b"HTTP/1.1 200")
        server.should_exit = True
        await serving

    asyncio.run(main())
