"""Plans that people read in the terminal: of a run, or of an index."""

import math
from dataclasses import asdict

from mcore_mas.config.credit import cut_off
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.choose import Cluster, describe, transport
from mcore_mas.planning.estimate import Placement, RunEstimate
from mcore_mas.reports.pages import render_page


def plan_lines(
    config: RunConfig, cluster: Cluster, placement: Placement, estimate: RunEstimate
) -> list[str]:
    """What a run gets, in lines."""
    trainers = {key: asdict(memory) for key, memory in estimate.trainers.items()}
    own = {
        "placement": describe(placement),
        "transport": transport(placement),
        "cut_off": cut_off(config.agents),
    }
    page = render_page(
        "plan_run.md.jinja",
        config=config,
        cluster=cluster,
        estimate=estimate,
        trainers=trainers,
        **own,
    )
    return page.splitlines()


PASSAGE_BYTES = 660  # of a passage in JSON lines: wiki-18 has 13.9 GB for 21,015,324
# of 768 dimensions on one core: a comparison with a cell of IVF, PQ's code of a passage, a passage of HNSW at 100,000;
# benchmarks/retrieval_curves.py measured 10,000 to 1,000,000 of 384
_CELL_S, _CODE_S, _GRAPH_S = 6.7e-9, 1.8e-5, 3.7e-4
_ROUNDS = (
    25  # of k-means, in each of which all that cells are learnt from are compared with all cells
)
_SHARD_BYTES = 4  # a dimension, while shards wait to be put together


def index_needs(kind: str, passages: int, dim: int, rate: float) -> dict[str, float]:
    """What a kind of index, a name in INDEX_TYPES, takes if all jobs together encode `rate` passages in a second."""
    from retrieval.build import INDEX_TYPES, MAX_TRAINING_ROWS, cells_of  # with FAISS

    size = passages * INDEX_TYPES[kind].row_bytes(passages, dim) / 1e9
    text = passages * PASSAGE_BYTES / 1e9
    seconds = 0.0
    if kind.startswith("ivf"):
        compared = passages + _ROUNDS * min(passages, MAX_TRAINING_ROWS)
        seconds = (
            (compared * cells_of(passages) * _CELL_S + passages * _CODE_S * (kind == "ivfpq"))
            * dim
            / 768
        )
    elif kind == "hnsw":  # a search for every passage, in a graph that grows
        seconds = passages * _GRAPH_S * dim / 768 * max(1.0, math.log(passages) / math.log(100_000))
    return {
        "memory_gb": size,  # of a server, and of whoever builds it: its vectors
        "disk_gb": size + text,  # with the corpus
        "building_gb": size
        + text
        + passages * _SHARD_BYTES * dim / 1e9,  # of disk, the most while it is built
        "encoding_h": passages / rate / 3600,
        "adding_h": seconds / 3600,  # of vectors put into the index
    }


def index_lines(passages: int, dim: int, rate: float) -> list[str]:
    """A table of all kinds, and what its hours rest on."""
    from retrieval.build import INDEX_TYPES

    needs = {kind: index_needs(kind, passages, dim, rate) for kind in INDEX_TYPES}
    return render_page(
        "plan_index.md.jinja", passages=passages, dim=dim, rate=rate, needs=needs
    ).splitlines()
