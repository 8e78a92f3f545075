"""Recall, processor time and memory of every kind of index on generated passages; the figure of docs/retrieval.md.

    python benchmarks/retrieval_curves.py [--sizes 10000 100000 1000000] [--kinds flat torch sq8 ... bm25 hybrid]

Each kind is written beside the figure as soon as it is measured, so several calls, also at once, add up to one figure.

A passage is 24 words, half of them of one of 2000 subjects and half by Zipf's law; its vector is the mean
of MiniLM's word embeddings, of length 1. A query is 5 of its words and another one. One thread; the times are
processor time, best of three, so another load of the machine matters little.

Recall is of what an exact search by vectors finds; `own` is the share of queries that find the passage they are
made of.
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

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from retrieval.build import INDEX_TYPES, TRAINED_ON
from retrieval.encoder import Encoder
from retrieval.index import BREADTH, INDEX_FORMAT, PROBED, Index, Manifest
from retrieval.lexical import DEPTH, Lexical, fused
from retrieval.scan import TorchScan

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "retrieval_curves.png"
WORDS, SUBJECTS, RARE, QUERIES, K, BATCH, BLOCK = 24, 2000, 8, 256, 10, 64, 50_000
BLAS_FROM = 800  # queries * dimensions, as the server searches
BREADTHS = (8, 16, 32, 64, 128, 256)  # cells that IVF looks into, and candidates that HNSW keeps
KINDS = (*INDEX_TYPES, "torch", "bm25", "hybrid")
Search = Callable[
    [np.ndarray, np.ndarray], np.ndarray
]  # vectors and words of queries -> rows `[Q, K]`


def words(random: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    """`[count, WORDS]` ids of words."""
    subjects = np.random.default_rng(1).integers(0, vocabulary, (SUBJECTS, RARE))
    own = subjects[random.integers(0, SUBJECTS, count)]
    half = np.take_along_axis(own, random.integers(0, RARE, (count, WORDS // 2)), axis=1)
    return np.concatenate([half, random.zipf(1.2, (count, WORDS // 2)) % vocabulary], axis=1)


def vectors(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """`[N, dim]` of length 1."""
    made = np.concatenate(
        [table[part].mean(1) for part in np.array_split(ids, 1 + len(ids) // 2000)]
    )
    return made / np.linalg.norm(made, axis=1, keepdims=True)


class Passages:
    """Vectors `[N, dim]` and words `[N, WORDS]` of passages; of queries, and `own`, the rows they are made of."""

    def __init__(self, total: int, table: np.ndarray) -> None:
        random = np.random.default_rng(0)
        self.rows, self.words = (
            np.empty((total, table.shape[1]), np.float32),
            np.empty((total, WORDS), np.int32),
        )
        for first in range(0, total, BLOCK):
            ids = words(random, min(BLOCK, total - first), len(table))
            self.rows[first : first + len(ids)] = vectors(ids, table)
            self.words[first : first + len(ids)] = ids
            self.own = self.own if first else random.choice(len(ids), 512)[:QUERIES]
        kept = np.stack([random.permutation(row)[:5] for row in self.words[self.own]])
        self.asked = np.concatenate([kept, random.integers(0, len(table), (QUERIES, 1))], axis=1)
        self.queries = vectors(self.asked, table)
        self.right = faiss.knn(self.queries, self.rows, K, metric=faiss.METRIC_INNER_PRODUCT)[1]


def spent(
    search: Search, vectors: np.ndarray, asked: np.ndarray, batch: int
) -> tuple[float, np.ndarray]:
    """Processor milliseconds a query, the best of three, and what was found."""
    best, found = np.inf, []
    for _ in range(3):
        began, found = time.process_time(), []
        for first in range(0, len(vectors), batch):
            found.append(search(vectors[first : first + batch], asked[first : first + batch]))
        best = min(best, 1000 * (time.process_time() - began) / len(vectors))
    return best, np.concatenate(found)


def settings(index: Any) -> Iterator[int]:
    """Sets and gives each breadth of a search; 0 where there is none."""
    for breadth in BREADTHS:
        if isinstance(index, faiss.IndexIVF):
            index.nprobe = min(breadth, index.nlist)
        elif isinstance(index, faiss.IndexHNSW):
            index.hnsw.efSearch = breadth
        else:
            yield 0
            return
        yield breadth


def built(kind: str, made: Passages) -> tuple[Any, Search, float]:
    """An index, a search of it, and its bytes; vectors alone are asked of FAISS, and exact ones scored again by us."""
    total, dim = made.rows.shape
    if kind == "bm25":
        return lexical(made)
    if kind in INDEX_TYPES:
        index = faiss.index_factory(
            dim, INDEX_TYPES[kind].factory(total, dim), faiss.METRIC_INNER_PRODUCT
        )
        if not index.is_trained:
            index.train(np.ascontiguousarray(made.rows[:: -(-total // TRAINED_ON)]))
        index.add(made.rows)
        sizes = list[int]()
        writer = faiss.PyCallbackIOWriter(lambda part: sizes.append(len(part)))  # type: ignore[attr-defined]
        faiss.write_index(index, writer)
        return index, lambda vectors, _: index.search(vectors, K)[1], sum(sizes)
    flat = faiss.IndexFlatIP(dim)
    flat.add(made.rows)
    about = {"encoder": None, "corpus": "", "corpus_sha256": "", "index_sha256": ""}
    manifest = Manifest(format=INDEX_FORMAT, dim=dim, ntotal=total, **about)
    if kind == "torch":
        scanned = Index(manifest, flat, None, scan=TorchScan(made.rows, "cpu"))
        return scanned, lambda vectors, _: scanned.search(vectors, K)[0], made.rows.nbytes * 1.5
    exact = Index(manifest, flat, None)
    _, by_words, size = lexical(made, DEPTH)

    def both(vectors: np.ndarray, asked: np.ndarray) -> np.ndarray:
        rankings = zip(exact.search(vectors, DEPTH)[0], by_words(vectors, asked), strict=True)
        return np.stack([fused(*ranking)[0][:K] for ranking in rankings])

    return exact, both, size + made.rows.nbytes


def lexical(made: Passages, k: int = K) -> tuple[Any, Search, float]:
    """The product's search by words, over numbers as words."""
    index = bm25s.BM25()
    names = np.array([str(word) for word in range(made.words.max() + 1)], dtype=object)
    index.index(names[made.words].tolist(), show_progress=False)
    with tempfile.TemporaryDirectory() as folder:
        index.save(folder, show_progress=False)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        del index
        opened = Lexical(Path(folder))  # mapped, so it outlives the folder

    def search(_: np.ndarray, asked: np.ndarray) -> np.ndarray:
        return np.stack([opened.search(" ".join(map(str, row)), k)[0] for row in asked])

    return opened, search, size


