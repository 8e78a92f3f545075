"""Rows of data files: Parquet, JSON, JSON lines and CSV."""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from retrieval.regular_files import check_regular
from rollout.base.json_files import read_json
from rollout.base.parquet import bounded_batches, open_parquet
from rollout.records.files import RecordError

_BATCH_ROWS = 256
_MAX_CELL_CHARS = 1 << 24
_MAX_JSON_BYTES = 2 << 30  # limit of a file that is read whole
_MAX_LINE_CHARS = 64 << 20


def read_rows(path: Path, suffix: str = "") -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a data file in their order; see `located_rows`."""
    for _, row in located_rows(path, suffix):
        yield row


def located_rows(path: Path, suffix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a data file in their order, reading as they are consumed.

    Each row comes with its place for errors. It is the line of a text file, such as "line 7", or
    the number of the row in a Parquet file or a JSON list, such as "row 7". Both count from 1.

    Args:
        path: path of the file.
        suffix: read the file as if its name had this suffix; "": its own suffix.

    Raises:
        RecordError: the file is missing, is not of the format of its suffix, or has an entry that
            is not a row.
    """
    suffix = suffix or path.suffix
    if suffix not in READERS:
        raise RecordError(f"{path}: expected a file named {', '.join(READERS)}")
    try:
        check_regular(path)
        for location, row in READERS[suffix](path):
            if not isinstance(row, Mapping):
                raise RecordError(
                    f"{path}: {location} is a {type(row).__name__}; expected an object with columns"
                )
            yield location, row
    except FileNotFoundError as error:
        raise RecordError(f"{path}: no such file") from error
    except RecordError:
        raise
    except (OSError, ValueError, csv.Error, pa.ArrowException, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RecordError(f"{path}: cannot be read ({reason})") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    with open_parquet(path) as file:
        batches = bounded_batches(file, rows=_BATCH_ROWS)
        yield from _numbered(row for batch in batches for row in batch.to_pylist())


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a list, or of the list under "data" or "Data" in an object.

    A file of JSON lines that is named .json is read as well.
    """
    try:
        value = read_json(path, _MAX_JSON_BYTES)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Extra data"):
            raise
        yield from _read_json_lines(path)
        return
    if isinstance(value, Mapping):
        for key in ("data", "Data"):
            if isinstance(value.get(key), list):
                value = value[key]
                break
    if not isinstance(value, list):
        raise RecordError(f"{path}: expected a list of rows, or an object with one under 'data'")
    yield from _numbered(value)


def _read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    # Programs on Windows write a byte order mark, which utf-8-sig skips.
    with path.open(encoding="utf-8-sig") as file:
        lines = iter(lambda: file.readline(_MAX_LINE_CHARS + 1), "")
        for number, line in enumerate(lines, start=1):
            if len(line) > _MAX_LINE_CHARS:
                raise RecordError(
                    f"{path}: line {number} has more than {_MAX_LINE_CHARS} characters"
                )
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                # The error's own text counts lines within this one.
                reason = f"{error.msg}, column {error.colno}"
                raise RecordError(f"{path}: line {number} cannot be read ({reason})") from error
            except (ValueError, RecursionError) as error:
                raise RecordError(f"{path}: line {number} cannot be read ({error})") from error
            yield f"line {number}", row


def _read_csv(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        _check_delimiter(path, rows.fieldnames or ())
        column_counts = Counter(rows.fieldnames or ())
        for column, count in column_counts.items():
            if count > 1:
                raise RecordError(
                    f"{path}: {count} columns are called {column!r:.80}; rename all but one"
                )
        while True:
            # The limit is global to the process, so it is larger only while this file is read.
            usual_limit = csv.field_size_limit(_MAX_CELL_CHARS)
            try:
                row = next(rows, None)
            finally:
                csv.field_size_limit(usual_limit)
            if row is None:
                return
            number = rows.line_num  # the last line of a row whose quoted cells have several
            if None in row:
                raise RecordError(
                    f"{path}: line {number} has more cells than the header has columns; put cells "
                    "that contain a comma in double quotes"
                )
            yield f"line {number}", row


def _check_delimiter(path: Path, columns: Sequence[str]) -> None:
    """Refuse a file whose cells are separated by another sign than a comma."""
    if len(columns) != 1:
        return
    for sign, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if sign in columns[0]:
            raise RecordError(
                f"{path}: its header '{columns[0]}' has {name} between the columns; expected commas"
            )


# Readers of a file's rows by suffix; each row comes with its line or number.
READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
}
