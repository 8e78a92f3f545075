"""Atomic files (complete or absent), and one owner per run folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

Digest = dict[str, int | str]  # a file's "bytes" and "sha256"

_STRETCH = 16 << 20  # bytes hashed and written at a time


class FolderError(RuntimeError):
    """A folder cannot be used: one line that says what, where, what to do."""


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`: what is written there becomes `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path` that takes its place when the block ends without an error."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8, complete or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


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


def sha256(*paths: Path) -> str:
    """Hexadecimal digest of the files' bytes one after another; for one file, what `sha256sum` prints."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


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
        return bool(abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) < 1.0)
    except psutil.NoSuchProcess:
        return False


MEMORY = Path("/dev/shm")  # noqa: S108  (a file system in memory, not a place for temporary files)
_PREFIX = "mcore_mas-weights"


def memory_path() -> Path:
    """A path in shared memory that nobody uses; what ended processes left behind there is removed first."""
    for left in MEMORY.glob(f"{_PREFIX}-*"):
        owner = left.name.split("-")[2]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            with contextlib.suppress(OSError):
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
    return MEMORY / f"{_PREFIX}-{os.getpid()}-{time.monotonic_ns()}"