def measure(kind: str, made: Passages) -> Iterator[dict[str, Any]]:
    """A row for each breadth of a kind of index."""
    total, dim = made.rows.shape
    blas = faiss.cvar.distance_compute_blas_threshold
    began = time.process_time()
    index, search, size = built(kind, made)
    build_s = time.process_time() - began
    planned = INDEX_TYPES[kind].row_bytes(total, dim) if kind in INDEX_TYPES else 0.0
    for breadth in settings(index):
        faiss.cvar.distance_compute_blas_threshold = BLAS_FROM
        batch_ms, found = spent(search, made.queries, made.asked, BATCH)
        one_ms, _ = spent(search, made.queries[:32], made.asked[:32], 1)
        faiss.cvar.distance_compute_blas_threshold = blas
        hits = [len(set(a) & set(b)) for a, b in zip(found, made.right, strict=True)]
        yield {
            "kind": kind,
            "passages": total,
            "breadth": breadth,
            "recall": round(sum(hits) / len(hits) / K, 4),
            "own": round(float((found == made.own[:, None]).any(1).mean()), 4),
            "batch_ms": round(batch_ms, 4),
            "one_ms": round(one_ms, 4),
            "build_s": round(build_s, 2),
            "bytes": round(size / total, 1),
            "planned_bytes": round(planned, 1),
        }


def default(row: dict[str, Any]) -> bool:
    """Whether it is searched as the server does."""
    return row["breadth"] in (0, BREADTH if row["kind"] == "hnsw" else PROBED)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Three panels: recall over time at the largest size, then time and memory over the size."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curve, times, memory) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    most = max(row["passages"] for row in rows)
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        last = [row for row in own if row["passages"] == most]
        curve.plot(
            [row["batch_ms"] for row in last], [row["recall"] for row in last], "o-", label=kind
        )
        usual = [row for row in own if default(row)]
        sizes = [row["passages"] for row in usual]
        times.plot(sizes, [row["batch_ms"] for row in usual], "o-", label=kind)
        memory.plot(
            sizes, [row["bytes"] * row["passages"] / 1e6 for row in usual], "o-", label=kind
        )
    curve.set(
        xscale="log", xlabel="CPU ms a query", ylabel=f"recall@{K}", title=f"{most:,} passages"
    )
    times.set(
        xscale="log",
        yscale="log",
        xlabel="passages",
        ylabel="CPU ms a query",
        title="searched as the server does",
    )
    memory.set(
        xscale="log", yscale="log", xlabel="passages", ylabel="MB of vectors", title="memory"
    )
    for axes in (curve, times, memory):
        axes.grid(alpha=0.3)
    figure.legend(*curve.get_legend_handles_labels(), loc="outside right center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def kept_rows(path: Path) -> list[dict[str, Any]]:
    """What was measured before."""
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def main() -> None:
    """Measures, prints a table and draws it; the last line compares a flat index at the two largest sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[10_000, 100_000], help="none: only draw"
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    table = Encoder.of("minilm")._model.get_input_embeddings().weight.detach().numpy()
    kept = options.out.with_suffix(".jsonl")
    for total in options.sizes:
        made = Passages(total, table)
        for kind in options.kinds:
            new = list(measure(kind, made))
            rows = [
                row for row in kept_rows(kept) if (row["kind"], row["passages"]) != (kind, total)
            ] + new
            rows.sort(key=lambda row: (KINDS.index(row["kind"]), row["passages"], row["breadth"]))
            kept.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            resident = f"{psutil.Process().memory_info().rss / 1e9:.1f} GB resident"
            print(*map(json.dumps, new), resident, sep="\n", flush=True)
    rows = kept_rows(kept)
    draw(rows, options.out)
    print(f"load of the machine: {', '.join(f'{one:.1f}' for one in os.getloadavg())}")
    flat = [row["batch_ms"] / row["passages"] for row in rows if row["kind"] == "flat"]
    growth = flat[-1] / flat[-2] if len(flat) > 1 else 1.0
    print(
        f"name=retrieval_curves ratio={growth:.2f} at_most=1.00 reference=flat-ms-a-passage-one-size-below n=3"
    )


if __name__ == "__main__":
    main()
