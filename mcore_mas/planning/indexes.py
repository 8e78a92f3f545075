"""Indexes in advance: memory, disk and hours of each kind for a number of passages, by arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

PASSAGE_BYTES = 660  # of a passage in JSON lines: wiki-18 has 13.9 GB for 21,015,324
# seconds a passage and cell of IVF, and seconds a passage of HNSW at 100,000: 768 dimensions, two cores of an AMD EPYC
_CELL_S, _GRAPH_S = 9 / 100_000 / 1024, 37 / 100_000
_SHARD_BYTES = 4  # a dimension, while shards wait to be put together


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexNeeds:
    """What an index takes."""

    memory_gb: float  # of a server, and of whoever builds it: its vectors
    disk_gb: float  # with the corpus; while it is built, shards are there besides
    building_gb: float  # of disk, the most while it is built
    encoding_h: float
    adding_h: float  # vectors put into the index


def index_needs(kind: str, passages: int, dim: int, rate: float) -> IndexNeeds:
    """The needs of a kind of index, a name in INDEX_TYPES.

    Args:
        rate: passages that all jobs together encode in a second.
    """
    from mcore_mas.retrieval.index import INDEX_TYPES, cells_of  # with FAISS

    size = passages * INDEX_TYPES[kind].row_bytes(passages, dim) / 1e9
    text = passages * PASSAGE_BYTES / 1e9
    seconds = 0.0
    if kind.startswith("ivf"):
        seconds = passages * cells_of(passages) * _CELL_S * dim / 768
    elif kind == "hnsw":  # a search for every passage, in a graph that grows
        seconds = passages * _GRAPH_S * dim / 768 * max(1.0, math.log(passages) / math.log(100_000))
    return IndexNeeds(
        memory_gb=size,
        disk_gb=size + text,
        building_gb=size + text + passages * _SHARD_BYTES * dim / 1e9,
        encoding_h=passages / rate / 3600,
        adding_h=seconds / 3600,
    )


def index_lines(passages: int, dim: int, rate: float) -> list[str]:
    """A table of all kinds, and what its hours rest on."""
    from mcore_mas.retrieval.index import INDEX_TYPES

    lines = [f"{passages:,} passages of {dim} dimensions, {rate:g} encoded a second by all jobs:"]
    lines += ["index   memory GB  disk GB  disk while built GB  hours to encode  hours to add"]
    for kind in INDEX_TYPES:
        need = index_needs(kind, passages, dim, rate)
        lines.append(
            f"{kind:<6} {need.memory_gb:>10.1f} {need.disk_gb:>8.1f} {need.building_gb:>20.1f}"
            f" {need.encoding_h:>16.1f} {need.adding_h:>13.1f}"
        )
    half = passages * 2 * dim / 1e9
    lines += [f"A flat index on GPUs, or scanned by torch, takes {half:.1f} GB of the device besides."]
    return [*lines, "Hours to add are scaled from 100,000 passages on two cores; more cores divide them."]
