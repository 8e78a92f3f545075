"""Retrieval server in a Slurm job of `make retriever`: runs wait for it, also after a requeue."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from retrieval.build import build_index
from retrieval.client import RetrievalClient
from retrieval.corpus import Passage, write_corpus
from rollout.base.network import free_port
from tests.slurm.cluster import Slurm, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_clients_wait_for_the_server_of_a_job_while_it_is_requeued(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--slurm"):
        pytest.skip("takes minutes; `make test-slurm` runs it")
    slurm: Slurm = request.getfixturevalue("slurm")
    corpus = tmp_path / "c.jsonl"
    write_corpus(
        corpus, (Passage.compose(str(n), f"Town {n}", f"It has {n} mills.") for n in range(10, 19))
    )
    build_index(corpus, tmp_path / "index", None)
    port = free_port()
    submission = subprocess.run(
        [
            "make",
            "retriever",
            f"INDEX={tmp_path / 'index'}",
            f"ARGS=--ranking bm25 --port {port}",
            f"SLURM=--nodelist=n1 --mem=2000 --output={tmp_path / 'slurm.out'} --open-mode=append",
        ],
        cwd=ROOT,
        env=os.environ | slurm.env,
        capture_output=True,
        text=True,
        check=True,
    )
    job = submission.stdout.split("Submitted batch job ")[1].split()[0]

    async def search(query: str) -> tuple[str, int]:
        """Return the id of the best passage, and the server's process number."""
        async with RetrievalClient(f"http://127.0.0.1:{port}", patience_s=300) as client:
            passages = await client.search(query, 1)
            return passages[0].id, (await client.info())["pid"]

    passage_id, first_pid = asyncio.run(search("town 13"))
    assert passage_id == "13"

    slurm.run("scontrol", "requeue", job)
    wait_until(lambda: slurm.job(job)["JobState"] == "PENDING", 120)
    slurm.start_soon(job)
    passage_id, second_pid = asyncio.run(search("town 15"))
    assert passage_id == "15"
    assert second_pid != first_pid

    os.kill(second_pid, signal.SIGTERM)
    assert slurm.wait_for_end(job, 60) == "COMPLETED"
