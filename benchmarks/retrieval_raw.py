"""Throughput of the retrieval server against FAISS alone and a server like Search-R1's.

    python benchmarks/retrieval_raw.py [--passages 1000000] [--rounds 3] [--requests 100000]

All of them search one flat index with MiniLM's vectors. Our server has one thread for encoding and
one for searching; the reference has two. FAISS uses BLAS in all of them. Clock times need a quiet
machine; CPU times are beside them.
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
from typing import Any

import faiss
import httpx
import numpy as np
import psutil
import torch

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from benchmarks.support.vectors import spread_index
from retrieval.encoder import Encoder
from retrieval.index import Index
from retrieval.sidecar import RetrieverSidecar
from rollout.base.network import free_port

CALLERS = 64
K = 3
BLAS_THRESHOLD = 800  # queries times dimensions, as in retrieval/server.py
GOAL = 0.90  # share of the throughput of FAISS alone


@dataclass
class Load:
    """Measurements of one round of requests."""

    wall_s: float
    cpu_s: float  # of the server process
    threads_s: list[float]  # CPU time of its threads, the busiest first
    latencies_s: list[float]
    answers: dict[str, bytes] = field(repr=False)

    @property
    def rate(self) -> float:
        """Queries per second."""
        return len(self.latencies_s) / self.wall_s

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds of the server per query."""
        return 1000 * self.cpu_s / len(self.latencies_s)

    def latency_s(self, quantile: float) -> float:
        """Return a quantile of the latencies."""
        return sorted(self.latencies_s)[int(quantile * (len(self.latencies_s) - 1))]

    def __str__(self) -> str:
        p50 = self.latency_s(0.5)
        p99 = self.latency_s(0.99)
        return (
            f"{self.rate:.1f} queries/s, p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms "
            f"({p99 / p50:.2f} x), {self.cpu_ms:.2f} CPU ms per query"
        )


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, query: str) -> bytes:
    """Send one query over an open connection, and return the body of the answer."""
    body = json.dumps({"queries": [query], "topk": K, "return_scores": True}).encode()
    head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    reply = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert reply.startswith("http/1.1 200"), reply
    length = int(reply.partition("content-length:")[2].split()[0])
    return await reader.readexactly(length)


