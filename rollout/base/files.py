"""Files that are complete or absent, and one owner per run folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

Digest = dict[str, int | str]  # a file's "bytes" and "sha256"

_STRETCH = 16 << 20  # bytes hashed and written at a time


class FolderError(RuntimeError):
    """A folder cannot be used: one line that says what, where, what to do."""


def write_text(path: Path, text: str) -> None:
    """Write `text`, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, complete or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> Digest:
    """Write `chunks` through to the disk; what was written, digested on the way."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            for first in range(0, len(chunk), _STRETCH):
                stretch = chunk[first : first + _STRETCH]
                digest.update(stretch)
                file.write(stretch)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync_folder(folder: Path) -> None:
    """See that the names in `folder` are on disk, as its files' contents are."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def writable(folder: Path) -> Path:
    """Make `folder` and return it.

    Raises:
        FolderError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FolderError(
            f"{folder}: cannot write here ({error.strerror}); choose another results folder or its rights"
        ) from error
    return folder


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own `folder` for the block. A dead owner's lock is taken over; a living owner's, or another host's, is not.

    Raises:
        FolderError: somebody else owns it.
    """
    path = folder / "lock.json"
    me = psutil.Process()
    mine = {"host": socket.gethostname(), "pid": me.pid, "started": me.create_time()}
    while True:
        try:
            with open(path, "x") as file:  # noqa: PTH123  (exclusive creation)
                json.dump(mine, file)
            break
        except FileExistsError:
            owner = _read(path)
            if owner and _alive(owner):
                who = f"process {owner['pid']} on {owner['host']}"
                raise FolderError(f"{folder}: in use by {who}; stop it, or remove {path} if it is gone") from None
            path.unlink(missing_ok=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}  # removed meanwhile, or its writer died while writing


def _alive(owner: dict[str, Any]) -> bool:
    if owner["host"] != socket.gethostname():
        return True  # not provably dead
    try:
        return abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) < 1.0
    except psutil.NoSuchProcess:
        return False
