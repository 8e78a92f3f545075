"""Files that appear whole or not at all, and their fingerprints."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is flushed to disk and renamed to `path`, else removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a binary file that becomes `path` when the block ends without an error."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        yield file


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented UTF-8 JSON, atomically."""
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def sha256_files(*paths: Path) -> str:
    """Hex sha256 of the files' bytes one after another; for one file, what `sha256sum` prints."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
