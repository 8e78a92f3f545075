"""Reading of Parquet files whose footers announce a bounded size."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

MAX_ROWS = 10_000_000
MAX_BYTES = 64 << 30  # limit of all columns, uncompressed
# pyarrow cannot read more than 2 GiB of text inside lists at once, and the texts of a trajectory
# may take tens of MiB.
_BATCH_ROWS = 64


def bounded_batches(
    file: pq.ParquetFile,
    *,
    rows: int = _BATCH_ROWS,
    columns: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, at most `rows` at a time.

    Args:
        columns: names of the columns; None: all.
        groups: numbers of the row groups; None: all.

    Raises:
        ValueError: the footer announces more than `MAX_ROWS` or `MAX_BYTES`.
    """
    metadata = file.metadata
    if metadata.num_rows > MAX_ROWS:
        raise ValueError(f"{metadata.num_rows} rows; expected at most {MAX_ROWS}")
    size = sum(
        metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)
    )
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes of values; expected at most {MAX_BYTES}")
    yield from file.iter_batches(rows, columns=columns, row_groups=groups)


def bounded_table(
    file: pq.ParquetFile,
    columns: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
) -> pa.Table:
    """Read a file as one table, through `bounded_batches`."""
    batches = list(bounded_batches(file, columns=columns, groups=groups))
    return pa.Table.from_batches(batches) if batches else file.read(columns=columns)
