"""Queries per second of the retrieval server with dynamic batching, against the same server searching one at a time."""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout, installed or not

from mcore_mas.retrieval.build import build_index
from mcore_mas.retrieval.client import Passage
from mcore_mas.retrieval.corpus import write_corpus
from mcore_mas.retrieval.encoder import Encoder
from mcore_mas.retrieval.sidecar import RetrieverSidecar

PASSAGES, CALLERS, QUERIES, REPEATS, GOAL = 600, 64, 192, 3, 3.0


def build(folder: Path) -> Path:
    """An index of short passages under `folder`."""
    write_corpus(
        folder / "corpus.jsonl",
        (Passage.compose(str(n), f"Town {n}", f"Town {n} lies on the river {n % 17}.") for n in range(PASSAGES)),
    )
    start = time.perf_counter()
    build_index(folder / "corpus.jsonl", folder / "index", Encoder.minilm())
    print(f"index: {PASSAGES / (time.perf_counter() - start):.0f} passages/s")
    return folder / "index"


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, query: str) -> object:
    """The server's result for one query, over a connection that stays open."""
    body = json.dumps({"queries": [query], "topk": 3, "return_scores": True}).encode()
    head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    reply = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert reply.startswith("http/1.1 200"), reply
    length = int(reply.partition("content-length:")[2].split()[0])
    return json.loads(await reader.readexactly(length))["result"]


async def queries_per_second(url: str, repeat: int) -> tuple[float, list[object]]:
    """CALLERS concurrent callers, one query a request, each query new to the server's cache; and the answers.

    Plain sockets, because a full HTTP client costs more per request than the search it waits for.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    queries = iter([f"town {n} mayor in year {repeat}" for n in range(QUERIES)])
    answers: dict[str, object] = {}

    async def caller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for query in queries:
            answers[query] = await post(reader, writer, query)
        writer.close()

    connections = [await asyncio.open_connection(host, int(port)) for _ in range(CALLERS)]
    start = time.perf_counter()
    await asyncio.gather(*(caller(*connection) for connection in connections))
    return QUERIES / (time.perf_counter() - start), [answers[query] for query in sorted(answers)]


def main() -> None:
    """Runs both servers side by side, alternating, and compares medians and answers."""
    torch.set_num_threads(1)  # as in the servers
    rates: dict[str, list[float]] = {"batched": [], "alone": []}
    with tempfile.TemporaryDirectory() as folder:
        index = build(Path(folder))
        with RetrieverSidecar(index) as batched, RetrieverSidecar(index, extra_args=("--max-batch", "1")) as alone:
            for repeat in range(REPEATS):
                answers = []
                for name, url in (("batched", batched), ("alone", alone)):
                    rate, found = asyncio.run(queries_per_second(url, repeat))
                    rates[name].append(rate)
                    answers.append(found)
                assert answers[0] == answers[1], "batching changed an answer"
    for name, values in rates.items():
        print(f"{name}: {', '.join(f'{value:.0f}' for value in values)} queries/s")
    ratio = statistics.median(rates["batched"]) / statistics.median(rates["alone"])
    print(f"name=retrieval_batching ratio={ratio:.2f} goal={GOAL:.2f} reference=same-server-max-batch-1 n={REPEATS}")


if __name__ == "__main__":
    main()
