"""Parquet files are read in small batches, and not at all if they are too large."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.base import parquet
from rollout.base.parquet import bounded_batches, bounded_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 100 rows in two row groups."""
    path = tmp_path / "rows.parquet"
    table = pa.table({"number": range(100), "text": ["text"] * 100})
    pq.write_table(table, path, row_group_size=50)
    return path


def test_rows_are_read_in_batches(path: Path) -> None:
    with pq.ParquetFile(path) as file:
        sizes = [batch.num_rows for batch in bounded_batches(file, rows=20)]
        assert max(sizes) == 20
        assert sum(sizes) == 100
        assert bounded_table(file)["number"].to_pylist() == list(range(100))


def test_columns_and_row_groups_are_chosen(path: Path) -> None:
    with pq.ParquetFile(path) as file:
        table = bounded_table(file, columns=["number"], groups=[1])
    assert table.column_names == ["number"]
    assert table["number"].to_pylist() == list(range(50, 100))


def test_a_file_without_rows_has_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"number": pa.array([], pa.int64())}), path)
    with pq.ParquetFile(path) as file:
        assert bounded_table(file).column_names == ["number"]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("MAX_ROWS", "100 rows; expected at most 99"),
        ("MAX_BYTES", "bytes of values; expected at most 99"),
    ],
)
def test_a_file_over_a_limit_is_refused(
    path: Path, limit: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, limit, 99)
    with pq.ParquetFile(path) as file, pytest.raises(ValueError, match=message):
        bounded_table(file)
