"""Conversion of downloaded data files: rows that can be used, each once, in one file."""

import gzip
import json
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mcore_mas.pipeline.hub import AcquireError
from mcore_mas.pipeline.sources import Source
from rollout.base.files import atomic_path
from rollout.base.json_files import write_json
from rollout.records.files import RecordError
from rollout.tasks.fields import BadRow
from rollout.tasks.files import FORMATS, problem_task
from rollout.tasks.leaks import tokenize
from rollout.tasks.rows import read_rows

_BATCH_ROWS = 256
_COPY_BYTES = 1 << 24
_TAR_MAGIC_AT = slice(257, 262)  # position of "ustar" in the first block of a tar archive


@dataclass(slots=True)
class RowCounts:
    """Counts of the rows of a data file.

    Attributes:
        rows: rows with the values that the source selects.
        kept: rows that can be used, each once.
        duplicates: rows with the id, question and answer of a kept one.
        repeated: kept rows with the question of another kept one, ignoring case, spacing and
            LaTeX's marks.
        dropped: other rows by the reason why they are left out.
    """

    rows: int = 0
    kept: int = 0
    duplicates: int = 0
    repeated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        """Count a row that cannot be used."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def convert(files: Sequence[Path], source: Source, out: Path) -> RowCounts:
    """Write the usable rows of downloaded files as one file, with their columns unchanged.

    Args:
        out: .parquet, .json or .jsonl file.

    Raises:
        AcquireError: a file cannot be read, the number of rows is not the source's, or no row can
            be used.
    """
    counts = RowCounts()
    with atomic_path(out) as temporary:
        try:
            all_parquet = all(file.suffix == ".parquet" for file in files)
            schema = pq.read_schema(files[0]) if all_parquet else None
            rows = _usable_rows(files, source, counts)
            _write_rows(temporary, out.suffix, rows, schema)
        except (RecordError, pa.ArrowException) as error:
            raise AcquireError(f"{source.repository}: {error}") from error
        _check_counts(str(source.repository), source, counts, source.rows)
    return counts


def check_data(path: Path, source: Source) -> RowCounts:
    """Count the rows of a data file that existed before its acquisition.

    Raises:
        AcquireError: the file cannot be read, or no row can be used.
    """
    counts = RowCounts()
    # `convert` has left only drawn rows in the file, so none are drawn here.
    undrawn = source.model_copy(update={"drawn": None})
    try:
        for _ in _usable_rows([path], undrawn, counts):
            pass
    except RecordError as error:
        raise AcquireError(f"{error}; remove it to have it fetched") from error
    # The user may have made the file in another way, so any number of rows is accepted.
    _check_counts(str(path), source, counts, expected_rows=None)
    return counts


def _check_counts(where: str, source: Source, counts: RowCounts, expected_rows: int | None) -> None:
    if expected_rows is not None and counts.rows != expected_rows:
        raise AcquireError(
            f"{where}: {counts.rows} rows, expected {expected_rows}; "
            "see revision and rows in sources.yaml"
        )
    if not counts.kept:
        reasons = ", ".join(counts.dropped) or "it has none"
        raise AcquireError(
            f"{where}: no row of format {source.format} ({reasons}); "
            "see its columns and sources.yaml"
        )


def _usable_rows(
    files: Sequence[Path], source: Source, counts: RowCounts
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows that make a task, each once; count all rows."""
    data_format = FORMATS[str(source.format)]
    drawn = None if source.drawn is None else _drawn_rows(source)
    identity_by_id: dict[str, int] = {}  # hash of prompt and answers by task id
    prompts: set[str] = set()
    for row in _selected_rows(files, source):
        counts.rows += 1
        if drawn is not None and counts.rows - 1 not in drawn:
            counts.drop("is not drawn")
            continue
        try:
            problem = data_format.problem(row)
        except BadRow as error:
            # The message continues with values of the row, which would make each reason unique.
            reason = re.split(r":| \(", str(error))[0]
            counts.drop(reason)
            continue
        if problem is None:
            counts.drop("has nothing to score")
            continue

        task = problem_task(problem, data_format.env, "test", problem.source)
        identity = hash((task.prompt, task.answers))
        if task.id in identity_by_id:
            if identity_by_id[task.id] == identity:
                counts.duplicates += 1
            else:
                counts.drop("repeats the question of another row with another answer")
            continue
        identity_by_id[task.id] = identity

        prompt = " ".join(tokenize(task))
        if prompt in prompts:
            counts.repeated += 1
        prompts.add(prompt)
        counts.kept += 1
        yield row


def _drawn_rows(source: Source) -> set[int]:
    """Return the numbers of the rows that the authors draw, with NumPy's legacy generator."""
    assert source.drawn is not None
    count, seed = source.drawn
    drawn = np.random.RandomState(seed).choice(source.rows or 0, count, replace=False)
    return set(drawn.tolist())


def _selected_rows(files: Sequence[Path], source: Source) -> Iterator[Mapping[str, Any]]:
    """Yield the rows with the values that the source selects."""
    for file in files:
        for row in read_rows(file):
            if all(str(row.get(column)) == value for column, value in source.where.items()):
                yield row


def _write_rows(
    path: Path, suffix: str, rows: Iterable[Mapping[str, Any]], schema: pa.Schema | None
) -> None:
    if suffix == ".json":
        write_json(path, list(rows))
        return
    if suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(f"{json.dumps(row, ensure_ascii=False, default=str)}\n")
        return

    if schema is None:
        rows = list(rows)
        schema = pa.Table.from_pylist(rows).schema
    remaining = iter(rows)
    with pq.ParquetWriter(path, schema) as writer:
        while batch := list(islice(remaining, _BATCH_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def assemble(parts: Sequence[Path], out: Path) -> None:
    """Join downloaded parts to one file and remove them; .gz parts are unpacked.

    A part that is a tar archive contributes the one file in it.

    Raises:
        AcquireError: an archive is damaged, or has several files.
    """
    with atomic_path(out) as temporary, temporary.open("wb") as target:
        for part in parts:
            try:
                with gzip.open(part) if part.suffix == ".gz" else part.open("rb") as stream:
                    _append(stream, target, part)
            except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
                raise AcquireError(
                    f"{part}: damaged ({error}); remove it to have it fetched again"
                ) from error
    for part in parts:
        part.unlink()


def _append(stream: Any, target: IO[bytes], part: Path) -> None:
    """Append a stream, or the only file in it if it is a tar archive."""
    if stream.peek(_TAR_MAGIC_AT.stop)[_TAR_MAGIC_AT] != b"ustar":
        shutil.copyfileobj(stream, target, _COPY_BYTES)
        return
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        files = 0
        for member in archive:
            content = archive.extractfile(member)
            if content is None:  # a folder
                continue
            files += 1
            if files > 1:
                raise AcquireError(f"{part}: an archive of several files; expected one")
            shutil.copyfileobj(content, target, _COPY_BYTES)
