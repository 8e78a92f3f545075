"""Memory, disk and time of a search index, by formula, before it is built."""

import math
from dataclasses import dataclass

# Bytes of a passage in JSON lines: wiki-18 has 13.9 GB for 21,015,324 passages.
PASSAGE_BYTES = 660

# Seconds of one core, for vectors of 768 dimensions. They are scaled from the measurements of
# `benchmarks/retrieval_curves.py` with 10,000 to 1,000,000 vectors of 384 dimensions.
_CELL_COMPARISON_S = 6.7e-9  # compare a vector with the centroid of an IVF cell
_PQ_CODE_S = 1.8e-5  # quantise a vector
_HNSW_INSERT_S = 3.7e-4  # insert a vector into a graph of 100,000 vectors
_KMEANS_ROUNDS = 25  # each round compares all training vectors with all centroids

_SHARD_ELEMENT_BYTES = 4  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexNeeds:
    """Needs of an index: memory and disk in GB (1e9 bytes), time in hours.

    Attributes:
        memory_gb: memory of a server, and of the process that builds the index.
        disk_gb: disk of the index and the corpus.
        building_gb: largest use of disk while the index is built.
        encoding_h: time to encode the passages.
        adding_h: time of one core to add the vectors to the index.
    """

    memory_gb: float
    disk_gb: float
    building_gb: float
    encoding_h: float
    adding_h: float


def index_needs(kind: str, passages: int, dim: int, rate: float) -> IndexNeeds:
    """Estimate the needs of an index.

    Args:
        kind: a name in `retrieval.build.INDEX_TYPES`.
        passages: number of passages.
        dim: dimensions of a vector.
        rate: passages per second that all jobs together encode.
    """
    from retrieval.build import INDEX_TYPES  # imports FAISS

    index_gb = passages * INDEX_TYPES[kind].row_bytes(passages, dim) / 1e9
    corpus_gb = passages * PASSAGE_BYTES / 1e9
    shards_gb = passages * _SHARD_ELEMENT_BYTES * dim / 1e9
    return IndexNeeds(
        memory_gb=index_gb,
        disk_gb=index_gb + corpus_gb,
        building_gb=index_gb + corpus_gb + shards_gb,
        encoding_h=passages / rate / 3600,
        adding_h=_adding_seconds(kind, passages, dim) / 3600,
    )


def _adding_seconds(kind: str, passages: int, dim: int) -> float:
    """Estimate the seconds of one core to train an index and to add all vectors to it."""
    from retrieval.build import MAX_TRAINING_ROWS, cells_of  # imports FAISS

    scale = dim / 768
    if kind == "hnsw":
        # An insertion searches the graph, which takes longer in a larger graph.
        growth = max(1.0, math.log(passages) / math.log(100_000))
        return passages * _HNSW_INSERT_S * scale * growth
    if kind in ("ivf", "ivfpq"):
        compared_vectors = passages + _KMEANS_ROUNDS * min(passages, MAX_TRAINING_ROWS)
        seconds = compared_vectors * cells_of(passages) * _CELL_COMPARISON_S
        if kind == "ivfpq":
            seconds += passages * _PQ_CODE_S
        return seconds * scale
    return 0.0


def index_table(passages: int, dim: int, rate: float) -> list[str]:
    """Return the lines of a table with the needs of every kind of index of vectors."""
    from retrieval.build import INDEX_TYPES  # imports FAISS

    lines = [
        f"{passages:,} passages of {dim} dimensions, {rate:g} encoded a second by all jobs:",
        "index   memory GB  disk GB  disk while built GB  hours to encode  hours to add",
    ]
    for kind in INDEX_TYPES:
        needs = index_needs(kind, passages, dim, rate)
        lines.append(
            f"{kind:<6} {needs.memory_gb:10.1f} {needs.disk_gb:8.1f} {needs.building_gb:20.1f} "
            f"{needs.encoding_h:16.1f} {needs.adding_h:13.1f}"
        )
    device_gb = passages * 2 * dim / 1e9
    lines += [
        f"A flat index on a GPU also takes {device_gb:.1f} GB of the device.",
        "Hours to add are scaled from measurements with up to 1,000,000 passages on one core; more "
        "cores divide them.",
    ]
    return lines
