"""A scripted retrieval server, one search, an index over given vectors, and a damaged file."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from retrieval.client import RetrievalClient
from retrieval.corpus import Corpus, Passage, write_corpus
from retrieval.index import Index, read_manifest

ONE_HIT = b'{"result": [[{"document": {"id": "0", "contents": "x"}, "score": 0.5}]]}'


@contextmanager
def scripted(*replies: tuple[int, bytes], headers: dict[str, str] | None = None) -> Iterator[str]:
    """A server that gives these replies in turn, then the last one for ever."""
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def search(
    url: str,
    query: str = "q",
    k: int = 1,
    where: dict[str, str | list[str]] | None = None,
    **options: Any,
) -> tuple[list[Passage], RetrievalClient]:
    async def body() -> tuple[list[Passage], RetrievalClient]:
        async with RetrievalClient(url, **options) as client:
            return await client.search(query, k, where), client

    return asyncio.run(body())


def by_hand(tmp_path: Path, index_dir: Path, rows: list[list[float]]) -> Index:
    """An index over the given vectors."""
    write_corpus(
        tmp_path / "c.jsonl", [Passage(str(row), f"row {row}") for row in range(len(rows))]
    )
    vectors = faiss.IndexFlatIP(len(rows[0]))
    vectors.add(np.array(rows, dtype=np.float32))
    manifest = replace(read_manifest(index_dir), dim=len(rows[0]), ntotal=len(rows))
    return Index(manifest, vectors, Corpus(tmp_path / "c.jsonl"))


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


CLOUD = [
    f'"{name} {place}"\nThe {name} of {place} is {what}.'
    for name in ("mayor", "river", "bridge", "baker", "tower")
    for place in ("Amber", "Iron", "Silver", "Old")
    for what in ("tall", "wise", "long", "new", "grey")
]
