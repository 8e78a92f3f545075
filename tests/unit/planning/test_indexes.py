"""Needs of indexes match sums by hand, for wiki-18: 21,015,324 passages of 768 dimensions."""

import pytest

from mcore_mas.planning.indexes import index_needs, index_table

N = 21_015_324


@pytest.mark.parametrize(
    ("kind", "row_bytes"),
    [
        ("flat", 768 * 4),
        ("sq8", 768),
        # An identifier of 8 bytes, and the centroids of 2564 cells
        ("ivf", 768 * 4 + 8 + 2564 * 768 * 4 / N),
        ("ivfpq", 96 + 8 + 2564 * 768 * 4 / N),  # 96 codes of a byte
        # 64 neighbours in the lowest layer, and their count and offset
        ("hnsw", 768 * 4 + 64 * 4 + 12),
    ],
)
def test_memory_and_disk(kind: str, row_bytes: float) -> None:
    needs = index_needs(kind, N, 768, rate=1000.0)
    assert needs.memory_gb == pytest.approx(N * row_bytes / 1e9)
    assert needs.disk_gb == pytest.approx(needs.memory_gb + N * 660 / 1e9)
    assert needs.building_gb == pytest.approx(needs.disk_gb + 64.559, abs=0.001)
    assert needs.encoding_h == pytest.approx(21_015.324 / 3600)


def test_hours() -> None:
    assert index_needs("flat", N, 768, 50.0).encoding_h == pytest.approx(116.75, abs=0.01)
    assert index_needs("flat", N, 768, 50.0).adding_h == 0
    # 6.7 ns for each pair of a cell and a passage, and in 25 rounds for each of 100,000 training
    # vectors; 18 us to encode a passage with PQ
    assert index_needs("ivf", N, 768, 50.0).adding_h == pytest.approx(
        6.7e-9 * 2564 * 23_515_324 / 3600
    )
    assert index_needs("ivfpq", 1_000_000, 384, 50.0).adding_h * 3600 == pytest.approx(
        30.06 + 9, abs=0.01
    )
    # 37 s for 100,000; ln 21,015,324 / ln 100,000 = 16.8608 / 11.5129
    assert index_needs("hnsw", N, 768, 50.0).adding_h == pytest.approx(
        37 * 210.15324 * 1.46451 / 3600, rel=1e-4
    )


def test_the_table_of_wiki_18() -> None:
    lines = index_table(N, 768, 50.0)
    assert lines[0] == "21,015,324 passages of 768 dimensions, 50 encoded a second by all jobs:"
    assert lines[2].split() == ["flat", "64.6", "78.4", "143.0", "116.8", "0.0"]
    assert lines[5].split()[:3] == ["ivfpq", "2.2", "16.1"]
    assert "takes 32.3 GB of the device" in lines[-2]
