"""Recall, CPU time and memory of every kind of index on generated passages (docs/retrieval.md).

    python benchmarks/retrieval_curves.py [--sizes 10000 100000] [--kinds flat sq8 ... bm25 hybrid]

The figures of a kind are written to a file beside the picture as soon as they are measured. So several
calls, one after the other or at the same time, can measure the kinds of one picture.

A passage has 24 words: half are drawn from the words of one of 2000 subjects, and half by Zipf's law.
Its vector is the normalised mean of MiniLM's word embeddings. A query has 5 words of a passage and one
random word. Everything runs on one thread. Times are CPU times, the best of three, so that other load
of the machine matters little.

`recall` compares with an exact search by vectors. `own` is the share of queries that find the passage
from which their words are.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bm25s
import faiss
import matplotlib
import numpy as np
import psutil
import torch

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from retrieval.bm25 import BM25_FOLDER, BM25Index
from retrieval.build import INDEX_TYPES, MAX_TRAINING_ROWS
from retrieval.encoder import Encoder
from retrieval.index import HNSW_BREADTH, IVF_CELLS, Index
from retrieval.manifest import INDEX_FORMAT, Manifest
from retrieval.searcher import FUSED_ROWS, fuse_rankings

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "retrieval_curves.png"
WORDS_PER_PASSAGE = 24
SUBJECTS = 2000
WORDS_PER_SUBJECT = 8
QUERIES = 256
K = 10
BATCH = 64
BLOCK_ROWS = 50_000
BLAS_THRESHOLD = 800  # queries times dimensions, as in retrieval/server.py
BREADTHS = (8, 16, 32, 64, 128, 256)  # cells that IVF searches, and candidates that HNSW keeps
KINDS = (*INDEX_TYPES, "bm25", "hybrid")

# Vectors and words of queries -> rows `[Q, K]`
Search = Callable[[np.ndarray, np.ndarray], np.ndarray]


def draw_words(random: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    """Return word ids of `count` passages, `[count, WORDS_PER_PASSAGE]`."""
    half = WORDS_PER_PASSAGE // 2
    subjects = np.random.default_rng(1).integers(0, vocabulary, (SUBJECTS, WORDS_PER_SUBJECT))
    subject = subjects[random.integers(0, SUBJECTS, count)]
    chosen = random.integers(0, WORDS_PER_SUBJECT, (count, half))
    of_subject = np.take_along_axis(subject, chosen, axis=1)
    return np.concatenate([of_subject, random.zipf(1.2, (count, half)) % vocabulary], axis=1)


def mean_vectors(ids: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    """Return the normalised mean embedding of each row of word ids, `[N, dim]`."""
    parts = np.array_split(ids, 1 + len(ids) // 2000)
    vectors = np.concatenate([embeddings[part].mean(1) for part in parts])
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


class Data:
    """Generated passages and queries.

    Attributes:
        vectors: vectors of the passages, `[N, dim]`.
        words: words of the passages, `[N, WORDS_PER_PASSAGE]`.
        query_vectors: `[QUERIES, dim]`.
        query_words: `[QUERIES, 6]`.
        sources: row of the passage whose words each query has.
        nearest: rows of an exact search, `[QUERIES, K]`.
    """

    def __init__(self, total: int, embeddings: np.ndarray) -> None:
        random = np.random.default_rng(0)
        self.vectors = np.empty((total, embeddings.shape[1]), np.float32)
        self.words = np.empty((total, WORDS_PER_PASSAGE), np.int32)
        for start in range(0, total, BLOCK_ROWS):
            ids = draw_words(random, min(BLOCK_ROWS, total - start), len(embeddings))
            self.vectors[start : start + len(ids)] = mean_vectors(ids, embeddings)
            self.words[start : start + len(ids)] = ids
            if start == 0:
                # More are drawn than used, so that the data stay those of earlier measurements.
                self.sources = random.choice(len(ids), 512)[:QUERIES]
        source_words = np.stack([random.permutation(row)[:5] for row in self.words[self.sources]])
        other_word = random.integers(0, len(embeddings), (QUERIES, 1))
        self.query_words = np.concatenate([source_words, other_word], axis=1)
        self.query_vectors = mean_vectors(self.query_words, embeddings)
        metric = faiss.METRIC_INNER_PRODUCT
        _, self.nearest = faiss.knn(self.query_vectors, self.vectors, K, metric=metric)


def time_search(
    search: Search, vectors: np.ndarray, words: np.ndarray, batch: int
) -> tuple[float, np.ndarray]:
    """Return CPU milliseconds per query, the best of three, and the rows that were found."""
    best = np.inf
    rows: list[np.ndarray] = []
    for _ in range(3):
        rows = []
        began = time.process_time()
        for start in range(0, len(vectors), batch):
            end = start + batch
            rows.append(search(vectors[start:end], words[start:end]))
        best = min(best, 1000 * (time.process_time() - began) / len(vectors))
    return best, np.concatenate(rows)


def set_breadths(index: Any) -> Iterator[int]:
    """Set each breadth of a search, and yield it; yield 0 for an index without breadth."""
    if not isinstance(index, faiss.IndexIVF | faiss.IndexHNSW):
        yield 0
        return
    for breadth in BREADTHS:
        if isinstance(index, faiss.IndexIVF):
            index.nprobe = min(breadth, index.nlist)
        else:
            index.hnsw.efSearch = breadth
        yield breadth


def build(kind: str, data: Data) -> tuple[Any, Search, float]:
    """Build an index of a kind; return it, its search, and its size in bytes.

    FAISS alone searches an index of vectors; `bm25` and `hybrid` are searched as in the server.
    """
    if kind == "bm25":
        return build_bm25(data, K)
    if kind == "hybrid":
        return build_hybrid(data)
    return build_vectors(kind, data)


def build_vectors(kind: str, data: Data) -> tuple[Any, Search, float]:
    """Build an index of vectors, as `build` does."""
    total, dim = data.vectors.shape
    factory = INDEX_TYPES[kind].factory(total, dim)
    index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        stride = -(-total // MAX_TRAINING_ROWS)
        index.train(np.ascontiguousarray(data.vectors[::stride]))
    index.add(data.vectors)
    sizes: list[int] = []
    writer = faiss.PyCallbackIOWriter(lambda part: sizes.append(len(part)))  # type: ignore[attr-defined]
    faiss.write_index(index, writer)
    return index, lambda vectors, _: index.search(vectors, K)[1], sum(sizes)


def build_hybrid(data: Data) -> tuple[Any, Search, float]:
    """Build a flat index and a BM25 index, whose rankings are fused; return as `build` does."""
    total, dim = data.vectors.shape
    flat = faiss.IndexFlatIP(dim)
    flat.add(data.vectors)
    manifest = Manifest(
        format=INDEX_FORMAT,
        encoder=None,
        dim=dim,
        ntotal=total,
        corpus="",
        corpus_sha256="",
        index_sha256="",
    )
    exact = Index(manifest, flat, None)
    _, search_words, words_bytes = build_bm25(data, FUSED_ROWS)

    def search_both(vectors: np.ndarray, words: np.ndarray) -> np.ndarray:
        dense_rows, _ = exact.search(vectors, FUSED_ROWS)
        rankings = zip(dense_rows, search_words(vectors, words), strict=True)
        return np.stack([fuse_rankings(*ranking)[0][:K] for ranking in rankings])

    return exact, search_both, words_bytes + data.vectors.nbytes


def build_bm25(data: Data, k: int) -> tuple[Any, Search, float]:
    """Build the retriever's BM25 index, which returns k rows of a search; return as `build` does.

    Numbers stand for words.
    """
    bm25 = bm25s.BM25()
    names = np.array([str(word) for word in range(data.words.max() + 1)], dtype=object)
    bm25.index(names[data.words].tolist(), show_progress=False)
    with tempfile.TemporaryDirectory() as folder:
        bm25.save(str(Path(folder, BM25_FOLDER)), show_progress=False)
        size = sum(path.stat().st_size for path in Path(folder, BM25_FOLDER).iterdir())
        del bm25
        index = BM25Index(Path(folder))  # mapped, so it outlives the folder

    def search(_: np.ndarray, words: np.ndarray) -> np.ndarray:
        return np.stack([index.search(" ".join(map(str, row)), k)[0] for row in words])

    return index, search, size


def measure(kind: str, data: Data) -> Iterator[dict[str, Any]]:
    """Yield a row of figures for each breadth of a kind of index."""
    total, dim = data.vectors.shape
    library: Any = faiss
    default_threshold = library.cvar.distance_compute_blas_threshold
    began = time.process_time()
    index, search, size = build(kind, data)
    build_s = time.process_time() - began
    planned = INDEX_TYPES[kind].row_bytes(total, dim) if kind in INDEX_TYPES else 0.0
    for breadth in set_breadths(index):
        library.cvar.distance_compute_blas_threshold = BLAS_THRESHOLD
        batch_ms, rows = time_search(search, data.query_vectors, data.query_words, BATCH)
        one_ms, _ = time_search(search, data.query_vectors[:32], data.query_words[:32], 1)
        library.cvar.distance_compute_blas_threshold = default_threshold
        hits = [len(set(a) & set(b)) for a, b in zip(rows, data.nearest, strict=True)]
        yield {
            "kind": kind,
            "passages": total,
            "breadth": breadth,
            "recall": round(sum(hits) / len(hits) / K, 4),
            "own": round(float((rows == data.sources[:, None]).any(1).mean()), 4),
            "batch_ms": round(batch_ms, 4),
            "one_ms": round(one_ms, 4),
            "build_s": round(build_s, 2),
            "bytes": round(size / total, 1),
            "planned_bytes": round(planned, 1),
        }


def is_default(row: dict[str, Any]) -> bool:
    """Return True if the row's breadth is that of the server."""
    server_breadth = HNSW_BREADTH if row["kind"] == "hnsw" else IVF_CELLS
    return row["breadth"] in (0, server_breadth)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw recall over time at the largest number of passages; time and index size over that number."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (recall, times, memory) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    largest = max(row["passages"] for row in rows)
    for kind in KINDS:
        of_kind = [row for row in rows if row["kind"] == kind]
        at_largest = [row for row in of_kind if row["passages"] == largest]
        defaults = [row for row in of_kind if is_default(row)]
        sizes = [row["passages"] for row in defaults]
        recall.plot(
            [row["batch_ms"] for row in at_largest],
            [row["recall"] for row in at_largest],
            "o-",
            label=kind,
        )
        times.plot(sizes, [row["batch_ms"] for row in defaults], "o-", label=kind)
        megabytes = [row["bytes"] * row["passages"] / 1e6 for row in defaults]
        memory.plot(sizes, megabytes, "o-", label=kind)

    recall.set(xscale="log", xlabel="CPU ms per query", ylabel=f"recall@{K}")
    recall.set(title=f"{largest:,} passages")
    times.set(xscale="log", yscale="log", xlabel="passages", ylabel="CPU ms per query")
    times.set(title="with the server's breadth")
    memory.set(xscale="log", yscale="log", xlabel="passages", ylabel="MB of the index")
    memory.set(title="memory")
    for axes in (recall, times, memory):
        axes.grid(alpha=0.3)
    figure.legend(*recall.get_legend_handles_labels(), loc="outside right center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of earlier measurements."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Measure the indexes, draw the figure, and print a result line.

    The result is the flat index's time per passage at the largest size over that at the next smaller
    size.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = [10_000, 100_000]
    parser.add_argument("--sizes", type=int, nargs="*", default=sizes, help="none: only draw")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    embeddings = Encoder.of("minilm").word_embeddings()
    measured = options.out.with_suffix(".jsonl")
    for total in options.sizes:
        data = Data(total, embeddings)
        for kind in options.kinds:
            new = list(measure(kind, data))
            rows = [
                row
                for row in read_rows(measured)
                if (row["kind"], row["passages"]) != (kind, total)
            ]
            rows += new
            rows.sort(key=lambda row: (KINDS.index(row["kind"]), row["passages"], row["breadth"]))
            measured.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            resident = f"{psutil.Process().memory_info().rss / 1e9:.1f} GB resident"
            print(*map(json.dumps, new), resident, sep="\n", flush=True)

    rows = read_rows(measured)
    draw(rows, options.out)
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    flat = [row["batch_ms"] / row["passages"] for row in rows if row["kind"] == "flat"]
    growth = flat[-1] / flat[-2] if len(flat) > 1 else 1.0
    print_result(
        "retrieval_curves",
        growth,
        goal=1.0,
        at_most=True,
        reference="flat-ms-a-passage-one-size-below",
        repeats=3,
    )


if __name__ == "__main__":
    main()
