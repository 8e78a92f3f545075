"""The server process: wire format, limits, start, and end."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval import wire
from retrieval.app import build_app
from retrieval.batcher import Batcher
from retrieval.client import RetrievalClient
from retrieval.corpus import Passage, RetrievalError
from retrieval.encoder import Encoder, minilm_folder
from retrieval.index import Index, Searcher, check_canary
from retrieval.sidecar import RetrieverSidecar
from rollout.base.files import unsealed
from rollout.base.http import is_loopback

pytestmark = pytest.mark.usefixtures("forked_programs")
ROOT = Path(__file__).resolve().parents[3]
SERVE = [sys.executable, "-m", "retrieval.server"]


def post(url: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{url}/retrieve", json=body, timeout=30, trust_env=False, **options)


def start(*args: object) -> subprocess.CompletedProcess[str]:
    command = [*SERVE, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_with_scores_documents_are_wrapped(server_url: str, passages: list[Passage]) -> None:
    reply = post(
        server_url,
        {"queries": ["Alice Walker", "Iron Bridge mayor"], "topk": 2, "return_scores": True},
    )
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
    # Two queries: the shape in which a careless server hands out one query's documents as two answers.
    result = post(server_url, {"queries": ["Hugo Brandt", "Amber Falls"], **extra}).json()["result"]
    assert [len(row) for row in result] == [3, 3]
    assert [row[0]["id"] for row in result] == ["2", "1"]
    assert set(result[0][0]) == {"id", "contents"}


def test_topk_over_the_corpus_gives_all_of_it(server_url: str) -> None:
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


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"queries": ["\\ud800"]}'])
def test_bodies_that_are_not_usable_json_get_422(server_url: str, body: bytes) -> None:
    url, json_type = f"{server_url}/retrieve", {"Content-Type": "application/json"}
    assert httpx.post(url, content=body, headers=json_type, trust_env=False).status_code == 422
    assert (
        httpx.post(url, content=b'{"queries": ["a"]}', trust_env=False).status_code == 422
    )  # no content type


def test_a_big_body_gets_413_whether_declared_or_streamed(server_url: str) -> None:
    with socket.create_connection(httpx.URL(server_url).netloc.decode().split(":")) as connection:  # type: ignore[arg-type]
        head = "POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1048577\r\n\r\n"
        connection.sendall(head.encode())  # and no body: the answer comes before any of it is read
        connection.settimeout(10)
        assert connection.recv(12) == b"HTTP/1.1 413"
    assert post(server_url, {"queries": ["x" * (1 << 21)]}).status_code == 413
    parts = (b" " * 65536 for _ in range(17))
    reply = httpx.post(
        f"{server_url}/retrieve",
        content=parts,
        headers={"Content-Type": "application/json"},
        trust_env=False,
    )
    assert reply.status_code == 413
    for _ in range(3):  # who sends all of it before he listens hears it too
        sender = HTTPConnection(httpx.URL(server_url).netloc.decode(), timeout=10)
        sender.request("POST", "/retrieve", b" " * (1 << 24), {"Content-Type": "application/json"})
        assert (sender.getresponse().status, sender.close()) == (413, None)
    assert post(server_url, {"queries": ["still here"]}).status_code == 200


def test_health_ready_and_info(server_url: str, index_dir: Path) -> None:
    assert httpx.get(f"{server_url}/health", trust_env=False).json() == {"status": "alive"}
    ready = httpx.get(f"{server_url}/ready", trust_env=False)
    assert (ready.status_code, ready.json()) == (200, {"ready": True})
    info = httpx.get(f"{server_url}/info", trust_env=False).json()
    manifest = json.loads((index_dir / "index.json").read_text())
    assert {key: info[key] for key in manifest if key != "sha256"} == unsealed(manifest)
    assert info["counts"]["searches"] >= 1


def test_metrics_count_what_was_asked(server_url: str) -> None:
    def read() -> dict[str, float]:
        text = httpx.get(f"{server_url}/metrics", trust_env=False).text
        return {
            name: float(value)
            for name, value in (line.split() for line in text.splitlines() if line[0] != "#")
        }

    before = read()
    for _ in range(2):
        post(server_url, {"queries": ["counted one", "counted two"]})
    after = read()
    made = {name: after[name] - before[name] for name in after}
    assert (made["retriever_searched_total"], made["retriever_cached_total"]) == (2, 2)
    assert (
        made["retriever_latency_seconds_count"]
        == made['retriever_latency_seconds_bucket{le="+Inf"}']
        == 2
    )
    assert (made["retriever_batch_size_sum"], after["retriever_queued"]) == (2, 0)


def test_a_large_answer_is_written_beside_the_event_loop(
    index_dir: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one of more than two passages is large."""
    monkeypatch.setattr(wire, "LARGE_ANSWER", 2)
    render, on_loop = wire.render_response, list[bool]()

    def rendered(*args: Any) -> dict[str, Any]:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return render(*args)

    monkeypatch.setattr(wire, "render_response", rendered)
    searcher = Searcher(Index.open(index_dir), encoder)
    batcher = Batcher(searcher.encode, searcher.search)
    transport = httpx.ASGITransport(build_app(searcher, batcher, None))

    async def main() -> None:
        searching = asyncio.create_task(batcher.run())
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for k in (2, 3):
                reply = await client.post("/retrieve", json={"queries": ["a"], "topk": k})
                assert len(reply.json()["result"][0]) == k
        searching.cancel()

    asyncio.run(main())
    assert on_loop == [True, False]


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


