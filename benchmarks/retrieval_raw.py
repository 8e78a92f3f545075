"""The retrieval server against raw FAISS, and against a server that searches as Search-R1's does, on one flat index.

    python benchmarks/retrieval_raw.py [--passages 1000000] [--rounds 3] [--requests 100000]

Each server has one thread for a stage; the reference has as many as ours has stages. FAISS takes BLAS in all of them.
The clock's figures need a quiet machine: those of processor time are beside them.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import faiss
import httpx
import numpy as np
import psutil
import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.support.vectors import spread_index
from retrieval.encoder import Encoder
from retrieval.index import Index
from retrieval.sidecar import RetrieverSidecar
from rollout.base.processes import free_port

CALLERS, GOAL, K, BLAS_FROM = 64, 0.90, 3, 800  # the last: queries * dimensions


@dataclass
class Load:
    """What callers saw, and what it cost the server."""

    wall_s: float
    cpu_s: float  # of the whole server
    threads_s: list[float]  # of its threads, the busiest first
    latencies_s: list[float]
    answers: dict[str, bytes] = field(repr=False)

    @property
    def rate(self) -> float:
        """Queries a second."""
        return len(self.latencies_s) / self.wall_s

    @property
    def cpu_ms(self) -> float:
        """Processor milliseconds of the server a query."""
        return 1000 * self.cpu_s / len(self.latencies_s)

    def latency_s(self, share: float) -> float:
        """A quantile."""
        return sorted(self.latencies_s)[int(share * (len(self.latencies_s) - 1))]

    def __str__(self) -> str:
        p50, p99 = self.latency_s(0.5), self.latency_s(0.99)
        return (
            f"{self.rate:.1f} queries/s, p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms ({p99 / p50:.2f} x), "
            f"{self.cpu_ms:.2f} CPU ms a query"
        )


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, query: str) -> bytes:
    """The server's answer for one query, over a connection that stays open."""
    body = json.dumps({"queries": [query], "topk": K, "return_scores": True}).encode()
    head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    reply = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert reply.startswith("http/1.1 200"), reply
    return await reader.readexactly(int(reply.partition("content-length:")[2].split()[0]))


def load(url: str, pid: int, queries: list[str], callers: int = CALLERS) -> Load:
    """Concurrent callers, one query a request. Plain sockets: a full HTTP client costs more than the server."""
    host, _, port = url.removeprefix("http://").partition(":")
    left, latencies, answers = iter(queries), list[float](), dict[str, bytes]()

    async def caller() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for query in left:
            began = time.perf_counter()
            answers[query] = await post(reader, writer, query)
            latencies.append(time.perf_counter() - began)
        writer.close()

    async def all_callers() -> None:
        await asyncio.gather(*(caller() for _ in range(callers)))

    server = psutil.Process(pid)
    before, threads = (
        server.cpu_times(),
        {one.id: one.user_time + one.system_time for one in server.threads()},
    )
    began = time.perf_counter()
    asyncio.run(all_callers())
    wall_s, after = time.perf_counter() - began, server.cpu_times()
    spent = [one.user_time + one.system_time - threads.get(one.id, 0.0) for one in server.threads()]
    cpu_s = after.user + after.system - before.user - before.system
    return Load(wall_s, cpu_s, sorted(spent, reverse=True), latencies, answers)


def questions(number: int, count: int) -> list[str]:
    """Distinct queries of a round, which no cache knows."""
    return [
        f"who is mayor of town {n} on the river {n % 17} in year {number}" for n in range(count)
    ]


def raw(index: faiss.Index, vectors: np.ndarray, batch: int) -> tuple[float, float]:
    """(Queries a second, processor milliseconds a query) of FAISS alone, in batches."""
    began, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(vectors), batch):
        index.search(vectors[first : first + batch], K)
    return len(vectors) / (time.perf_counter() - began), 1000 * (time.process_time() - cpu) / len(
        vectors
    )


def reference(folder: Path, port: int) -> None:
    """A server as Search-R1's: a synchronous endpoint that encodes and searches for each request, one at a time."""
    import uvicorn
    from fastapi import FastAPI

    faiss.omp_set_num_threads(2)
    torch.set_num_threads(2)
    set_blas(2)
    encoder, opened = Encoder.of("minilm"), Index.open(folder)
    index, corpus, turn = (
        faiss.read_index(str(folder / "vectors.faiss")),
        opened.corpus,
        threading.Lock(),
    )
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: dict) -> dict:  # type: ignore[type-arg]
        with turn:
            scores, ids = index.search(encoder.encode_passages(request["queries"]), request["topk"])
            documents = [[corpus[int(id)] for id in row] for row in ids]
        return {
            "result": [
                [
                    {"document": {"id": one.id, "contents": one.contents}, "score": float(score)}
                    for one, score in zip(*row, strict=True)
                ]
                for row in zip(documents, scores, strict=True)
            ]
        }

    uvicorn.run(app, port=port, log_level="error")


def set_blas(threads: int) -> None:
    """As the server does."""
    faiss.cvar.distance_compute_blas_threshold = BLAS_FROM * threads


