"""Retrieval servers that die, hang, join and leave, and what their callers get meanwhile."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from retrieval import client as client_module
from retrieval.client import (
    BALANCES,
    Endpoint,
    EndpointPool,
    Passage,
    RetrievalClient,
    RetrievalError,
    RetrievalUnavailable,
)
from retrieval.sidecar import RetrieverSidecar
from tests.support.lessons import teach
from tests.support.ranks import Job
from tests.support.ranks import play as play_ranks
from tests.support.retrieval import ONE_HIT, scripted, search
from tests.support.run_folder import make_run

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.mark.slow
def test_a_server_killed_midway_is_unavailable(index_dir: Path, tmp_path: Path) -> None:
    sidecar = RetrieverSidecar(index_dir, log_path=tmp_path / "server.log")
    with sidecar as url:

        async def body() -> None:
            async with RetrievalClient(url, retries=2) as client:
                assert (await client.search("Alice Walker", 1))[0].id == "0"
                assert sidecar.pid is not None
                os.kill(
                    sidecar.pid, signal.SIGSTOP
                )  # the request reaches a server that can no longer answer
                asked = asyncio.create_task(client.search("Hugo Brandt", 1))
                await asyncio.sleep(0.2)
                os.kill(sidecar.pid, signal.SIGKILL)
                with pytest.raises(RetrievalUnavailable, match="is the server running"):
                    await asked
                assert client.retried == 2

        asyncio.run(body())


@pytest.mark.slow
def test_a_sidecar_that_cannot_start_says_why(index_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RetrievalError,
        match=r"retriever\.python: no interpreter at .*/none; make one of retrieval/env",
    ):
        RetrieverSidecar(index_dir, python=tmp_path / "none")
    shutil.copytree(index_dir.parent, tmp_path / "copy")
    (tmp_path / "copy/index/vectors.faiss").write_bytes(b"x")
    with (
        pytest.raises(
            RetrievalError, match=r"ended with code 2; it last said: .*vectors\.faiss: sha256"
        ),
        RetrieverSidecar(tmp_path / "copy/index"),
    ):
        pass
    with (
        pytest.raises(RetrievalError, match=r"not ready after 0\.1 s"),
        RetrieverSidecar(index_dir, timeout_s=0.1),
    ):
        pass


def free_url() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_dead_server_is_passed_over_and_then_left_alone() -> None:
    dead = free_url()
    with scripted((200, ONE_HIT)) as url:

        async def body() -> tuple[int, int]:
            async with RetrievalClient(dead, url, balance="round_robin") as client:
                for _ in range(6):
                    assert [hit.id for hit in await client.search("q", 1)] == ["0"]
                return client.posts, client.retried

        # the first request goes to the dead one and then to the other; its circuit is open for the next five
        assert asyncio.run(body()) == (7, 0)


def test_balances_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = (Endpoint(f"http://127.0.0.1:{port}") for port in (1, 2, 3))
    a.under_way, b.under_way, c.under_way = 2, 0, 1
    assert BALANCES["round_robin"]([a, b, c], 4) == [b, c, a]
    assert BALANCES["least_loaded"]([a, b, c], 0) == [b, c, a]
    assert {endpoint.url for endpoint in BALANCES["random"]([a, b, c], 0)} == {a.url, b.url, c.url}
    c.under_way = 0
    assert [BALANCES["least_loaded"]([a, b, c], turn)[0] for turn in range(3)] == [
        b,
        b,
        c,
    ]  # equal ones take turns


def test_a_circuit_opens_after_three_failures_and_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(client_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(client_module.random, "uniform", lambda low, high: 1.0)
    one = Endpoint("http://127.0.0.1:1")
    rests = []
    for _ in range(5):
        one._failed()
        rests.append(one._rests_until - now[0] if one.resting else 0.0)
    assert rests == [0.0, 0.0, 0.5, 1.0, 2.0]
    now[0] += 2.0
    assert not one.resting
    one._failed(unreachable=True)
    assert one._rests_until == now[0] + 4.0
    assert EndpointPool(
        ["http://127.0.0.1:1"], balance="random"
    ).order()  # all rest: one is tried all the same


def test_a_busy_server_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Endpoint] = []
    monkeypatch.setattr(Endpoint, "_failed", lambda self, **_: failed.append(self))
    with scripted((503, b"busy"), (200, ONE_HIT), headers={"Retry-After": "0.01"}) as url:
        found, client = search(url)
    assert (len(found), client.retried, failed) == (1, 1, [])


def test_members_come_go_and_stop_beating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(client_module.time, "monotonic", lambda: now[0])
    pool = EndpointPool([], members=tmp_path, balance="round_robin")

    def urls(after: float) -> list[str]:
        now[0] += after
        return [endpoint.url for endpoint in pool.endpoints]

    assert urls(0) == []
    assert str(pool) == f"{tmp_path} (no server has written its file there)"
    for name, said in (
        ("a", '{"url": "http://a:1", "token": "t"}'),
        ("b", '{"url": "http://b:1"}'),
        ("c", "{"),
        ("d", "[]"),
    ):
        (tmp_path / f"{name}.json").write_text(said)
    assert urls(2) == ["http://a:1", "http://b:1"]
    first = pool.endpoints[0]
    os.utime(tmp_path / "a.json", (1, 1))  # a heartbeat is a change, whatever the clocks say
    assert urls(25) == ["http://a:1", "http://b:1"]
    assert urls(10) == ["http://a:1"]  # b's last heartbeat was seen 35 s ago
    assert pool.endpoints == [first]
    (tmp_path / "a.json").unlink()
    assert urls(2) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_server_comes_back_and_the_callers_have_waited(
    how: signal.Signals,
    index_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(client_module, "POLL_S", 0.2)
    sidecar = RetrieverSidecar(index_dir, timeout_s=60)
    with sidecar as url:

        async def body() -> RetrievalClient:
            async with RetrievalClient(
                url, retries=0, patience_s=120, revive=sidecar.revive, timeout_s=10
            ) as client:
                assert (await client.search("Alice Walker", 1))[0].id == "0"
                assert sidecar.pid is not None
                os.kill(sidecar.pid, how)
                sidecar._timeout_s = 60 if how == signal.SIGKILL else 10  # a start takes less
                found = await asyncio.gather(
                    *(client.search(title, 1) for title in ("Alice Walker", "Hugo Brandt"))
                )
                assert [hits[0].id for hits in found] == ["0", "2"]
                again = asyncio.gather(*(client.search("Clara Dawson", k) for k in (1, 2)))
                assert [hits[0].id for hits in await again] == ["4", "4"]
                return client

        assert asyncio.run(body()).outages == 1
    said = capfd.readouterr().err.splitlines()
    assert [
        line.partition(":")[0] for line in said if line.startswith("retriever: no server answers")
    ] == ["retriever"]
    assert sum("answers again after" in line for line in said) == 1
    assert sum("it is started again" in line for line in said) == 1


@pytest.mark.slow
def test_one_of_two_servers_killed_under_load_loses_nothing(
    server_url: str, index_dir: Path, passages: list[Passage]
) -> None:
    with RetrieverSidecar(index_dir) as dying:

        async def body() -> tuple[int, int]:
            async with RetrievalClient(
                dying, server_url, balance="round_robin", retries=2
            ) as client:
                wrong = 0
                for step in range(30):
                    if step == 10:
                        info = client._pool.endpoints[0].ask(
                            "GET", "/info", None, json.loads, timeout_s=30
                        )
                        os.kill((await info)["pid"], signal.SIGKILL)
                    hits = await asyncio.gather(
                        *(client.search(p.title, 1 + step % 3) for p in passages)
                    )
                    wrong += sum(
                        found[0].id != passage.id
                        for found, passage in zip(hits, passages, strict=True)
                    )
                return wrong, client.outages

        assert asyncio.run(body()) == (0, 0)


SERVE = Path(__file__).resolve().parents[3] / "workflow" / "scripts" / "serve_retriever.sh"


@pytest.mark.slow
def test_a_server_in_a_job_is_started_again_until_it_is_told_to_end(
    index_dir: Path, tmp_path: Path
) -> None:
    """The script of `make retriever`: what it serves joins by its file, also after the server was killed."""
    env = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"} | {
        "PYTHON": sys.executable
    }
    words = [str(SERVE), str(tmp_path / "members"), "--index", str(index_dir)]
    with subprocess.Popen(
        words, cwd=SERVE.parents[2], env=env, stderr=subprocess.PIPE, text=True
    ) as job:

        async def body() -> None:
            async with RetrievalClient(members=tmp_path / "members", patience_s=120) as client:
                assert (await client.search("Alice Walker", 1))[0].id == "0"
                os.kill((await client.info())["pid"], signal.SIGKILL)
                assert (await client.search("Hugo Brandt", 1))[0].id == "2"

        try:
            asyncio.run(body())
        finally:
            job.terminate()
            said = job.communicate(timeout=60)[1]
    assert job.returncode == 0
    assert said.count("it is started again") == 1
    assert list((tmp_path / "members").iterdir()) == []
    words[3] = str(tmp_path / "no index")
    done = subprocess.run(
        words, cwd=SERVE.parents[2], env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no index was finished there; build it" in done.stderr


@pytest.mark.slow
@pytest.mark.multirank
def test_a_training_loses_nothing_when_one_of_two_servers_is_killed(
    server_url: str, index_dir: Path, tmp_path: Path
) -> None:
    """A real team of a real model with real updates: rewards, turns and weights are those of an unbroken one."""
    sizes = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "positions": 8192}
    model = (
        make_run(tmp_path, *(f"++cold_start.base.{name}={size}" for name, size in sizes.items()))
        / "base"
    )
    lesson = {"team": "search_team", "sharing": "shared", "model": str(model)}
    dying = RetrieverSidecar(index_dir)
    with dying as url:
        broken = {"urls": (url, server_url), "dying": dying.pid, "at": 5}
        play_ranks(
            [
                Job(function=teach, arguments={"out": tmp_path / name, **lesson, **servers})
                for name, servers in (("whole", {"urls": (server_url,)}), ("broken", broken))
                if not (tmp_path / name).mkdir()
            ]
        )
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)
    whole, broken_off = (
        json.loads((tmp_path / n / "search_team_shared.json").read_text())
        for n in ("whole", "broken")
    )
    assert whole == broken_off
    assert [step["failed"] for step in whole] == [[], []]
    assert sum(line.count("searcher") for step in whole for line in step["lines"]) > 5
    assert any(update["change"] > 0 for step in whole for update in step["updates"].values())
