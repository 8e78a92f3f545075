"""JSON files: bounds, lines, and digests of their content."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollout.base.json_files import (
    read_json,
    read_json_lines,
    read_record,
    sealed,
    unsealed,
    write_json,
)
from rollout.base.ownership import FolderError


def test_a_value_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [1, "ü"]})
    assert read_json(tmp_path / "a.json") == {"a": [1, "ü"]}


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(tmp_path / "a.json") == [1]


def test_large_and_deep_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        read_json(tmp_path / "a.json", max_bytes=1000)
    with pytest.raises(ValueError, match="brackets are nested too deeply"):
        read_json(tmp_path / "a.json")


def test_a_pipe_and_a_device_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="where a regular file is expected"):
            read_json(path)


def test_lines_are_read_from_where_the_last_reading_ended(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2\n3\n{"a": 4')
    rows, end = read_json_lines(path)
    assert rows == [{"a": 1}]  # the second line is broken, the third no object, the last unfinished
    with path.open("a") as file:
        file.write('}\n{"a": 5}\n')
    assert read_json_lines(path, end) == ([{"a": 4}, {"a": 5}], path.stat().st_size)


def test_a_sealed_value_is_what_was_written() -> None:
    value = {"a": (1, 2), "b": None}
    stored = json.loads(json.dumps(sealed(value)))
    assert unsealed(stored) == {"a": [1, 2], "b": None}
    with pytest.raises(ValueError, match="its content has changed since it was written"):
        unsealed({**stored, "b": 1})
    assert unsealed([1]) == [1]
    assert unsealed({"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name"),
        ("[1]", "it is not a JSON object"),
        ('{"a": 1}', "it has no b"),
        ('{"a": 1, "b": 2, "sha256": "00"}', "its content has changed since it was written"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "done.json"
    path.write_text(content)
    with pytest.raises(FolderError, match=rf"done\.json: damaged \({reason}.*; remove it"):
        read_record(path, "a", "b")


def test_a_record_is_read_sealed_or_not(tmp_path: Path) -> None:
    record = {"a": 1, "sha256": {"model": "00"}}
    write_json(tmp_path / "plain.json", record)
    assert read_record(tmp_path / "plain.json", "a") == record
    write_json(tmp_path / "sealed.json", sealed({"a": 1}))
    assert read_record(tmp_path / "sealed.json", "a") == {"a": 1}
