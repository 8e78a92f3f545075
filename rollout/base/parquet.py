"""Reading of Parquet files whose values have a bounded size."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from retrieval.regular_files import check_regular

MAX_ROWS = 10_000_000
MAX_BYTES = 64 << 30  # limit of all columns, uncompressed
_MEASURED_ROWS = 1 << 16  # rows of references to a dictionary that are read at a time
# Bytes of a value of the types whose values have a fixed size, as Arrow stores them.
_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
# Encodings in which texts take at least as many bytes as decoded. RLE and BIT_PACKED encode where
# lists begin and which values are missing.
_PLAIN_ENCODINGS = frozenset(("PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "RLE", "BIT_PACKED"))
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


def open_parquet(path: Path, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file whose values fit into memory.

    The footer gives the size of the encoded values. Texts that are encoded by a dictionary can be
    far larger once decoded, such as a million references to a text of one megabyte. If they could
    be too large, their decoded size is first computed from the dictionary and the references.

    Args:
        options: further arguments of `pyarrow.parquet.ParquetFile`.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device.
        ValueError: it is not a Parquet file, or its values take more than `MAX_BYTES`.
    """
    check_regular(path)
    file = pq.ParquetFile(path, **options)
    try:
        _check_values(path, file.metadata)
    except BaseException:
        file.close()
        raise
    return file


def _check_values(path: Path, metadata: pq.FileMetaData) -> None:
    """Raise ValueError if the decoded values of a file take more memory than `MAX_BYTES`.

    Texts in a plain encoding are not counted, because `bounded_batches` bounds their encoded size.
    """
    number_bytes = 0
    max_text_bytes = 0  # bytes of the texts if each were as large as its whole column chunk
    text_columns: set[str] = set()
    # Columns in which a text may be encoded as a prefix of the text before and a new end.
    delta_columns: set[str] = set()
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.physical_type in _VALUE_BYTES:
                number_bytes += chunk.num_values * _VALUE_BYTES[chunk.physical_type]
            elif not _PLAIN_ENCODINGS.issuperset(chunk.encodings):
                text_columns.add(chunk.path_in_schema)
                if "DELTA_BYTE_ARRAY" in chunk.encodings:
                    delta_columns.add(chunk.path_in_schema)
                max_text_bytes += chunk.num_values * chunk.total_uncompressed_size
    if number_bytes + max_text_bytes <= MAX_BYTES:
        return

    size = number_bytes
    for column in sorted(text_columns):
        is_delta = column in delta_columns
        size += _column_text_bytes(path, column, is_delta=is_delta, limit=MAX_BYTES - size)
    if size > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes of values, with all repetitions written out")


def _column_text_bytes(path: Path, column: str, *, is_delta: bool, limit: int) -> int:
    """Return the size of a column's texts, repetitions included; stop counting above `limit`.

    Texts are not decoded: their size follows from a dictionary and the references to it. pyarrow
    cannot read a delta encoding as a dictionary, so these texts are decoded, few rows at a time.

    Args:
        is_delta: True if a chunk of the column has a delta encoding.
    """
    dictionaries = [] if is_delta else [column]
    rows = _BATCH_ROWS if is_delta else _MEASURED_ROWS
    size = 0
    with pq.ParquetFile(path, read_dictionary=dictionaries) as file:
        for batch in file.iter_batches(rows, columns=[column]):
            size += _text_bytes(batch.column(0))
            if size > limit:
                break
    return size


def _text_bytes(array: pa.Array) -> int:
    """Return the size of the texts in the only leaf of an array, repetitions included."""
    while pa.types.is_nested(array.type):
        array = array.field(0) if pa.types.is_struct(array.type) else array.flatten()
    if not pa.types.is_dictionary(array.type):
        return int(array.nbytes)
    lengths = pc.binary_length(array.dictionary).cast(pa.int64())
    return pc.sum(lengths.take(array.indices)).as_py() or 0


def bounded_table(
    file: pq.ParquetFile,
    columns: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
) -> pa.Table:
    """Read a file as one table, through `bounded_batches`."""
    batches = list(bounded_batches(file, columns=columns, groups=groups))
    return pa.Table.from_batches(batches) if batches else file.read(columns=columns)
