"""CPU time of a search among the passages that a filter leaves, against one of all passages.

    python benchmarks/retrieval_filter.py [--passages 1000000] [--kind flat]

A filter leaves 19 of 20 passages (vectors of 128 dimensions, at random). One thread, BLAS where the server takes it;
the best of three. `each in float64` reads and scores all of them for each query.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's

import faiss
import numpy as np

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from retrieval.build import INDEX_TYPES, TRAINED_ON
from retrieval.index import BREADTH, INDEX_FORMAT, PROBED, Index, Manifest

DIM, BATCH, K, BLAS_FROM, ROUNDS = 128, 64, 10, 800, 3


def made_index(kind: str, total: int) -> Index:
    """An index of unit vectors, searched as the server does."""
    random = np.random.default_rng(0)
    vectors = faiss.index_factory(
        DIM, INDEX_TYPES[kind].factory(total, DIM), faiss.METRIC_INNER_PRODUCT
    )
    if not vectors.is_trained:
        vectors.train(unit(random, min(total, TRAINED_ON)))
    for first in range(0, total, TRAINED_ON):
        vectors.add(unit(random, min(TRAINED_ON, total - first)))
    if isinstance(vectors, faiss.IndexIVF):
        vectors.make_direct_map()
        vectors.nprobe = min(PROBED, vectors.nlist)
    elif isinstance(vectors, faiss.IndexHNSW):
        vectors.hnsw.efSearch = BREADTH
    about = {"encoder": None, "corpus": "", "corpus_sha256": "", "index_sha256": ""}
    return Index(Manifest(format=INDEX_FORMAT, dim=DIM, ntotal=total, **about), vectors, None)


def unit(random: np.random.Generator, count: int) -> np.ndarray:
    """`[count, DIM]` float32 of length 1."""
    made = random.standard_normal((count, DIM), dtype=np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return made


def cpu_ms(search: Callable[[np.ndarray], object], queries: np.ndarray) -> float:
    """Processor milliseconds a query."""
    spent = []
    for _ in range(ROUNDS):
        began = time.process_time()
        search(queries)
        spent.append(1000 * (time.process_time() - began) / len(queries))
    return min(spent)


def main() -> None:
    """Prints the times, and as last line those of a batch with a filter and without one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=tuple(INDEX_TYPES), default="flat")
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    faiss.cvar.distance_compute_blas_threshold = BLAS_FROM
    index, queries = (
        made_index(options.kind, options.passages),
        unit(np.random.default_rng(1), BATCH),
    )
    rows = np.flatnonzero(np.arange(options.passages) % 20)
    filtered = cpu_ms(lambda some: index.search(some, K, rows), queries)
    alone = cpu_ms(lambda some: index.search(some, K, rows), queries[:1])
    each = cpu_ms(lambda some: [index._best(one, K, rows) for one in some], queries[:2])
    whole = cpu_ms(lambda some: index.search(some, K), queries)
    whole_alone = cpu_ms(lambda some: index.search(some, K), queries[:1])
    print(
        f"{options.kind}, {len(rows):,} of {options.passages:,} passages are left; CPU ms a query"
    )
    print(
        f"filtered: in a batch of {BATCH} {filtered:.2f}, alone {alone:.1f}; each in float64 {each:.1f}"
    )
    print(f"unfiltered: in a batch {whole:.2f}, alone {whole_alone:.1f}")
    print(
        f"name=retrieval_filter ratio={filtered / whole:.2f} at_most=2.00 reference=unfiltered-same-batch n={ROUNDS}"
    )


if __name__ == "__main__":
    main()
