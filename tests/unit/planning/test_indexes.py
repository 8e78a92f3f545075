"""Needs of indexes, by hand, for wiki-18: 21,015,324 passages of 768 dimensions."""

import pytest

from mcore_mas.planning.page import index_lines, index_needs

N = 21_015_324


@pytest.mark.parametrize(
    ("kind", "row_bytes"),
    [
        ("flat", 768 * 4),
        ("sq8", 768),
        (
            "ivf",
            768 * 4 + 8 + 2564 * 768 * 4 / N,
        ),  # a number of 8 bytes each, and the centres of 2564 cells
        ("ivfpq", 96 + 8 + 2564 * 768 * 4 / N),  # 96 codes of a byte
        ("hnsw", 768 * 4 + 64 * 4 + 12),  # 64 neighbours at the ground, and their count and offset
    ],
)
def test_memory_and_disk_by_hand(kind: str, row_bytes: float) -> None:
    need = index_needs(kind, N, 768, rate=1000.0)
    assert need["memory_gb"] == pytest.approx(N * row_bytes / 1e9)
    assert need["disk_gb"] == pytest.approx(need["memory_gb"] + N * 660 / 1e9)
    assert need["building_gb"] == pytest.approx(need["disk_gb"] + 64.559, abs=0.001)
    assert need["encoding_h"] == pytest.approx(21_015.324 / 3600)


def test_hours_by_hand() -> None:
    assert index_needs("flat", N, 768, 50.0)["encoding_h"] == pytest.approx(116.75, abs=0.01)
    assert index_needs("flat", N, 768, 50.0)["adding_h"] == 0
    # 6.7 ns for each cell and each passage, and each of 25 looks at 100,000 of them; 18 us for the code of a passage
    assert index_needs("ivf", N, 768, 50.0)["adding_h"] == pytest.approx(
        6.7e-9 * 2564 * 23_515_324 / 3600
    )
    assert index_needs("ivfpq", 1_000_000, 384, 50.0)["adding_h"] * 3600 == pytest.approx(
        30.06 + 9, abs=0.01
    )
    # 37 s for 100,000; ln 21,015,324 / ln 100,000 = 16.8608 / 11.5129
    assert index_needs("hnsw", N, 768, 50.0)["adding_h"] == pytest.approx(
        37 * 210.15324 * 1.46451 / 3600, rel=1e-4
    )


def test_the_table_says_what_wiki_18_takes() -> None:
    lines = index_lines(N, 768, 50.0)
    assert lines[0] == "21,015,324 passages of 768 dimensions, 50 encoded a second by all jobs:"
    assert lines[2].split() == ["flat", "64.6", "78.4", "143.0", "116.8", "0.0"]
    assert lines[5].split()[:3] == ["ivfpq", "2.2", "16.1"]
    assert "takes 32.3 GB of the device" in lines[-2]
