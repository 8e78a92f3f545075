"""Passage corpora in Search-R1's JSON-lines format, where a passage's row number is its vector id."""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.base.files import atomic_path, file_stamp

MOST_LINE = 16 << 20  # bytes of a passage
KEPT_FROM = 1 << 26  # bytes of a corpus from which it takes a while to find its rows


class RetrievalError(Exception):
    """A corpus, index, encoder or request is wrong; the message says what, where and what to do."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage; `contents` is `"Title"` in double quotes, a newline, then the text."""

    id: str
    contents: str
    score: float | None = None  # inner product with the query; None where no query is involved
    about: dict[str, Any] = field(
        default_factory=dict, compare=False
    )  # whatever else its line says

    @classmethod
    def compose(cls, id: str, title: str, text: str) -> Passage:
        """The passage with this title and text, in the corpus's own layout."""
        return cls(id=id, contents=f'"{title}"\n{text}')

    @property
    def title(self) -> str:
        """The first line, without the double quotes around it."""
        line = self.contents.partition("\n")[0].strip()
        return line[1:-1] if len(line) >= 2 and line[0] == line[-1] == '"' else line

    @property
    def text(self) -> str:
        """Everything after the first line."""
        return self.contents.partition("\n")[2]

    def facts(self) -> Iterator[tuple[str, str]]:
        """(Name, value) of all that it can be filtered by: its title, and what its line says; of a list each value."""
        yield "title", self.title
        for name, value in self.about.items():
            for one in value if isinstance(value, list) else [value]:
                yield name, one if isinstance(one, str) else json.dumps(one)


