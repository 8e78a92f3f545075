"""Passage corpora in Search-R1's JSON-lines format; line n is row n of the vectors."""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from retrieval.atomic_files import write_atomically
from retrieval.digests import file_status
from retrieval.regular_files import check_regular

MAX_LINE_BYTES = 16 << 20
# Line offsets of a corpus of at least this size are cached, because finding them takes seconds.
CACHED_FROM_BYTES = 1 << 26


class RetrievalError(Exception):
    """A corpus, index, encoder or request is wrong; the message says what, where and what to do."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Passage of a corpus; `contents` is the title in double quotes, a newline, then the text."""

    id: str
    contents: str
    score: float | None = None  # for the query of a search

    @classmethod
    def compose(cls, id: str, title: str, text: str) -> Passage:
        """Return a passage whose contents have this title and this text."""
        return cls(id=id, contents=f'"{title}"\n{text}')

    @property
    def title(self) -> str:
        """First line of the contents, without the double quotes around it."""
        line = self.contents.partition("\n")[0].strip()
        return line[1:-1] if len(line) >= 2 and line[0] == line[-1] == '"' else line

    @property
    def text(self) -> str:
        """All lines of the contents after the first."""
        return self.contents.partition("\n")[2]


def parse_passage(row: Any, where: str) -> Passage:
    """Return the passage of a row.

    Args:
        row: value of a JSON line, or a row of a table.
        where: file and line of the row, for errors.

    Raises:
        RetrievalError: the row is not an object, or its id or its contents are no text or empty.
    """
    if not isinstance(row, dict):
        raise RetrievalError(
            f"{where}: got a {type(row).__name__}, expected an object with 'id' and 'contents'"
        )
    for key in ("id", "contents"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise RetrievalError(
                f"{where}: {key!r} is {row.get(key)!r}, expected a non-empty string"
            )
    return Passage(id=row["id"], contents=row["contents"])


class Corpus:
    """A corpus on disk, mapped into memory; a line is parsed each time its passage is read.

    A passage takes 8 bytes of memory, for the offset of its line.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and find its lines; raise RetrievalError if it is missing or empty."""
        self.path = path
        if not path.is_file() or path.stat().st_size == 0:
            raise RetrievalError(
                f"corpus {path} is missing or empty; write it first (one JSON object a line)"
            )
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets = _line_offsets(path.resolve(), self._content)
        self._id_table: tuple[Any, Any] | None = None  # sorted hashes of ids, and their rows
        self._id_table_lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Passage:
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        start = self._offsets[row]
        end = self._offsets[row + 1]
        where = f"{self.path}:{row + 1}"
        if end - start > MAX_LINE_BYTES:
            raise RetrievalError(
                f"{where}: a line of {end - start} bytes; expected at most {MAX_LINE_BYTES}"
            )
        try:
            line = self._content[start:end]
            value = json.loads(line)
            if b"\\u" in line:  # may be half of a surrogate pair, which UTF-8 cannot encode
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise RetrievalError(
                f"{where}: not a JSON line ({error}); each line is one object"
            ) from None
        return parse_passage(value, where)

    def __iter__(self) -> Iterator[Passage]:
        return (self[row] for row in range(len(self)))

    def row_of(self, id: str) -> int | None:
        """Return the row of a passage, or None if no passage has this id.

        If ids are not row numbers, the first call makes a table of all ids, of 16 bytes per passage.
        """
        number = int(id) if id.isdecimal() and len(id) < 19 else -1
        is_row_number = 0 <= number < len(self) and str(number) == id
        if is_row_number and self[number].id == id:
            return number
        with self._id_table_lock:
            if self._id_table is None:
                # If the row of this number has another id, ids are not row numbers.
                if not is_row_number and self._seems_to_have_row_numbers():
                    return None
                self._id_table = self._hash_ids()
        hashes, rows = self._id_table
        first = int(hashes.searchsorted(hash(id), "left"))
        last = int(hashes.searchsorted(hash(id), "right"))
        for row in rows[first:last].tolist():
            if self[row].id == id:
                return int(row)
        return None

    def _seems_to_have_row_numbers(self) -> bool:
        """Return True if the first and the last id are row numbers."""
        last_row = len(self) - 1
        return self[0].id == "0" and self[last_row].id == str(last_row)

    def _hash_ids(self) -> tuple[Any, Any]:
        """Return the sorted hashes of all ids and their rows, int64 `[rows]` each."""
        import numpy as np  # the client, which needs no table, loads without it

        hashes = np.fromiter((hash(passage.id) for passage in self), np.int64)
        order = hashes.argsort(kind="stable")
        return hashes[order], order

    def around(self, id: str, count: int) -> list[Passage]:
        """Return a passage and up to `count` neighbours with the same title on each side.

        The list is empty if no passage has this id.
        """
        row = self.row_of(id)
        if row is None:
            return []
        title = self[row].title
        first = row
        while first > max(0, row - count) and self[first - 1].title == title:
            first -= 1
        last = row
        while last < min(len(self) - 1, row + count) and self[last + 1].title == title:
            last += 1
        return [self[number] for number in range(first, last + 1)]


def _line_offsets(path: Path, content: mmap.mmap) -> Sequence[int]:
    """Return the offset of each line and the end of the file, `[rows + 1]`.

    The offsets of a large corpus are cached in the file `.NAME.rows` in the same folder, with the
    status of the corpus when they were found.
    """
    status = file_status(path)
    cache = path.with_name(f".{path.name}.rows")
    with contextlib.suppress(OSError, ValueError, TypeError), cache.open("rb") as file:
        cached = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast("q")
        cached_offsets = cached[len(status) :]
        is_current = cached[: len(status)].tolist() == status
        if is_current and cached_offsets[0] == 0 and cached_offsets[-1] == len(content):
            return cached_offsets

    offsets = array("q", [0])
    while offsets[-1] < len(content):
        newline = content.find(b"\n", offsets[-1])
        offsets.append(newline + 1 if newline >= 0 else len(content))
    if len(content) >= CACHED_FROM_BYTES:
        # The folder may be read-only.
        with contextlib.suppress(OSError), write_atomically(cache) as temporary:
            temporary.write_bytes(array("q", status).tobytes() + offsets.tobytes())
    return offsets


def write_corpus(path: Path | str, passages: Iterable[Passage]) -> int:
    """Write passages as JSON lines, atomically; return their number.

    Raises:
        RetrievalError: there is no passage, or one has no id or no contents.
    """
    count = 0
    with write_atomically(Path(path)) as temporary, temporary.open("wb") as file:
        for passage in passages:
            count += 1
            row = {"id": passage.id, "contents": passage.contents}
            parse_passage(row, f"{path}:{count}")
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if count == 0:
            raise RetrievalError(f"{path}: no passages to write")
    return count


def copy_corpus(source: Path, path: Path) -> int:
    """Write the passages of a JSON-lines or parquet file as JSON lines; return their number.

    Raises:
        RetrievalError: the columns `id` and `contents` are missing, or a passage is unusable.
    """
    if source.suffix != ".parquet":
        return write_corpus(path, Corpus(source))
    import pyarrow.parquet

    check_regular(source)
    with pyarrow.parquet.ParquetFile(source) as file:
        names = file.schema_arrow.names
        missing = [column for column in ("id", "contents") if column not in names]
        if missing:
            raise RetrievalError(
                f"{source}: no column {' or '.join(missing)}; found {', '.join(names)}"
            )
        try:
            return write_corpus(path, _parquet_passages(source, file))
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            reason = " ".join(str(error).split())
            raise RetrievalError(f"{source}: cannot be read ({reason})") from error


def _parquet_passages(source: Path, file: Any) -> Iterator[Passage]:
    # Few rows at a time, because a dictionary in the file may stand for long texts.
    batches = file.iter_batches(batch_size=256, columns=["id", "contents"])
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, row in enumerate(rows, start=1):
        passage = parse_passage({**row, "id": str(row["id"])}, f"{source}: row {number}")
        size = len(passage.contents.encode())
        if size > MAX_LINE_BYTES:
            raise RetrievalError(
                f"{source}: row {number} has {size} bytes; expected at most {MAX_LINE_BYTES}"
            )
        yield passage
