"""An evaluation of 25,000 requests to a slow server: what is lost, how memory grows, and how busy the server is kept.

The evaluation, its files and the SGLang engine are the real ones; the server answers every request after a while with
the same words, so many at once and the others later. The reference is what the same server answers a plain client with
a connection for each slot that sends prepared bytes and does nothing else, before the evaluation and after it: on a
machine with other work, a server that only waits does not keep its slots full either.
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

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from mcore_mas.evaluation.evaluate import evaluate
from rollout.models.chat_template import Renderer
from rollout.records.files import read_tasks
from tests.support.run_folder import make_run
from tests.support.slotted_sglang import slotted_server

SLOTS, SECONDS = 16, 0.16
PLAIN = 1_600  # requests of the plain client, before and after
TASKS, SAMPLES, CALLS = 521, 16, 3  # solver, verifier who says nothing that counts, solver
EARLY, LATE = 5_000, 25_000  # requests at which memory is compared
GROWTH_MB = 100  # that is still flat: the same evaluation with all trajectories in memory takes more with every one


def plain_rate(url: str) -> float:
    """Requests a second that the server answers a client that only asks."""
    body = json.dumps({"input_ids": list(range(200)), "return_logprob": True}).encode()
    request = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(PLAIN // SLOTS):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(
                int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
            )
        writer.close()

    async def ask_all() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(SLOTS)))
        return PLAIN / (time.perf_counter() - began)

    return asyncio.run(ask_all())


def watch(url: str, sizes: dict[int, float], ended: threading.Event) -> None:
    """Put this process's size, in MB, at so many requests into `sizes`."""
    me = psutil.Process()
    before = int(httpx.get(f"{url}/count").text)
    while not ended.wait(0.2):
        asked = int(httpx.get(f"{url}/count").text) - before
        for mark in (EARLY, LATE):
            if asked >= mark and mark not in sizes:
                sizes[mark] = me.memory_info().rss / 2**20


def main() -> None:
    """Evaluate once."""
    sizes: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), f"data.test={TASKS}", f"evaluation.samples={SAMPLES}")
        answer = read_tasks(run / "tasks" / "test.parquet")[0].answers[0]
        tokens = Renderer(run / "base").encode_reply(f"\\boxed{{{answer}}}")
        with slotted_server(SLOTS, SECONDS, tokens) as url:
            path = run / "config.yaml"
            config = yaml.safe_load(path.read_text())
            config["engine"] |= {"name": "sglang", "urls": [url], "slots": SLOTS, "verify": False}
            path.write_text(yaml.safe_dump(config))
            plain = [plain_rate(url)]
            ended = threading.Event()
            watcher = threading.Thread(target=watch, args=(url, sizes, ended))
            watcher.start()
            began, busy = time.perf_counter(), time.process_time()
            evaluate(path, "base", run / "evaluation" / "base.json")
            took, busy = time.perf_counter() - began, time.process_time() - busy
            ended.set()
            watcher.join()
            plain.append(plain_rate(url))
        scores = json.loads((run / "evaluation" / "base.json").read_text())
    requests = TASKS * SAMPLES * CALLS
    known = sum(score is not None for task in scores["tasks"] for score in task["scores"])
    print(
        f"{requests} requests in {took:.0f} s; {known} of {scores['replies']} trajectories known, {scores['failed']}"
    )
    print(f"memory: {sizes[EARLY]:.0f} MB at {EARLY} requests, {sizes[LATE]:.0f} MB at {LATE}")
    assert known == scores["replies"] == TASKS * SAMPLES, "trajectories were lost"
    assert sizes[LATE] - sizes[EARLY] < GROWTH_MB, "memory grows"
    before, after = plain
    print(
        f"{requests / took:.0f} requests/s, a plain client {before:.0f} before and {after:.0f} after"
    )
    print(
        f"always full slots: {SLOTS / SECONDS:.0f}; {1e3 * busy / requests:.1f} ms of this process's CPU a request"
    )
    ratio = requests / took / ((before + after) / 2)
    print(f"name=evaluation ratio={ratio:.2f} goal=0.80 reference=plain_client n=1")


if __name__ == "__main__":
    main()
