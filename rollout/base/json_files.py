"""JSON files: written atomically, with a digest of their content where they must not be changed."""

import codecs
import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrieval.regular_files import MAX_REGULAR_BYTES, open_regular, read_regular_bytes
from rollout.base.files import write_text
from rollout.base.ownership import FolderError

_DIGEST_KEY = "sha256"


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path, max_bytes: int = MAX_REGULAR_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device.
        ValueError: it is not JSON, is larger than `max_bytes`, or is nested too deeply.
    """
    content = read_regular_bytes(path, max_bytes)
    try:
        return json.loads(content.removeprefix(codecs.BOM_UTF8))
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def read_json_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read the JSON objects of a file of lines from byte `start` on.

    A line that holds no object is skipped, such as one that a killed process wrote in part.

    Returns:
        The objects, and the byte at which the last complete line ends.
    """
    with open_regular(path) as file:
        file.seek(start)
        lines, newline, _ = file.read().rpartition(b"\n")
    rows = []
    for line in lines.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows, start + len(lines) + len(newline)


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value as JSON stores it, with the digest of its content under `sha256`."""
    stored = json.loads(json.dumps(value))
    stored.pop(_DIGEST_KEY, None)
    digest = hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()
    return {**stored, _DIGEST_KEY: digest}


def unsealed(value: Any) -> Any:
    """Check the digest of a `sealed` value and remove it; return other values unchanged.

    Raises:
        ValueError: the value has changed since it was sealed.
    """
    if not isinstance(value, dict) or _DIGEST_KEY not in value:
        return value
    if sealed(value) != value:
        raise ValueError("its content has changed since it was written")
    return {key: content for key, content in value.items() if key != _DIGEST_KEY}


def read_record(path: Path, *keys: str) -> dict[str, Any]:
    """Read the object that a stage has written, sealed or not.

    Raises:
        FolderError: the file is damaged, or lacks one of `keys`.
    """
    try:
        record = read_json(path)
        if not isinstance(record, dict):
            raise ValueError("it is not a JSON object")
        # An unsealed record may have digests of files under the same key, as an object.
        if isinstance(record.get(_DIGEST_KEY), str):
            record = unsealed(record)
        for key in keys:
            if key not in record:
                raise ValueError(f"it has no {key}")
    except (OSError, ValueError) as error:
        raise FolderError(
            f"{path}: damaged ({' '.join(str(error).split())}); remove it and have it made again"
        ) from error
    return dict(record)
