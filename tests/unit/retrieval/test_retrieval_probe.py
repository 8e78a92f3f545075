"""The probe reports recall, latency and size."""

import asyncio
from pathlib import Path

import pytest

from retrieval.corpus import Passage, RetrievalError
from retrieval.probe import GoldenQuery, probe, read_golden


def test_titles_find_their_passages(server_url: str, passages: list[Passage]) -> None:
    golden = [GoldenQuery(passage.title) for passage in passages]
    report = asyncio.run(probe(server_url, golden, k=2))
    assert (report["n"], report["ntotal"]) == (5, 5)
    assert (report["recall_at_1"], report["recall_at_k"]) == (1.0, 1.0)
    assert 0 < report["latency_ms_median"] <= report["latency_ms_p99"] <= report["latency_ms_max"]


def test_recall_is_a_mean_over_queries_and_their_ids(server_url: str, tmp_path: Path) -> None:
    half = [GoldenQuery("Nowhere"), GoldenQuery("Alice Walker")]
    assert asyncio.run(probe(server_url, half))["recall_at_1"] == 0.5
    (tmp_path / "golden").write_text('{"query": "Alice Walker", "ids": ["0", "none"]}\n')
    report = asyncio.run(probe(server_url, read_golden(tmp_path / "golden"), k=5))
    assert (report["recall_at_1"], report["recall_at_k"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    "line", ["x", '{"query": "a"}', '{"query": "", "ids": ["0"]}', '{"query": "a", "ids": []}']
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "golden").write_text(line + "\n")
    with pytest.raises(RetrievalError, match=r"golden:1: "):
        read_golden(tmp_path / "golden")


def test_a_probe_needs_queries(server_url: str) -> None:
    with pytest.raises(RetrievalError, match="at least one query"):
        asyncio.run(probe(server_url, []))
