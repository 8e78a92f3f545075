"""A retrieval server in a job of Slurm, by `make retriever`: joined by its file, started again, queued again, ended."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from retrieval.build import build_index
from retrieval.client import RetrievalClient
from retrieval.corpus import Passage, write_corpus
from tests.slurm.cluster import Slurm, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def test_runs_join_a_server_of_another_node_and_wait_for_it(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--slurm"):
        pytest.skip("takes minutes; `make test-slurm` runs it")
    slurm: Slurm = request.getfixturevalue("slurm")
    write_corpus(
        tmp_path / "c.jsonl",
        (Passage.compose(str(n), f"Town {n}", f"It has {n} mills.") for n in range(10, 19)),
    )
    build_index(tmp_path / "c.jsonl", tmp_path / "index", None)
    members, output = tmp_path / "members", tmp_path / "slurm.out"
    own = f"--nodelist=n1 --mem=2000 --output={output} --open-mode=append"  # where docs/retrieval.md has its machine's
    words = [
        f"INDEX={tmp_path / 'index'}",
        f"MEMBERS={members}",
        "ARGS=--ranking bm25",
        f"SLURM={own}",
    ]
    env = os.environ | slurm.env
    made = subprocess.run(
        ["make", "retriever", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    job = made.stdout.split("Submitted batch job ")[1].split()[0]  # make inside make says more

    async def ask(query: str) -> tuple[str, int]:
        async with RetrievalClient(members=members, patience_s=300) as client:
            return (await client.search(query, 1))[0].id, (await client.info())["pid"]

    found, pid = asyncio.run(ask("town 13"))
    assert found == "13"
    os.kill(pid, signal.SIGKILL)
    found, second = asyncio.run(ask("town 14"))
    assert (found, second != pid) == ("14", True)
    assert "it is started again" in output.read_text()
    slurm.run("scontrol", "requeue", job)
    wait_until(lambda: slurm.job(job)["JobState"] == "PENDING", 120)
    # two minutes by default
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    found, third = asyncio.run(ask("town 15"))
    assert (found, third not in (pid, second)) == ("15", True)
    slurm.run("scancel", job)
    assert slurm.ended(job, 60) == "CANCELLED"
    assert list(members.iterdir()) == []