def parse_row(row: Any, where: str) -> Passage:
    """The passage in one JSON line that says `row`; raises RetrievalError that opens with `where` (file:line)."""
    if not isinstance(row, dict):
        raise RetrievalError(
            f"{where}: got a {type(row).__name__}, expected an object with 'id' and 'contents'"
        )
    for key in ("id", "contents"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise RetrievalError(
                f"{where}: {key!r} is {row.get(key)!r}, expected a non-empty string"
            )
    about = {
        name: value
        for name, value in row.items()
        if name not in ("id", "contents") and value is not None
    }
    return Passage(id=row["id"], contents=row["contents"], about=about)


class Corpus:
    """A corpus on disk: rows are found by offset and parsed when asked for, so memory stays at 8 bytes a row.

    The offsets of a large one are kept in `.NAME.rows` beside it, and used as long as the file does not change.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file and finds its rows; raises RetrievalError if it is missing or empty."""
        self.path = path
        if not path.is_file() or path.stat().st_size == 0:
            raise RetrievalError(
                f"corpus {path} is missing or empty; write it first (one JSON object a line)"
            )
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._by_id: tuple[Any, Any] | None = None  # hashes of ids in order, and their rows
        self._finding_ids = threading.Lock()
        self._starts = _row_starts(path.resolve(), self._bytes)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> Passage:
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        first, end = self._starts[row : row + 2]
        where = f"{self.path}:{row + 1}"
        if end - first > MOST_LINE:
            raise RetrievalError(
                f"{where}: a line of {end - first} bytes; expected at most {MOST_LINE}"
            )
        try:
            line = self._bytes[first:end]
            said = json.loads(line)
            if b"\\u" in line:  # may say half of a surrogate pair, which no answer can
                json.dumps(said, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise RetrievalError(
                f"{where}: not a JSON line ({error}); each line is one object"
            ) from None
        return parse_row(said, where)

    def row_of(self, id: str) -> int | None:
        """The row of a passage; where ids are not row numbers, a table of all is made at the first call."""
        number = int(id) if id.isdecimal() and len(id) < 19 else -1
        if 0 <= number < len(self) and self[number].id == id:
            return number
        with self._finding_ids:
            self._by_id = self._by_id or self._hashed_ids()
        hashes, rows = self._by_id
        first, last = (int(hashes.searchsorted(hash(id), side)) for side in ("left", "right"))
        return next((row for row in rows[first:last].tolist() if self[row].id == id), None)

    def _hashed_ids(self) -> tuple[Any, Any]:
        """`[rows]` int64 each, 16 bytes a passage; of none where ids are row numbers."""
        import numpy as np  # which those who read a corpus on its own need not have

        numbered = self[0].id == "0" and self[len(self) - 1].id == str(len(self) - 1)
        hashes = np.fromiter((hash(passage.id) for passage in (() if numbered else self)), np.int64)
        order = hashes.argsort(kind="stable")
        return hashes[order], order

    def around(self, id: str, most: int) -> list[Passage]:
        """The passage, and up to `most` before and after it that have its title; [] if there is none."""
        row = self.row_of(id)
        if row is None:
            return []
        title, found = self[row].title, [self[row]]
        for step in (-1, 1):
            for place in range(row + step, row + step * (most + 1), step):
                if not 0 <= place < len(self) or self[place].title != title:
                    break
                found.insert(0 if step < 0 else len(found), self[place])
        return found

    def __iter__(self) -> Iterator[Passage]:
        return (self[row] for row in range(len(self)))


def _row_starts(path: Path, content: mmap.mmap) -> Sequence[int]:
    """`[rows + 1]`, the byte at which each row begins, then the end."""
    of, kept = file_stamp(path), path.with_name(f".{path.name}.rows")
    with contextlib.suppress(OSError, ValueError, TypeError), kept.open("rb") as file:
        known = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast("q")
        if known[: len(of) + 1].tolist() == [*of, zlib.crc32(known[len(of) + 1 :])]:
            return known[len(of) + 1 :]
    starts = array("q", [0])
    while starts[-1] < len(content):
        newline = content.find(b"\n", starts[-1])
        starts.append(newline + 1 if newline >= 0 else len(content))
    if len(content) >= KEPT_FROM:
        with (
            contextlib.suppress(OSError),
            atomic_path(kept) as temporary,
        ):  # a folder that is read only
            temporary.write_bytes(
                array("q", [*of, zlib.crc32(starts)]).tobytes() + starts.tobytes()
            )
    return starts


def write_corpus(path: Path | str, passages: Iterable[Passage]) -> int:
    """Writes passages as JSON lines, atomically; returns how many. Raises RetrievalError on an unusable passage."""
    count = 0
    with atomic_path(Path(path)) as temporary, temporary.open("wb") as file:
        for count, passage in enumerate(passages, start=1):
            line = {"id": passage.id, "contents": passage.contents, **passage.about}
            parse_row(line, f"{path}:{count}")
            file.write(json.dumps(line, ensure_ascii=False, default=str).encode() + b"\n")
        if count == 0:
            raise RetrievalError(f"{path}: no passages to write")
    return count


def copy_corpus(source: Path, path: Path) -> int:
    """Write the passages of a JSON-lines or parquet file, with columns `id` and `contents`, as JSON lines; how many.

    Raises:
        RetrievalError: it lacks a column, or a passage is unusable.
    """
    if source.suffix != ".parquet":
        return write_corpus(path, Corpus(source))
    import pyarrow.parquet

    from rollout.base.parquet import bounded_batches

    with pyarrow.parquet.ParquetFile(source) as file:
        columns, there = ["id", "contents"], file.schema_arrow.names
        if missing := [column for column in columns if column not in there]:
            raise RetrievalError(
                f"{source}: no column {' or '.join(missing)}; found {', '.join(there)}"
            )
        rows = enumerate(
            row for batch in bounded_batches(source, file, rows=4096) for row in batch.to_pylist()
        )
        passages = (
            parse_row({**row, "id": str(row["id"])}, f"{source}: row {n}") for n, row in rows
        )
        try:
            return write_corpus(path, passages)
        except (OSError, ValueError) as error:  # pyarrow's, too
            raise RetrievalError(
                f"{source}: cannot be read ({' '.join(str(error).split())})"
            ) from error