def send_queries(url: str, pid: int, queries: list[str], callers: int = CALLERS) -> Load:
    """Send each query in a separate request, from concurrent callers.

    Callers use plain sockets, because a full HTTP client costs more CPU than the server.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    remaining = iter(queries)
    latencies_s: list[float] = []
    answers: dict[str, bytes] = {}

    async def call() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for query in remaining:
            began = time.perf_counter()
            answers[query] = await post(reader, writer, query)
            latencies_s.append(time.perf_counter() - began)
        writer.close()

    async def call_all() -> None:
        await asyncio.gather(*(call() for _ in range(callers)))

    server = psutil.Process(pid)
    before = server.cpu_times()
    threads_before = {
        thread.id: thread.user_time + thread.system_time for thread in server.threads()
    }
    began = time.perf_counter()
    asyncio.run(call_all())
    wall_s = time.perf_counter() - began
    after = server.cpu_times()
    threads_s = [
        thread.user_time + thread.system_time - threads_before.get(thread.id, 0.0)
        for thread in server.threads()
    ]
    cpu_s = after.user + after.system - before.user - before.system
    return Load(
        wall_s=wall_s,
        cpu_s=cpu_s,
        threads_s=sorted(threads_s, reverse=True),
        latencies_s=latencies_s,
        answers=answers,
    )


def make_queries(number: int, count: int) -> list[str]:
    """Return the queries of a round, which differ from those of other rounds, so no cache has them."""
    return [
        f"who is mayor of town {n} on the river {n % 17} in year {number}" for n in range(count)
    ]


def search_alone(index: faiss.Index, vectors: np.ndarray, batch: int) -> tuple[float, float]:
    """Return queries per second and CPU milliseconds per query of FAISS alone, in batches."""
    began = time.perf_counter()
    cpu_began = time.process_time()
    for start in range(0, len(vectors), batch):
        index.search(vectors[start : start + batch], K)
    rate = len(vectors) / (time.perf_counter() - began)
    return rate, 1000 * (time.process_time() - cpu_began) / len(vectors)


def use_blas(threads: int) -> None:
    """Make FAISS use BLAS for small batches, as the server does."""
    library: Any = faiss
    library.cvar.distance_compute_blas_threshold = BLAS_THRESHOLD * threads


def serve_reference(folder: Path, port: int) -> None:
    """Serve like Search-R1: each request is encoded and searched by itself, one at a time."""
    import uvicorn
    from fastapi import FastAPI

    faiss.omp_set_num_threads(2)
    torch.set_num_threads(2)
    use_blas(2)
    encoder = Encoder.of("minilm")
    corpus = Index.open(folder).corpus
    index = faiss.read_index(str(folder / "vectors.faiss"))
    turn = threading.Lock()
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: dict[str, Any]) -> dict[str, Any]:
        with turn:
            vectors = encoder.encode_passages(request["queries"])
            all_scores, all_rows = index.search(vectors, request["topk"])
        result = []
        for rows, scores in zip(all_rows, all_scores, strict=True):
            passages = [corpus[int(row)] for row in rows]
            result.append(
                [
                    {
                        "document": {"id": passage.id, "contents": passage.contents},
                        "score": float(score),
                    }
                    for passage, score in zip(passages, scores, strict=True)
                ]
            )
        return {"result": result}

    uvicorn.run(app, port=port, log_level="error")


def measure_memory(folder: Path, requests: int) -> tuple[float, float]:
    """Return resident MB of a server after a tenth of the requests, and after all of them."""
    sizes = []
    with RetrieverSidecar(folder, extra_args=("--cache-mb", "5")) as url:
        pid = server_pid(url)
        for part in range(10):
            queries = make_queries(part % 5, 1000)  # half of the parts repeat queries
            send_queries(url, pid, [queries[n * 7919 % 1000] for n in range(requests // 10)])
            sizes.append(psutil.Process(pid).memory_info().rss / 1e6)
    shown = ", ".join(f"{size:.0f}" for size in sizes)
    print(f"resident MB after each tenth of {requests} requests: {shown}")
    return sizes[0], sizes[-1]


def compare(folder: Path, encoder: Encoder, rounds: int, count: int) -> float:
    """Measure the server, FAISS alone and the reference in turn.

    Returns:
        The server's throughput over that of FAISS alone.
    """
    index = faiss.read_index(str(folder / "vectors.faiss"), faiss.IO_FLAG_MMAP_IFC)
    vectors = np.tile(encoder.encode_queries(make_queries(0, 128)), (count // 128, 1))
    ours: list[Load] = []
    references: list[Load] = []
    alone: list[tuple[float, float]] = []
    port = free_port()
    command = [sys.executable, __file__, "--reference", str(folder), str(port)]
    reference = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "2"})
    single_args = ("--max-batch", "1", "--cache-mb", "0")
    try:
        with (
            RetrieverSidecar(folder) as url,
            RetrieverSidecar(folder, extra_args=single_args) as single_url,
        ):
            pid = server_pid(url)
            reference_url = f"http://127.0.0.1:{port}"
            wait_for(reference_url)
            for number in range(rounds):
                searches_before = count_searches(url)
                ours.append(send_queries(url, pid, make_queries(number, count)))
                batch = round(count / (count_searches(url) - searches_before))
                print(f"ours, batches of {batch}: {ours[-1]}")
                use_blas(1)
                alone.append(search_alone(index, vectors, batch))
                rate, cpu_ms = alone[-1]
                print(f"FAISS alone, same batches: {rate:.1f} queries/s, {cpu_ms:.2f} CPU ms")
                queries = make_queries(number, CALLERS)
                references.append(send_queries(reference_url, reference.pid, queries))
                print(f"like Search-R1: {references[-1]}", flush=True)

            queries = make_queries(0, CALLERS)
            one_by_one = send_queries(single_url, server_pid(single_url), queries, callers=1)
            assert all(ours[0].answers[query] == one_by_one.answers[query] for query in queries)
            print(f"{len(queries)} answers are byte-identical batched and alone")
    finally:
        reference.terminate()
        reference.wait()
    return summarise(ours, references, alone)


def summarise(ours: list[Load], references: list[Load], alone: list[tuple[float, float]]) -> float:
    """Print each goal, and return our best throughput over that of FAISS alone."""
    best = max(ours, key=lambda load: load.rate)
    tail = min(load.latency_s(0.99) / load.latency_s(0.5) for load in ours)
    print(f"p99 over p50 {tail:.2f} (goal: at most 3)")
    reference_rate = max(load.rate for load in references)
    reference_cpu_ms = min(load.cpu_ms for load in references)
    cpu_ms = min(load.cpu_ms for load in ours)
    print(
        f"{best.rate / reference_rate:.1f} times a server like Search-R1's (goal: 10), "
        f"{reference_cpu_ms / cpu_ms:.1f} times by CPU"
    )
    # The search thread limits the throughput if there is a core for each thread.
    search_ms = min(1000 * load.threads_s[0] / len(load.latencies_s) for load in ours)
    alone_ms = min(cpu_ms for _, cpu_ms in alone)
    print(
        f"CPU ms per query: the search thread {search_ms:.2f}, FAISS alone {alone_ms:.2f}, "
        f"{alone_ms / search_ms:.2f} of it"
    )
    print(f"load of the machine: {', '.join(f'{value:.1f}' for value in os.getloadavg())}")
    return best.rate / max(rate for rate, _ in alone)


def server_pid(url: str) -> int:
    """Return the process id of a server."""
    return int(httpx.get(f"{url}/info", trust_env=False).json()["pid"])


def count_searches(url: str) -> int:
    """Return the number of searches that a server has made."""
    return int(httpx.get(f"{url}/info", trust_env=False).json()["counts"]["searches"])


def wait_for(url: str) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + 600
    while True:
        try:
            httpx.get(url, trust_env=False)
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def main() -> None:
    """Measure throughput and memory; the result line has the throughput over that of FAISS alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="of the index, which is kept for the next call")
    parser.add_argument("--rounds", type=int, default=3, help="0: measure only memory")
    parser.add_argument("--queries", type=int, default=512, help="per round")
    parser.add_argument("--requests", type=int, default=100_000, help="for memory; 0: none")
    parser.add_argument("--reference", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference:
        serve_reference(Path(options.reference[0]), int(options.reference[1]))
        return
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    ratio = None
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "index"
        encoder = Encoder.of("minilm")
        if options.rounds:
            if not (folder / "index.json").exists():
                spread_index(folder, encoder, options.passages)
            ratio = compare(folder, encoder, options.rounds, options.queries)
        if options.requests:
            small = Path(temporary) / "small"
            spread_index(small, encoder, 2000)
            first, last = measure_memory(small, options.requests)
            print(
                f"memory over {options.requests} requests: {last / first:.3f} x (goal: at most 1.05)"
            )
    if ratio is not None:
        print_result(
            "retrieval_raw", ratio, goal=GOAL, reference="faiss-same-batch", repeats=options.rounds
        )


if __name__ == "__main__":
    main()
