"""Plans that people read in the terminal: of a run, or of an index."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mcore_mas.config.credit import cut_off
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.choose import Cluster, describe, transport
from mcore_mas.planning.estimate import Placement, RunEstimate


def plan_lines(config: RunConfig, cluster: Cluster, placement: Placement, estimate: RunEstimate) -> Iterator[str]:
    """What a run gets, in lines."""
    seconds = ", ".join(f"{part} {s:.0f}" for part, s in estimate.seconds.items())
    yield f"{config.run} on {cluster}: {describe(placement)}; transport {transport(placement)}"
    fullest = f"{_gb(estimate.update)} in an update, {_gb(estimate.rollout)} in a rollout"
    yield f"  fullest GPU: {fullest}, of {cluster.gpu.memory:.0f} GB"

    for (policy, part), memory in estimate.trainers.items():
        parts: dict[str, Any] = asdict(memory)
        yield f"  {policy} {part}: " + ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
    weights = ", ".join(f"{policy} {_gb(size)}" for policy, size in estimate.weights.items())
    yield f"  engines: weights {weights}; keys and values {_gb(estimate.kv)} each"
    yield f"  step: at most {estimate.tokens / 1e6:.2f} M tokens, {estimate.step_s:.0f} s ({seconds})"
    sizes = f"disk {_gb(estimate.disk)}; host memory {_gb(estimate.host)}"
    yield f"  {config.trainer.steps} steps: {estimate.hours:.1f} h; {sizes}"
    if config.retriever and config.retriever.gpus:
        yield "  retriever: a GPU more, the last of the first machine"
    yield from (f"  {line}" for line in cut_off(config.agents))


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


PASSAGE_BYTES = 660  # of a passage in JSON lines: wiki-18 has 13.9 GB for 21,015,324
# of 768 dimensions on one core: a comparison with a cell of IVF, PQ's code of a passage, a passage of HNSW at 100,000;
# benchmarks/retrieval_curves.py measured 10,000 to 1,000,000 of 384
_CELL_S, _CODE_S, _GRAPH_S = 6.7e-9, 1.8e-5, 3.7e-4
_ROUNDS = 25  # of k-means, in each of which all that cells are learnt from are compared with all cells
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
    """The needs of a kind of index, a name in INDEX_TYPES, if all jobs together encode `rate` passages in a second."""
    from mcore_mas.retrieval.build import INDEX_TYPES, TRAINED_ON, cells_of  # with FAISS

    size = passages * INDEX_TYPES[kind].row_bytes(passages, dim) / 1e9
    text = passages * PASSAGE_BYTES / 1e9
    seconds = 0.0
    if kind.startswith("ivf"):
        compared = passages + _ROUNDS * min(passages, TRAINED_ON)
        seconds = (compared * cells_of(passages) * _CELL_S + passages * _CODE_S * (kind == "ivfpq")) * dim / 768
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
    from mcore_mas.retrieval.build import INDEX_TYPES

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
    return [*lines, "Hours to add are scaled from 1,000,000 passages on one core; more cores divide them."]
