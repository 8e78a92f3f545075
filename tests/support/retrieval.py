"""Helpers of retrieval tests: a scripted server, one search, an index over given vectors."""

import asyncio
import socket
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
from retrieval.index import Index
from retrieval.manifest import read_manifest

ONE_HIT = b'{"result": [[{"document": {"id": "0", "contents": "x"}, "score": 0.5}]]}'

# 100 sentences, many of which are similar
SENTENCES = [
    f'"{noun} {city}"\nThe {noun} of {city} is {adjective}.'
    for noun in ("mayor", "river", "bridge", "baker", "tower")
    for city in ("Amber", "Iron", "Silver", "Old")
    for adjective in ("tall", "wise", "long", "new", "grey")
]


@contextmanager
def scripted_server(*replies: tuple[int, bytes]) -> Iterator[str]:
    """Run a server that gives these replies to POST requests in turn, and repeats the last one.

    Its answer to GET requests, such as /health, is 404.
    """
    remaining = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            self._reply(status, body)

        def do_GET(self) -> None:
            self._reply(404, b"")

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
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


def unused_url() -> str:
    """Return the URL of a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def search_once(
    *urls: str, query: str = "q", k: int = 1, **options: Any
) -> tuple[list[Passage], RetrievalClient]:
    """Search with a new client; return the passages and the client."""

    async def run() -> tuple[list[Passage], RetrievalClient]:
        async with RetrievalClient(*urls, **options) as client:
            return await client.search(query, k), client

    return asyncio.run(run())


def index_over(tmp_path: Path, index_dir: Path, rows: Any) -> Index:
    """Return a flat index over the vectors `rows`, with the manifest of `index_dir` otherwise."""
    vectors = np.array(rows, dtype=np.float32)
    path = tmp_path / "c.jsonl"
    write_corpus(path, [Passage(str(row), f"row {row}") for row in range(len(vectors))])
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    manifest = replace(read_manifest(index_dir), dim=vectors.shape[1], ntotal=len(vectors))
    return Index(manifest, flat, Corpus(path))


def unit_vectors(rows: int, dim: int, seed: int = 0) -> np.ndarray:
    """Return random unit vectors, float32 `[rows, dim]`."""
    vectors = np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def flip_a_byte(path: Path) -> None:
    """Change one bit near the end of a file."""
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