def flat_memory(folder: Path, requests: int) -> tuple[float, float]:
    """Resident MB of a server after a tenth of the requests, and after all; a tenth of the queries are new."""
    with RetrieverSidecar(folder, extra_args=("--cache-mb", "5")) as url:
        pid = pid_of(url)
        sizes = []
        for part in range(10):
            pool = questions(part % 5, 1000)
            some = [pool[n * 7919 % 1000] for n in range(requests // 10)]
            load(url, pid, some)
            sizes.append(psutil.Process(pid).memory_info().rss / 1e6)
        print(
            f"resident MB after each tenth of {requests} requests: {', '.join(f'{size:.0f}' for size in sizes)}"
        )
        return sizes[0], sizes[-1]


def main() -> None:
    """All goals; the last line is the first one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="of the index, which is kept and used again")
    parser.add_argument("--rounds", type=int, default=3, help="0: only the look at memory")
    parser.add_argument("--queries", type=int, default=512, help="a round")
    parser.add_argument(
        "--requests", type=int, default=100_000, help="of the look at memory; 0: none"
    )
    parser.add_argument("--reference", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference:
        reference(Path(options.reference[0]), int(options.reference[1]))
        return
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder, encoder = options.folder or Path(made) / "index", Encoder.of("minilm")
        if options.rounds:
            if not (folder / "index.json").exists():
                spread_index(folder, encoder, options.passages)
            compare(folder, encoder, options.rounds, options.queries)
        if options.requests:
            small = Path(made) / "small"
            spread_index(small, encoder, 2000)
            first, last = flat_memory(small, options.requests)
            print(
                f"memory over {options.requests} requests: {last / first:.3f} x (goal: at most 1.05 x)"
            )
    print(*RESULT)


RESULT: list[str] = []


def compare(folder: Path, encoder: Encoder, rounds: int, count: int) -> None:
    """Rounds of each in turn; the best of each counts."""
    index = faiss.read_index(str(folder / "vectors.faiss"), faiss.IO_FLAG_MMAP_IFC)
    vectors = encoder.encode_queries(questions(0, 128))
    vectors = np.concatenate([vectors] * (count // 128))
    ours: dict[str, list[Load]] = {"faiss": [], "torch": []}
    theirs, alone = list[Load](), list[tuple[float, float]]()
    port = free_port()
    command = [sys.executable, __file__, "--reference", str(folder), str(port)]
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    reference_server = subprocess.Popen(command, env=env)
    try:
        with (
            RetrieverSidecar(folder) as plain,
            RetrieverSidecar(folder, extra_args=("--backend", "torch")) as half,
            RetrieverSidecar(folder, extra_args=("--max-batch", "1", "--cache-mb", "0")) as single,
        ):
            urls = {"faiss": plain, "torch": half}
            pids = {url: pid_of(url) for url in (*urls.values(), single)}
            await_server(f"http://127.0.0.1:{port}")
            for number in range(rounds):
                for name, url in urls.items():
                    before = searches(url)
                    ours[name].append(load(url, pids[url], questions(number, count)))
                    batch = count / (searches(url) - before)
                    print(f"ours, {name}, batches of {batch:.0f}: {ours[name][-1]}")
                    if name == "faiss":
                        set_blas(1)
                        alone.append(raw(index, vectors, round(batch)))
                        rate, cpu_ms = raw(index, vectors, 64)
                        said = f"{alone[-1][0]:.1f} queries/s, {alone[-1][1]:.2f} CPU ms a query"
                        print(
                            f"raw FAISS in those batches: {said}; in batches of 64: {rate:.1f}, {cpu_ms:.2f}"
                        )
                theirs.append(
                    load(
                        f"http://127.0.0.1:{port}", reference_server.pid, questions(number, CALLERS)
                    )
                )
                print(f"as Search-R1: {theirs[-1]}", flush=True)
            asked = questions(0, CALLERS)
            one_by_one = load(single, pids[single], asked, callers=1)
            for name, loads in ours.items():
                same = all(loads[0].answers[query] == one_by_one.answers[query] for query in asked)
                print(f"{name}: {len(asked)} answers are byte-identical batched or not: {same}")
                assert same
    finally:
        reference_server.terminate()
        reference_server.wait()
    summary(ours, theirs, alone)


def summary(
    ours: dict[str, list[Load]], theirs: list[Load], alone: list[tuple[float, float]]
) -> None:
    """Each goal on a line, by the clock and by processor time."""
    best = {name: max(loads, key=lambda one: one.rate) for name, loads in ours.items()}
    their_rate, their_cpu_ms = max(one.rate for one in theirs), min(one.cpu_ms for one in theirs)
    for name, one in best.items():
        tail = min(load.latency_s(0.99) / load.latency_s(0.5) for load in ours[name])
        cpu_ms = min(load.cpu_ms for load in ours[name])
        print(f"{name}: p99 over p50 {tail:.2f} (goal: at most 3)")
        by_cpu = f"{their_cpu_ms / cpu_ms:.1f} x by CPU"
        print(
            f"{name}: {one.rate / their_rate:.1f} x as Search-R1 by the clock (goal: 10), {by_cpu}"
        )
    # the search has a thread, and a core where there are enough: what it spends besides FAISS costs queries a second
    busiest = min(load.threads_s[0] / len(load.latencies_s) for load in ours["faiss"]) * 1000
    raw_cpu = min(cpu for _, cpu in alone)
    print(
        f"CPU ms a query: the search thread {busiest:.2f}, raw FAISS {raw_cpu:.2f}, {raw_cpu / busiest:.2f} of it"
    )
    print(f"load of the machine: {', '.join(f'{one:.1f}' for one in os.getloadavg())}")
    ratio = best["faiss"].rate / max(rate for rate, _ in alone)
    RESULT.append(
        f"name=retrieval_raw ratio={ratio:.2f} goal={GOAL:.2f} reference=faiss-same-batch n={len(alone)}"
    )


def pid_of(url: str) -> int:
    """A server's process."""
    return int(httpx.get(f"{url}/info", trust_env=False).json()["pid"])


def searches(url: str) -> int:
    """Searches that a server has made."""
    return int(httpx.get(f"{url}/info", trust_env=False).json()["counts"]["searches"])


def await_server(url: str) -> None:
    """Until it answers."""
    deadline = time.monotonic() + 600
    while True:
        try:
            httpx.get(url, trust_env=False)
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


if __name__ == "__main__":
    main()
