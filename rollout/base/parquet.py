"""Parquet files within bounds: a few bytes in one can stand for any text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_LEAST_BYTES, _MOST_TIMES = (
    1 << 30,
    200,
)  # that a file may become in memory, and of its size on disk
_TOGETHER = (
    1 << 29
)  # bytes that are read at a time: pyarrow reads no more than 2 GiB of text inside lists


def bounded_batches(
    path: Path,
    file: pq.ParquetFile,
    *,
    rows: int = 256,
    columns: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """What a file has, at most `rows` at a time, unless that is absurdly more than it takes on disk.

    Raises:
        ValueError: it is, by its footer or by what comes of it.
    """
    size, on_disk = 0, path.stat().st_size
    most = max(_LEAST_BYTES, _MOST_TIMES * on_disk)
    parts = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
    told = [part.total_byte_size for part in parts]
    if sum(told) > most:
        raise ValueError(f"its {on_disk} bytes become more than {most}")
    together = min(
        (part.num_rows * _TOGETHER // max(1, part.total_byte_size) for part in parts), default=rows
    )
    # of which each may be what all of a group is on disk
    rows = max(1, min(rows, together, most // max([1, *told])))
    for batch in file.iter_batches(rows, columns=columns, row_groups=groups):
        size += batch.nbytes
        if size > most:
            raise ValueError(f"its {on_disk} bytes become more than {most}")
        yield batch


def bounded_table(
    path: Path,
    file: pq.ParquetFile,
    columns: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
) -> pa.Table:
    """`bounded_batches` as one table."""
    batches = [*bounded_batches(path, file, columns=columns, groups=groups)]
    return pa.Table.from_batches(batches) if batches else file.read(columns=columns)
