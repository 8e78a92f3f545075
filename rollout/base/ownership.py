"""One owner per folder, by a lock of the kernel.

Each owner has an epoch, a number larger than those of all owners before. Checkpoints and done.json record it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from retrieval.regular_files import read_regular_bytes

_LOCK = "lock.json"
_ASKING_S = 0.1  # within which another process's `is_owned` gives the lock back
_epochs: dict[Path, int] = {}  # of this process, by the absolute path of the folder that it owns


class FolderError(RuntimeError):
    """A folder cannot be used: one line that says what is wrong, where, and what to do."""


def private_folder_error(folder: Path) -> str:
    """Return why a folder cannot be read, with its owner; "" if it can be read or does not exist."""
    if not folder.is_dir() or os.access(folder, os.R_OK | os.X_OK):
        return ""
    try:
        owner = folder.owner()
    except KeyError:  # a container need not know the users of its host
        owner = f"user {folder.stat().st_uid}"
    return f"{folder}: not readable here; it belongs to {owner}, who can open it (chmod -R a+rX)"


def epoch_of(path: Path) -> int:
    """Return the epoch of this process as the owner of a folder around `path`; 0 if it owns none."""
    path = path.absolute()
    return max(
        (epoch for folder, epoch in _epochs.items() if path.is_relative_to(folder)), default=0
    )


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own `folder` for the block, by a lock that the kernel releases when this process ends, however it ends.

    The lock holds between processes, containers and hosts that share the file system. On NFS mounted with `local_lock`
    it holds on one host only. The file lock.json names the owner, for messages, and holds the last epoch; ownership
    does not depend on its content. Within the block, `epoch_of` returns the epoch of this owner.

    Files that a killed owner was writing (`.*.partial`) are removed.

    Raises:
        FolderError: another process owns the folder, its file system has no locks, or lock.json cannot be written.
    """
    lock = folder / _LOCK
    with lock.open("ab", buffering=0) as file:
        try:
            _take(file)
        except BlockingIOError:
            owner = _describe_owner(_read_record(lock))
            raise FolderError(f"{folder}: in use by {owner}; stop it first") from None
        except OSError as error:
            raise FolderError(
                f"{folder}: its file system has no locks ({error.strerror}); choose another results folder"
            ) from error

        epoch = _next_epoch(_read_record(lock))
        record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "epoch": epoch,
        }
        try:
            file.truncate(0)
            file.write(json.dumps(record).encode())
        except OSError as error:
            raise FolderError(
                f"{lock}: cannot be written ({error.strerror}); make room, and run it again"
            ) from error

        _remove_partial_files(folder)
        _epochs[folder.absolute()] = epoch
        try:
            yield
        finally:
            del _epochs[folder.absolute()]
            # On a full disk, the next epoch comes from the clock.
            with contextlib.suppress(OSError):
                file.truncate(0)
                file.write(json.dumps({"epoch": epoch}).encode())


def _take(file: BinaryIO) -> None:
    """Lock a file; raise BlockingIOError if another process has the lock for longer than `is_owned` does."""
    deadline = time.monotonic() + _ASKING_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_ASKING_S / 10)


def is_owned(folder: Path) -> bool:
    """Return True if a process owns a folder.

    The only way to ask is to take a shared lock for a moment, which a process that wants to own the
    folder then waits for.
    """
    lock = folder / _LOCK
    if not lock.is_file():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _next_epoch(record: Mapping[str, Any]) -> int:
    """Return an epoch that is larger than that of the owner before, even if the record of that owner is gone."""
    earlier = record.get("epoch", 0)
    milliseconds = time.time_ns() // 1_000_000
    return max(earlier + 1, milliseconds) if isinstance(earlier, int) else milliseconds


def _remove_partial_files(folder: Path) -> None:
    for partial in folder.rglob(".*.partial"):
        innermost = next(path for path in partial.parents if (path / _LOCK).exists())
        if innermost == folder:  # else a folder inside this one has an owner, who may be writing
            remove_path(partial)


def remove_path(path: Path) -> None:
    """Remove a file or a folder as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _read_record(lock: Path) -> dict[str, Any]:
    """Read the owner's record from a lock; {} if the owner is writing it just now, or if it is damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads(read_regular_bytes(lock))
        if isinstance(record, dict):
            return record
    return {}


def _describe_owner(record: Mapping[str, Any]) -> str:
    if {"pid", "host", "since"} <= record.keys():
        return f"process {record['pid']} on {record['host']!r} since {record['since']}"
    return "another process"
