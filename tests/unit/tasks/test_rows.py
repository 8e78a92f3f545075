"""Rows of data files: their formats, damaged files, and long cells."""

import csv
from pathlib import Path

import pytest

from rollout.records.files import RecordError
from rollout.tasks.rows import read_rows


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.jsonl", '{"a": "1"}'), ("x.json", '[{"a": "1"}]'), ("x.csv", "a\n1\n")],
)
def test_a_byte_order_mark_is_skipped(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert list(read_rows(tmp_path / name)) == [{"a": "1"}]


def test_rows_of_a_json_object_are_under_data(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"Version": 1.0, "Data": [{"a": 1}]}')
    assert list(read_rows(tmp_path / "x.json")) == [{"a": 1}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"a": 1}\n\n{"a":', "x.jsonl: line 3 cannot be read"),
        ("x.jsonl", '{"a": 1}\n[2]', "line 2 is a list; expected an object with columns"),
        ("x.csv", "a,b\n1,2\n\n3,4,5\n", "line 4 has more cells than the header has columns"),
        ("y.json", '[{"a": 1}, 2]', "row 2 is a int; expected an object with columns"),
        ("x.json", '{"rows": []}', "expected a list of rows, or an object with one under 'data'"),
        ("x.json", "[", "x.json: cannot be read"),
        ("x.parquet", "PAR0", "x.parquet: cannot be read"),
        ("x.npy", "", "x.npy: expected a file named .parquet, .jsonl, .json, .csv"),
        ("x.csv", None, "x.csv: no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(RecordError, match=message):
        list(read_rows(tmp_path / name))


def test_long_cells_are_read_and_the_limit_of_the_process_stays(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    long_text = "x" * (limit + 1)
    (tmp_path / "x.csv").write_text(f"question,answer\n{long_text},1\n,2\n")
    assert [len(row["question"]) for row in read_rows(tmp_path / "x.csv")] == [limit + 1, 0]
    assert csv.field_size_limit() == limit
