"""Evaluation of 25,000 requests on a slow server: lost trajectories, growth of memory, and use of the server.

The evaluation, its files and the client of SGLang are real. The server answers every request after a
fixed time with the same text, SLOTS of them at once. The reference is the rate of the same server
with a plain client that sends prepared bytes over one connection per slot, before and after the
evaluation, because on a busy machine even such a server does not keep its slots full.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil
import yaml

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from mcore_mas.evaluation.evaluate import evaluate
from rollout.models.chat_template import Renderer
from rollout.records.files import read_tasks
from tests.support.run_folder import make_run
from tests.support.slotted_sglang import slotted_server

SLOTS = 16
REPLY_S = 0.16
PLAIN_REQUESTS = 1_600
TASKS = 521
SAMPLES = 16
CALLS = 3  # calls of a trajectory: solver, verifier without a verdict, solver
REQUESTS = TASKS * SAMPLES * CALLS
# Numbers of requests after which memory is compared.
EARLY = 5_000
LATE = 25_000
# Growth between them that counts as flat. If the evaluation held all trajectories, it would exceed
# this.
MAX_GROWTH_MB = 100
GOAL = 0.8


def plain_rate(url: str) -> float:
    """Return the requests per second that the server answers a plain client."""
    port = int(url.rpartition(":")[2])
    body = json.dumps({"input_ids": list(range(200)), "return_logprob": True}).encode()
    request = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def send_requests() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(PLAIN_REQUESTS // SLOTS):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
        writer.close()

    async def send_all() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(send_requests() for _ in range(SLOTS)))
        return PLAIN_REQUESTS / (time.perf_counter() - began)

    return asyncio.run(send_all())


def count_requests(url: str) -> int:
    """Return the number of requests that the server has received."""
    return int(httpx.get(f"{url}/count").text)


def watch_memory(url: str, sizes_mb: dict[int, float], finished: threading.Event) -> None:
    """Store the resident memory of this process in `sizes_mb`, by number of requests."""
    process = psutil.Process()
    before = count_requests(url)
    while not finished.wait(0.2):
        requests = count_requests(url) - before
        for mark in (EARLY, LATE):
            if requests >= mark and mark not in sizes_mb:
                sizes_mb[mark] = process.memory_info().rss / 2**20


def main() -> None:
    """Evaluate once."""
    sizes_mb: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), f"data.test={TASKS}", f"evaluation.samples={SAMPLES}")
        answer = read_tasks(run / "tasks" / "test.parquet")[0].answers[0]
        reply_ids = Renderer(run / "base").encode_reply(f"\\boxed{{{answer}}}")
        with slotted_server(SLOTS, REPLY_S, reply_ids) as url:
            path = run / "config.yaml"
            config = yaml.safe_load(path.read_text())
            config["engine"] |= {
                "name": "sglang",
                "urls": [url],
                "slots": SLOTS,
                "compare_servers": False,
            }
            path.write_text(yaml.safe_dump(config))

            rate_before = plain_rate(url)
            finished = threading.Event()
            watcher = threading.Thread(target=watch_memory, args=(url, sizes_mb, finished))
            watcher.start()
            began = time.perf_counter()
            cpu_began = time.process_time()
            evaluate(path, "base", run / "evaluation" / "base.json")
            seconds = time.perf_counter() - began
            cpu_s = time.process_time() - cpu_began
            finished.set()
            watcher.join()
            rate_after = plain_rate(url)
        scores = json.loads((run / "evaluation" / "base.json").read_text())

    scored = sum(score is not None for task in scores["tasks"] for score in task["scores"])
    print(
        f"{REQUESTS} requests in {seconds:.0f} s; {scored} of {scores['replies']} trajectories "
        f"scored, {scores['failed']}"
    )
    print(
        f"memory: {sizes_mb[EARLY]:.0f} MB at {EARLY} requests, {sizes_mb[LATE]:.0f} MB at {LATE}"
    )
    assert scored == scores["replies"] == TASKS * SAMPLES, "trajectories were lost"
    assert sizes_mb[LATE] - sizes_mb[EARLY] < MAX_GROWTH_MB, "memory grows"
    rate = REQUESTS / seconds
    print(
        f"{rate:.0f} requests/s, a plain client {rate_before:.0f} before and {rate_after:.0f} after"
    )
    print(
        f"rate of always full slots: {SLOTS / REPLY_S:.0f}; {1e3 * cpu_s / REQUESTS:.1f} ms of this "
        "process's CPU per request"
    )
    print_result(
        "evaluation",
        rate / ((rate_before + rate_after) / 2),
        goal=GOAL,
        reference="plain_client",
        repeats=1,
    )


if __name__ == "__main__":
    main()
