"""The server as a child process: its start, its end, and its restart after it died or hangs."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from retrieval import client as client_module
from retrieval.client import Passage, RetrievalClient, RetrievalError, RetrievalUnavailable
from retrieval.sidecar import RetrieverSidecar
from tests.support.lessons import teach
from tests.support.ranks import Job
from tests.support.ranks import run_jobs as run_rank_jobs
from tests.support.run_folder import make_run

pytestmark = [pytest.mark.usefixtures("forked_programs"), pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]


def test_an_interpreter_that_is_missing_is_named(index_dir: Path, tmp_path: Path) -> None:
    message = r"retriever\.python: no interpreter at .*/none; create one from retrieval/env"
    with pytest.raises(RetrievalError, match=message):
        RetrieverSidecar(index_dir, python=tmp_path / "none")


def test_a_server_that_cannot_start_says_why(index_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(index_dir.parent, tmp_path / "copy")
    (tmp_path / "copy/index/vectors.faiss").write_bytes(b"x")
    message = r"ended with code 2; its last output was: .*vectors\.faiss: sha256"
    with (
        pytest.raises(RetrievalError, match=message),
        RetrieverSidecar(tmp_path / "copy/index"),
    ):
        pass
    with (
        pytest.raises(RetrievalError, match=r"was not ready after 0\.1 s"),
        RetrieverSidecar(index_dir, timeout_s=0.1),
    ):
        pass


def test_a_server_that_is_killed_is_unavailable(index_dir: Path, tmp_path: Path) -> None:
    sidecar = RetrieverSidecar(index_dir, log_path=tmp_path / "server.log")
    with sidecar as url:

        async def run() -> None:
            async with RetrievalClient(url) as client:
                assert (await client.search("Alice Walker", 1))[0].id == "0"
                assert sidecar.pid is not None
                os.kill(sidecar.pid, signal.SIGSTOP)  # so that the request has no answer yet
                search = asyncio.create_task(client.search("Hugo Brandt", 1))
                await asyncio.sleep(0.2)
                os.kill(sidecar.pid, signal.SIGKILL)
                with pytest.raises(RetrievalUnavailable, match="is the server running"):
                    await search

        asyncio.run(run())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_server_is_started_again_while_clients_wait(
    how: signal.Signals,
    index_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(client_module, "POLL_S", 0.2)
    # A stopped server is killed after as long as a start may take.
    start_s = 60 if how == signal.SIGKILL else 15
    sidecar = RetrieverSidecar(index_dir, timeout_s=start_s, may_restart=lambda: True)
    with sidecar as url:

        async def run() -> RetrievalClient:
            async with RetrievalClient(
                url, timeout_s=10, patience_s=120, revive=sidecar.revive
            ) as client:
                assert (await client.search("Alice Walker", 1))[0].id == "0"
                assert sidecar.pid is not None
                os.kill(sidecar.pid, how)
                results = await asyncio.gather(
                    *(client.search(title, 1) for title in ("Alice Walker", "Hugo Brandt"))
                )
                assert [hits[0].id for hits in results] == ["0", "2"]
                assert (await client.search("Clara Dawson", 2))[0].id == "4"
                return client

        assert asyncio.run(run()).outages == 1
    assert sum("no server answers" in line for line in caplog.messages) == 1
    assert sum("answers again after" in line for line in caplog.messages) == 1
    assert sum("it is started again" in line for line in caplog.messages) == 1


def test_one_of_two_servers_killed_under_load_loses_no_answer(
    server_url: str, index_dir: Path, passages: list[Passage]
) -> None:
    dying = RetrieverSidecar(index_dir)
    with dying as url:

        async def run() -> int:
            async with RetrievalClient(url, server_url) as client:
                for step in range(30):
                    if step == 10:
                        assert dying.pid is not None
                        os.kill(dying.pid, signal.SIGKILL)
                    results = await asyncio.gather(
                        *(client.search(passage.title, 1 + step % 3) for passage in passages)
                    )
                    assert [hits[0].id for hits in results] == [one.id for one in passages]
                return client.outages

        assert asyncio.run(run()) == 0


def test_the_server_dies_with_its_parent(index_dir: Path) -> None:
    code = (
        "import sys, time; from retrieval.sidecar import RetrieverSidecar; "
        "s = RetrieverSidecar(sys.argv[1]); s.__enter__(); print(s.pid, flush=True); "
        "time.sleep(600)"
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
        deadline = time.monotonic() + 60
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


@pytest.mark.multirank
def test_a_training_loses_nothing_when_one_of_two_servers_is_killed(
    server_url: str, index_dir: Path, tmp_path: Path
) -> None:
    """Rewards, turns and weights of a real team are those of an undisturbed training."""
    sizes = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "positions": 8192}
    overrides = [f"++cold_start.base.{name}={size}" for name, size in sizes.items()]
    model = make_run(tmp_path, *overrides) / "base"
    team = {"team": "search_team", "sharing": "shared", "model": str(model)}
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    dying = RetrieverSidecar(index_dir)
    with dying as url:
        servers = {
            "undisturbed": {"urls": (server_url,)},
            "disturbed": {"urls": (url, server_url), "killed_pid": dying.pid, "killed_at": 5},
        }
        run_rank_jobs(
            [
                Job(function=teach, arguments={"out": tmp_path / name, **team, **settings})
                for name, settings in servers.items()
            ]
        )
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)
    undisturbed, disturbed = (
        json.loads((tmp_path / name / "search_team_shared.json").read_text()) for name in servers
    )
    assert undisturbed == disturbed
    assert [step["failed"] for step in undisturbed] == [[], []]
    assert sum(line.count("searcher") for step in undisturbed for line in step["speakers"]) > 5
    assert any(update["change"] > 0 for step in undisturbed for update in step["updates"].values())