@settings(max_examples=80, deadline=None, derandomize=True)
@given(body=BODIES.map(json.dumps).map(str.encode) | st.binary(max_size=60))
def test_no_body_makes_the_server_fail(server_url: str, body: bytes) -> None:
    """NaN, infinities, lone surrogates, nesting, wrong types, bytes: an answer of the right shape, or 422."""
    reply = httpx.post(
        f"{server_url}/retrieve",
        content=body,
        headers={"Content-Type": "application/json"},
        timeout=30,
        trust_env=False,
    )
    assert reply.status_code in (200, 422), (body, reply.text)
    if reply.status_code == 422:
        assert reply.json()["error"]
        return
    asked = json.loads(body)
    rows = reply.json()["result"]
    assert [len(row) for row in rows] == [min(5, asked.get("topk") or 3)] * len(asked["queries"])
    documents = [item.get("document", item) for row in rows for item in row]
    assert {document["id"] for document in documents} <= {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/retrieve"), ("POST", "/health"), ("PUT", "/")]
)
def test_other_methods_and_paths_are_4xx(server_url: str, method: str, path: str) -> None:
    assert httpx.request(method, server_url + path, trust_env=False).status_code in (404, 405)


def test_a_port_in_use_is_one_line_and_code_2(index_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = start("--index", index_dir, "--port", port)
    assert done.returncode == 2
    assert done.stderr == (
        f"retrieval server: cannot listen on 127.0.0.1:{port} (Address already in use); try --port 0\n"
    )


def test_a_wider_host_needs_a_token(index_dir: Path, tmp_path: Path) -> None:
    done = start("--index", index_dir, "--host", "0.0.0.0")
    assert done.returncode == 2
    assert done.stderr == (
        "retrieval server: host 0.0.0.0 is not loopback; bind 127.0.0.1, or give --token-file\n"
    )
    (tmp_path / "token").write_text("short")
    done = start("--index", index_dir, "--token-file", tmp_path / "token")
    assert (done.returncode, "5 characters, expected at least 16" in done.stderr) == (2, True)
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [
        True
    ] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [
        False
    ] * 5


def test_the_canary_finds_an_index_of_other_vectors(index_dir: Path) -> None:
    other = Encoder(minilm_folder(), name="x", pooling="cls")
    with pytest.raises(RetrievalError, match=r"canary: row 0 .* built with another encoder"):
        check_canary(Index.open(index_dir), other)


@pytest.mark.slow
def test_a_token_guards_all_but_health(index_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\n")
    with RetrieverSidecar(index_dir, extra_args=("--token-file", str(tmp_path / "token"))) as url:
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer 0123456789abcdee"},
            {"Authorization": b"Bearer \xff"},
        ):
            assert post(url, {"queries": ["a"]}, headers=headers).status_code == 401
        assert httpx.get(f"{url}/info", trust_env=False).status_code == 401
        assert (
            post(
                url, {"queries": ["a"]}, headers={"Authorization": "Bearer 0123456789abcdef"}
            ).status_code
            == 200
        )


@pytest.mark.slow
def test_a_server_of_another_machine_is_found_by_its_file(index_dir: Path, tmp_path: Path) -> None:
    """It makes a token and writes it, for this user alone; a heartbeat writes a lost file anew."""
    file = tmp_path / "servers/one.json"
    command = [*SERVE, "--index", str(index_dir), "--host", "0.0.0.0"]
    child = subprocess.Popen([*command, "--ready-file", str(file), "--die-with-parent"], cwd=ROOT)

    def comes() -> None:
        deadline = time.monotonic() + 120
        while not file.exists():
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    async def ask() -> list[Passage]:
        async with RetrievalClient(members=file.parent) as client:
            return await client.search("Alice Walker", 1)

    try:
        comes()
        said = json.loads(file.read_text())
        assert (said["host"], said["pid"], file.stat().st_mode & 0o777) == (
            socket.getfqdn(),
            child.pid,
            0o600,
        )
        here = said["url"].replace(
            socket.getfqdn(), "127.0.0.1"
        )  # the machine's name may not resolve where tests run
        assert len(said["token"]) > 40
        assert httpx.get(f"{here}/info", trust_env=False).status_code == 401
        file.unlink()
        comes()
        file.write_text(json.dumps({**said, "url": here}))
        assert asyncio.run(ask())[0].id == "0"
    finally:
        child.terminate()
        assert child.wait(20) == 0
    assert not file.exists()


@pytest.mark.slow
def test_sigterm_drains_and_exits_0(index_dir: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [
        *SERVE,
        "--index",
        str(index_dir),
        "--ready-file",
        str(ready),
    ]
    # A long wait for company keeps the request in the queue while the signal arrives.
    child = subprocess.Popen(
        [*command, "--max-wait-ms", "1500", "--die-with-parent"], cwd=ROOT, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 120
        while not ready.exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert json.loads(ready.read_text())["pid"] == child.pid
        url = httpx.URL(json.loads(ready.read_text())["url"])
        body = b'{"queries": ["Alice Walker"]}'
        head = f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"

        def count(line: str) -> None:
            while line not in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
                assert time.monotonic() < deadline, line
                time.sleep(0.02)

        with socket.create_connection((url.host, url.port or 0)) as leaving:
            leaving.sendall(head.encode() + b"\r\n\r\n" + body)
            count("retriever_queued 1")
        count("retriever_dropped_total 1")  # nobody waits for it any more
        with socket.create_connection((url.host, url.port or 0)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            count("retriever_queued 1")
            child.send_signal(signal.SIGTERM)
            connection.settimeout(20)
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert child.wait(20) == 0
        assert child.stderr is not None and child.stderr.read() == b""
        assert not ready.exists()
    finally:
        child.kill()
        child.wait()


SLOW = """
import sys, time
from retrieval import index, server
find = index.Searcher.search
index.Searcher.search = lambda self, asked, *rest: time.sleep(60 * ("slow" in asked[0])) or find(self, asked, *rest)
server.DRAIN_S = 1
server.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_long_search_does_not_hold_up_the_end(index_dir: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [
        sys.executable,
        "-c",
        SLOW,
        "--index",
        str(index_dir),
        "--ready-file",
        str(ready),
        "--die-with-parent",
    ]
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not ready.exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        url = httpx.URL(json.loads(ready.read_text())["url"])
        with socket.create_connection((url.host, url.port or 0)) as connection:
            body = b'{"queries": ["slow"]}'
            head = "POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while (
                "retriever_searches_total 1"
                not in httpx.get(f"{url}/metrics", trust_env=False).text
            ):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            child.send_signal(signal.SIGTERM)
            assert child.wait(20) == 0
        assert not ready.exists()
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_the_server_dies_with_its_parent(index_dir: Path) -> None:
    code = (
        "import sys, time; from retrieval.sidecar import RetrieverSidecar; "
        "s = RetrieverSidecar(sys.argv[1]); s.__enter__(); print(s.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(index_dir)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except FileNotFoundError:
                return
            if state == "Z":
                return
            time.sleep(0.05)
        pytest.fail(f"server {pid} outlived its parent")
    finally:
        parent.kill()
        parent.wait()
