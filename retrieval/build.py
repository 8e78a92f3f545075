"""Index building: passages are encoded in shards and become a FAISS index."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isqrt
from os.path import relpath
from pathlib import Path

import faiss
import numpy as np

from retrieval.atomic_files import write_atomically, write_json_file
from retrieval.bm25 import BM25Index, bm25_sha256
from retrieval.corpus import Corpus
from retrieval.digests import cached_sha256
from retrieval.encoder import Encoder
from retrieval.index import Index, check_canary, read_vectors
from retrieval.manifest import (
    INDEX_FORMAT,
    MANIFEST,
    TOLERANCE_FLOAT32,
    TOLERANCE_PRODUCT_QUANTISED,
    TOLERANCE_ROUNDED,
    VECTORS,
    Manifest,
    check_equal,
    write_manifest,
)

# Passages that are encoded together. Shards begin at a multiple of it, so that their number does
# not change a vector.
CHUNK_ROWS = 4096
PROGRESS_S = 30.0  # between two lines of progress

MAX_TRAINING_ROWS = 100_000  # passages from which an index learns its cells and codes
MIN_ROWS_PER_CENTROID = 39  # FAISS warns below this number of training vectors per centroid
PQ_DIMENSIONS = 8  # dimensions of a vector that share one code of product quantisation (PQ)


def cells_of(n: int) -> int:
    """Return the number of IVF cells for n passages, so few that each cell can be learned."""
    return max(1, min(4 * isqrt(n), min(n, MAX_TRAINING_ROWS) // MIN_ROWS_PER_CENTROID))


def codes_of(n: int, dim: int) -> tuple[int, int]:
    """Return the number of PQ codes per vector and the bits per code: 8, or fewer for a small n."""
    codes = max(1, dim // PQ_DIMENSIONS)
    while dim % codes:
        codes -= 1
    centroids = min(n, MAX_TRAINING_ROWS) // MIN_ROWS_PER_CENTROID
    return codes, max(1, min(8, centroids.bit_length() - 1))


@dataclass(frozen=True, slots=True)
class IndexType:
    """A kind of index.

    Attributes:
        factory: FAISS factory string for n passages of a dimension.
        tolerance: see `Manifest.tolerance`.
        row_bytes: bytes per passage, for n passages of a dimension.
    """

    factory: Callable[[int, int], str]
    tolerance: float
    row_bytes: Callable[[int, int], float]


def _ivf_bytes(n: int, dim: int) -> float:
    """Return the bytes per passage of row numbers and centroids in an IVF index."""
    return 8 + 4 * dim * cells_of(n) / n


def _pq_factory(n: int, dim: int) -> str:
    codes, bits = codes_of(n, dim)
    # "np": codes are not sorted for a search by Hamming distance, which would take hours and is not
    # used.
    return f"IVF{cells_of(n)},PQ{codes}x{bits}np"


def _pq_bytes(n: int, dim: int) -> float:
    codes, bits = codes_of(n, dim)
    return codes * bits / 8 + _ivf_bytes(n, dim)


# By the name in `retriever.index`.
INDEX_TYPES: dict[str, IndexType] = {
    "flat": IndexType(
        factory=lambda n, dim: "Flat",
        tolerance=TOLERANCE_FLOAT32,
        row_bytes=lambda n, dim: 4 * dim,
    ),
    "sq8": IndexType(
        factory=lambda n, dim: "SQ8",
        tolerance=TOLERANCE_ROUNDED,
        row_bytes=lambda n, dim: dim,
    ),
    "ivf": IndexType(
        factory=lambda n, dim: f"IVF{cells_of(n)},Flat",
        tolerance=TOLERANCE_ROUNDED,
        row_bytes=lambda n, dim: 4 * dim + _ivf_bytes(n, dim),
    ),
    "ivfpq": IndexType(
        factory=_pq_factory,
        tolerance=TOLERANCE_PRODUCT_QUANTISED,
        row_bytes=_pq_bytes,
    ),
    # 64 neighbours per passage in the graph
    "hnsw": IndexType(
        factory=lambda n, dim: "HNSW32",
        tolerance=TOLERANCE_ROUNDED,
        row_bytes=lambda n, dim: 4 * dim + 4 * 64 + 12,
    ),
}


def shard_name(number: int, shards: int) -> str:
    """Return the file name of a shard: its vectors, float32 `[rows, dim]`, without a header."""
    return f"{number:04}-of-{shards:04}.f32"


def shard_rows(total: int, number: int, shards: int) -> range:
    """Return the rows of a shard of `total` passages."""
    chunks = -(-total // CHUNK_ROWS)
    first = chunks * number // shards * CHUNK_ROWS
    end = chunks * (number + 1) // shards * CHUNK_ROWS
    return range(min(total, first), min(total, end))


def encode_shard(
    corpus_path: Path, folder: Path, encoder: Encoder, number: int = 0, shards: int = 1
) -> Path:
    """Encode one shard into `folder`, continuing an earlier attempt; return its file.

    Raises:
        RetrievalError: a line of the corpus is malformed (file:line), or a vector is not finite.
    """
    corpus = Corpus(corpus_path)
    rows = shard_rows(len(corpus), number, shards)
    row_bytes = 4 * encoder.identity.dim
    path = folder / shard_name(number, shards)
    partial = path.with_suffix(".partial")
    inputs_path = path.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)

    # Vectors of an earlier attempt with another encoder or another corpus are deleted.
    inputs = {"encoder": asdict(encoder.identity), "corpus_sha256": cached_sha256(corpus.path)}
    if not inputs_path.exists() or json.loads(inputs_path.read_bytes()) != inputs:
        path.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)
        write_json_file(inputs_path, inputs)
    if path.exists() and path.stat().st_size == len(rows) * row_bytes:
        return path

    with partial.open("ab") as file:
        # An earlier attempt may have ended inside of a chunk.
        encoded_earlier = file.tell() // row_bytes // CHUNK_ROWS * CHUNK_ROWS
        file.truncate(encoded_earlier * row_bytes)
        done = encoded_earlier
        began = time.monotonic()
        reported = began
        for start in range(rows.start + done, rows.stop, CHUNK_ROWS):
            chunk = range(start, min(start + CHUNK_ROWS, rows.stop))
            vectors = encoder.encode_passages([corpus[row].contents for row in chunk])
            file.write(vectors.tobytes())
            file.flush()
            done += len(chunk)
            now = time.monotonic()
            if now - reported > PROGRESS_S or done == len(rows):
                reported = now
                rate = (done - encoded_earlier) / max(now - began, 1e-9)
                remaining_minutes = (len(rows) - done) / max(rate, 1e-9) / 60
                earlier = f" ({encoded_earlier} of an earlier attempt)" if encoded_earlier else ""
                print(
                    f"shard {number} of {shards}: {done} of {len(rows)} passages{earlier}, "
                    f"{rate:.0f} a second, {remaining_minutes:.0f} minutes left",
                    flush=True,
                )
        os.fsync(file.fileno())
    return partial.rename(path)


def build_index(
    passages: Path,
    out: Path,
    encoder: Encoder | None,
    kind: str = "flat",
    *,
    shards: int = 1,
    words: bool = False,
) -> Manifest:
    """Build an index of the corpus `passages` in the folder `out`.

    Shards in `out`/shards are used; missing ones are encoded. The manifest is written last, so that
    the folder of an unfinished build cannot be opened.

    Args:
        encoder: encoder of the passages; None builds an index of words alone.
        kind: a name in INDEX_TYPES.
        words: index the words (BM25) too.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)
    corpus = Corpus(passages)
    if encoder is not None:
        write_vectors(corpus, out, encoder, kind, shards)
    if words or encoder is None:
        BM25Index.build(corpus, out)
    manifest = _make_manifest(
        vectors_path=out / VECTORS,
        corpus=corpus,
        encoder=encoder,
        tolerance=INDEX_TYPES[kind].tolerance,
        lexical_sha256=bm25_sha256(out),
    )
    write_manifest(out, manifest)
    # Several shards were written by other jobs, and Snakemake deletes them.
    if shards == 1:
        shutil.rmtree(out / "shards", ignore_errors=True)
    return manifest


