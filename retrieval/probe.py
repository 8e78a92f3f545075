"""Probe of a retrieval server: recall and latency of queries whose passages are known."""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval.client import RetrievalClient
from retrieval.corpus import Passage, RetrievalError
from retrieval.regular_files import read_regular_text
from retrieval.wire import DEFAULT_TOPK, BadRequest, check_query


@dataclass(frozen=True, slots=True)
class GoldenQuery:
    """A query and the ids of the passages that its answer should contain.

    Without ids, the answer should contain a passage whose title is the query.
    """

    query: str
    ids: frozenset[str] = frozenset()

    def ranks(self, passages: Sequence[Passage]) -> list[int | None]:
        """Return the rank of each expected passage, from 0; None if it is not in `passages`."""
        if not self.ids:
            titles = [passage.title for passage in passages]
            return [titles.index(self.query) if self.query in titles else None]
        rank_of_id = {passage.id: rank for rank, passage in enumerate(passages)}
        return [rank_of_id.get(id) for id in self.ids]


def read_golden(path: Path) -> list[GoldenQuery]:
    """Read golden queries from JSON lines: `{"query": "...", "ids": ["...", ...]}`.

    Raises:
        RetrievalError: the file cannot be read, a line has another form (file:line), or there is
            no line.
    """
    golden = []
    try:
        lines = read_regular_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise RetrievalError(
            f"{path}: golden queries cannot be read ({error}); expected JSON lines"
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            query = GoldenQuery(check_query(row["query"]), frozenset(map(str, row["ids"])))
        except (ValueError, LookupError, TypeError, BadRequest) as error:
            raise RetrievalError(
                f'{path}:{number}: expected {{"query": "...", "ids": [...]}} ({error})'
            ) from None
        if not query.ids:
            raise RetrievalError(
                f"{path}:{number}: no ids; name the passages that the query should find"
            )
        golden.append(query)
    if not golden:
        raise RetrievalError(f"{path}: no golden queries")
    return golden


async def probe(url: str, golden: Sequence[GoldenQuery], k: int = DEFAULT_TOPK) -> dict[str, Any]:
    """Send golden queries to a server, one after the other.

    Returns:
        `n`, `k`; `recall_at_1` and `recall_at_k`, the share of the expected passages that is found,
        as a mean over the queries; `latency_ms_median`, `latency_ms_p99`, `latency_ms_max`;
        `ntotal`; `encoder`, its name.

    Raises:
        RetrievalUnavailable: the server gave no answer.
        RetrievalError: there are no queries.
    """
    if not golden:
        raise RetrievalError("probe needs at least one query")
    latencies_ms: list[float] = []
    recalls_at_1: list[float] = []
    recalls_at_k: list[float] = []
    async with RetrievalClient(url) as client:
        info = await client.info()
        for query in golden:
            began = time.perf_counter()
            passages = await client.search(query.query, k)
            latencies_ms.append(1000 * (time.perf_counter() - began))
            ranks = query.ranks(passages)
            recalls_at_1.append(sum(rank == 0 for rank in ranks) / len(ranks))
            recalls_at_k.append(sum(rank is not None for rank in ranks) / len(ranks))

    latencies_ms.sort()
    return {
        "n": len(golden),
        "k": k,
        "recall_at_1": statistics.fmean(recalls_at_1),
        "recall_at_k": statistics.fmean(recalls_at_k),
        "latency_ms_median": round(statistics.median(latencies_ms), 3),
        "latency_ms_p99": round(latencies_ms[math.ceil(0.99 * len(latencies_ms)) - 1], 3),
        "latency_ms_max": round(latencies_ms[-1], 3),
        "ntotal": info["ntotal"],
        "encoder": info["encoder"]["name"] if info["encoder"] else "none",
    }
