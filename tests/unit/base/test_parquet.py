"""Parquet files are read in small batches, and not at all if they are too large."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.base import parquet
from rollout.base.parquet import bounded_batches, bounded_table, open_parquet


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file of 100 rows in two row groups."""
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


def write_repetitions(path: Path, values: pa.DataType, rows: int) -> None:
    """Write a text of a megabyte `rows` times, alone, in lists or in structs, in a few kilobytes."""
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0] * rows, pa.int32()), pa.array(["x" * 2**20])
    )
    if pa.types.is_list(values):
        texts = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), texts)
    elif pa.types.is_struct(values):
        texts = pa.StructArray.from_arrays([texts], ["text"])
    pq.write_table(pa.table({"number": range(rows), "text": texts}), path)


TEXT = pa.string()


@pytest.mark.parametrize("values", [TEXT, pa.list_(TEXT), pa.struct({"text": TEXT})], ids=str)
def test_repetitions_in_a_dictionary_count(values: pa.DataType, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_repetitions(path, values, rows=70_000)  # 68 GiB
    assert path.stat().st_size < 2**21
    with pytest.raises(ValueError, match="more than 68719476736 bytes of values, with all repet"):
        open_parquet(path)
    write_repetitions(path, values, rows=2_000)
    with open_parquet(path) as file:
        assert file.metadata.num_rows == 2_000


def test_prefixes_that_texts_share_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    encoding = {"text": "DELTA_BYTE_ARRAY"}
    table = pa.table({"text": ["x" * 1000] * 1000})
    pq.write_table(table, path, use_dictionary=False, column_encoding=encoding)
    monkeypatch.setattr(parquet, "MAX_BYTES", 900_000)
    with pytest.raises(ValueError, match="more than 900000 bytes of values"):
        open_parquet(path)
    monkeypatch.setattr(parquet, "MAX_BYTES", 1_100_000)
    open_parquet(path).close()


def test_repeated_numbers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"number": [[1] * 100_000]}), path)
    assert path.stat().st_size < 10_000
    monkeypatch.setattr(parquet, "MAX_BYTES", 799_999)
    with pytest.raises(ValueError, match="more than 799999 bytes of values"):
        open_parquet(path)


def test_ordinary_texts_with_dictionaries_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    texts = [f"text {number % 50}" for number in range(10_000)]
    pq.write_table(pa.table({"text": texts}), path)
    with open_parquet(path) as file:
        assert bounded_table(file)["text"].to_pylist() == texts