def write_vectors(corpus: Corpus, out: Path, encoder: Encoder, kind: str, shards: int) -> None:
    """Encode the shards that are missing, and write the FAISS index of all."""
    dim = encoder.identity.dim
    total = len(corpus)
    parts: list[np.ndarray] = []
    for number in range(shards):
        path = encode_shard(corpus.path, out / "shards", encoder, number, shards)
        if path.stat().st_size:
            parts.append(np.memmap(path, np.float32, "r").reshape(-1, dim))

    factory = INDEX_TYPES[kind].factory(total, dim)
    index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        index.train(_training_rows(parts, total))
    for part in parts:
        for start in range(0, len(part), CHUNK_ROWS):
            index.add(np.ascontiguousarray(part[start : start + CHUNK_ROWS]))
    with write_atomically(out / VECTORS) as temporary:
        faiss.write_index(index, str(temporary))


def _training_rows(parts: list[np.ndarray], total: int) -> np.ndarray:
    """Return evenly spaced vectors of all parts, at most MAX_TRAINING_ROWS of the `total`."""
    stride = -(-total // MAX_TRAINING_ROWS)
    samples = []
    first_row = 0
    for part in parts:
        samples.append(part[-first_row % stride :: stride])
        first_row += len(part)
    return np.concatenate(samples)


def import_index(vectors_path: Path, corpus_path: Path, encoder: Encoder) -> Manifest:
    """Write the manifest of a published FAISS file, after checking its corpus and encoder.

    Raises:
        RetrievalError: the file is not an inner-product index with readable vectors, or its size,
            its dimension or a few re-encoded passages do not match the corpus and the encoder.
    """
    index = read_vectors(vectors_path)
    corpus = Corpus(corpus_path)
    check_equal(vectors_path, "metric", index.metric_type, faiss.METRIC_INNER_PRODUCT)
    check_equal(vectors_path, "dim", index.d, encoder.identity.dim)
    check_equal(corpus_path, "number of lines", len(corpus), index.ntotal)
    manifest = _make_manifest(vectors_path, corpus, encoder, TOLERANCE_ROUNDED)
    check_canary(Index(manifest, index, corpus), encoder)
    write_manifest(vectors_path.parent, manifest)
    return manifest


def _make_manifest(
    vectors_path: Path,
    corpus: Corpus,
    encoder: Encoder | None,
    tolerance: float,
    lexical_sha256: str = "",
) -> Manifest:
    return Manifest(
        format=INDEX_FORMAT,
        encoder=encoder.identity if encoder else None,
        dim=encoder.identity.dim if encoder else 0,
        ntotal=len(corpus),
        corpus=relpath(corpus.path.resolve(), vectors_path.resolve().parent),
        corpus_sha256=cached_sha256(corpus.path),
        index_sha256=cached_sha256(vectors_path) if encoder else "",
        vectors=vectors_path.name,
        tolerance=tolerance,
        lexical_sha256=lexical_sha256,
    )
