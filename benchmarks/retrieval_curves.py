"""Recall, processor time and memory of every kind of index on generated passages; the figure of docs/retrieval.md.

    python benchmarks/retrieval_curves.py [--sizes 10000 100000 1000000] [--kinds flat sq8 ivf ivfpq hnsw]

What was measured is kept beside the figure; a later call adds to it.

A passage is 24 words, half of them of one of 2000 subjects and half by Zipf's law; its vector is the mean
of MiniLM's word embeddings, of length 1. A query is 5 of its words and another one. One thread; the times are
processor time, best of three, so another load of the machine matters little.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import matplotlib
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout, installed or not

from mcore_mas.retrieval.encoder import Encoder
from mcore_mas.retrieval.index import BREADTH, INDEX_TYPES, PROBED, TRAINED_ON

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "retrieval_curves.png"
WORDS, SUBJECTS, RARE, QUERIES, K, BATCH, BLOCK = 24, 2000, 8, 256, 10, 64, 50_000
BLAS_FROM = 800  # queries * dimensions, as the server searches
BREADTHS = (8, 16, 32, 64, 128, 256)  # cells that IVF looks into, and candidates that HNSW keeps


def words(random: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    """`[count, WORDS]` ids of words."""
    subjects = np.random.default_rng(1).integers(0, vocabulary, (SUBJECTS, RARE))
    own = subjects[random.integers(0, SUBJECTS, count)]
    half = np.take_along_axis(own, random.integers(0, RARE, (count, WORDS // 2)), axis=1)
    return np.concatenate([half, random.zipf(1.2, (count, WORDS // 2)) % vocabulary], axis=1)


def vectors(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """`[N, dim]` of length 1."""
    made = table[ids].mean(1)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def passages(total: int, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors `[N, dim]` of passages, and `[QUERIES, dim]` of queries about some of them."""
    random = np.random.default_rng(0)
    rows, asked = np.empty((total, table.shape[1]), np.float32), []
    for first in range(0, total, BLOCK):
        ids = words(random, min(BLOCK, total - first), len(table))
        rows[first : first + len(ids)] = vectors(ids, table)
        asked += [ids[random.choice(len(ids), 512)]] if not first else []
    some = np.concatenate(asked)[:QUERIES]
    kept = np.stack([random.permutation(row)[:5] for row in some])
    others = random.integers(0, len(table), (QUERIES, 1))
    return rows, vectors(np.concatenate([kept, others], axis=1), table)


def spent(search: Any, queries: np.ndarray, batch: int) -> tuple[float, np.ndarray]:
    """Processor milliseconds a query, the best of three, and what was found."""
    best, found = np.inf, []
    for _ in range(3):
        began, found = time.process_time(), []
        for first in range(0, len(queries), batch):
            found.append(search(queries[first : first + batch], K)[1])
        best = min(best, 1000 * (time.process_time() - began) / len(queries))
    return best, np.concatenate(found)


def settings(index: faiss.Index) -> Iterator[int]:
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


def measure(kind: str, rows: np.ndarray, queries: np.ndarray, right: np.ndarray) -> Iterator[dict[str, Any]]:
    """A row for each breadth of a kind of index."""
    total, dim = rows.shape
    made = INDEX_TYPES[kind]
    blas = faiss.cvar.distance_compute_blas_threshold
    began = time.process_time()
    index = faiss.index_factory(dim, made.factory(total, dim), faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        index.train(np.ascontiguousarray(rows[:: -(-total // TRAINED_ON)]))
    index.add(rows)
    build_s, size = time.process_time() - began, faiss.serialize_index(index).nbytes / total
    for breadth in settings(index):
        faiss.cvar.distance_compute_blas_threshold = BLAS_FROM
        batch_ms, found = spent(index.search, queries, BATCH)
        one_ms, _ = spent(index.search, queries[:32], 1)
        faiss.cvar.distance_compute_blas_threshold = blas
        hits = [len(set(a) & set(b)) for a, b in zip(found, right, strict=True)]
        yield {
            "kind": kind,
            "passages": total,
            "breadth": breadth,
            "recall": round(sum(hits) / len(hits) / K, 4),
            "batch_ms": round(batch_ms, 4),
            "one_ms": round(one_ms, 4),
            "build_s": round(build_s, 2),
            "bytes": round(size, 1),
            "planned_bytes": round(made.row_bytes(total, dim), 1),
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
    for kind in INDEX_TYPES:
        own = [row for row in rows if row["kind"] == kind]
        last = [row for row in own if row["passages"] == most]
        curve.plot([row["batch_ms"] for row in last], [row["recall"] for row in last], "o-", label=kind)
        usual = [row for row in own if default(row)]
        sizes = [row["passages"] for row in usual]
        times.plot(sizes, [row["batch_ms"] for row in usual], "o-", label=kind)
        memory.plot(sizes, [row["bytes"] * row["passages"] / 1e6 for row in usual], "o-", label=kind)
    curve.set(xscale="log", xlabel="CPU ms a query", ylabel=f"recall@{K}", title=f"{most:,} passages")
    times.set(
        xscale="log", yscale="log", xlabel="passages", ylabel="CPU ms a query", title="searched as the server does"
    )
    memory.set(xscale="log", yscale="log", xlabel="passages", ylabel="MB of vectors", title="memory")
    for axes in (curve, times, memory):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    """Measures, prints a table and draws it; the last line compares a flat index at the two largest sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--kinds", nargs="+", default=list(INDEX_TYPES), choices=INDEX_TYPES)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    table = Encoder.minilm()._model.get_input_embeddings().weight.detach().numpy()  # type: ignore[operator]
    kept = options.out.with_suffix(".jsonl")
    rows = list(map(json.loads, kept.read_text().splitlines())) if kept.exists() else []
    for total in options.sizes:
        made, queries = passages(total, table)
        exact = faiss.IndexFlatIP(made.shape[1])
        exact.add(made)
        right = exact.search(queries, K)[1]
        for kind in options.kinds:
            rows = [row for row in rows if (row["kind"], row["passages"]) != (kind, total)]
            for row in measure(kind, made, queries, right):
                print(json.dumps(row), flush=True)
                rows.append(row)
    print(f"load of the machine: {', '.join(f'{one:.1f}' for one in os.getloadavg())}")
    rows.sort(key=lambda row: (list(INDEX_TYPES).index(row["kind"]), row["passages"], row["breadth"]))
    draw(rows, options.out)
    kept.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flat = [row["batch_ms"] / row["passages"] for row in rows if row["kind"] == "flat"]
    growth = flat[-1] / flat[-2] if len(flat) > 1 else 1.0
    print(f"name=retrieval_curves ratio={growth:.2f} goal=1.00 reference=flat-ms-a-passage-one-size-below n=3")


if __name__ == "__main__":
    main()
