"""One owner per run folder: a lock, signs of life, and an epoch by which writes of a lost owner are refused."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class FolderError(RuntimeError):
    """A folder cannot be used: one line that says what, where, what to do."""


BEAT_S = 20.0  # between two signs of life of a folder's owner
_owned: dict[Path, int] = {}  # folders that this process owns, and its epoch there
_read: dict[
    Path, tuple[int, int, int]
] = {}  # of their locks, what `_state` was when it was last read whose they are


def epoch_of(path: Path) -> int:
    """The epoch of this process as the owner of a folder around `path`; 0 where it owns none."""
    return max((epoch for folder, epoch in _owned.items() if _inside(path, folder)), default=0)


def check_owner(path: Path) -> None:
    """Refuse a write below a folder that this process owned until somebody else took it over.

    No lock keeps one out who removed it, or whose file system gave it away because this host was cut off.

    Raises:
        FolderError: who has it now.
    """
    for folder, epoch in _owned.items():
        if _inside(path, folder) and (state := _state(lock := folder / "lock.json")) != _read.get(
            folder
        ):
            record = _record(lock)
            if record.get("epoch", 0) > epoch:
                owner = _owner(record)
                raise FolderError(
                    f"{folder}: taken over by {owner}; this process, of epoch {epoch}, writes no more"
                )
            _read[folder] = state


def _inside(path: Path, folder: Path) -> bool:
    """Whether a path is the absolute `folder` or below it, as their texts say."""
    return f"{path if path.is_absolute() else path.absolute()}/".startswith(f"{folder}/")


def _state(lock: Path) -> tuple[int, int, int]:
    """Which file it is, when it changed, and its bytes; zeros where there is none."""
    try:
        descriptor = os.open(
            lock, os.O_RDONLY
        )  # to be opened has NFS ask its server, in place of its own memory
    except OSError:
        return 0, 0, 0
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own `folder` for the block, by a lock that the kernel releases when this process ends, however it ends.

    The lock holds between hosts and containers where their file systems are one. Who has it stands in lock.json, with
    the owner's epoch, which is later than those of all owners before, so that `check_owner` can refuse one that has
    lost the folder. Otherwise what it says decides nothing. While the owner lives, its time of change does not grow old
    by more than `BEAT_S`, which tells others of one that is stopped, or of one on another host whose lock holds there
    alone (NFS with `local_lock`): a start waits for its next sign of life. What a killed owner was writing is removed.

    Raises:
        FolderError: somebody else owns it, or its file system has no locks.
    """
    path = folder / "lock.json"
    with path.open("ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            quiet = time.time() - path.stat().st_mtime
            sign = f", which shows no sign of life for {quiet:.0f} s" if quiet > 3 * BEAT_S else ""
            raise FolderError(
                f"{folder}: in use by {_owner(_record(path))}{sign}; stop it first"
            ) from None
        except OSError as error:
            raise FolderError(
                f"{folder}: its file system has no locks ({error.strerror}); choose another results folder"
            ) from error
        _refuse_living(path)
        # later than that of an owner whose record is gone, too
        epoch = max(_record(path).get("epoch", 0) + 1, time.time_ns() // 1_000_000)
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        record = {"host": socket.gethostname(), "pid": os.getpid(), "since": now, "epoch": epoch}
        try:
            file.truncate(0)
            file.write(json.dumps(record).encode())
        except OSError as error:
            raise FolderError(
                f"{path}: cannot be written ({error.strerror}); make room, and run it again"
            ) from error
        for partial in folder.rglob(".*.partial"):
            around = next((own for own in partial.parents if (own / "lock.json").exists()), folder)
            if around == folder:  # else a folder in this one has its own owner, who may be writing
                remove_path(partial)
        _owned[folder.absolute()] = epoch
        ended = threading.Event()
        beats = threading.Thread(
            target=_beat, args=(file.fileno(), ended), name="heartbeat", daemon=True
        )
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()  # before its descriptor is somebody else's
            del _owned[folder.absolute()]
            _read.pop(folder.absolute(), None)
            if _record(path).get("epoch") == epoch:
                with contextlib.suppress(
                    OSError
                ):  # of a full disk: the next owner's epoch is the clock's
                    file.truncate(0)
                    file.write(json.dumps({"epoch": epoch}).encode())


def _refuse_living(path: Path) -> None:
    """Refuse a folder that this host could lock while its owner, on another one, goes on to show signs of life."""
    record, last = _record(path), _state(path)
    quiet = time.time() - last[1] / 1e9
    if record.get("host", here := socket.gethostname()) == here or quiet > 3 * BEAT_S:
        return
    deadline = time.monotonic() + 1.5 * BEAT_S
    while time.monotonic() < deadline:
        time.sleep(BEAT_S / 20)
        if _state(path) != last:
            raise FolderError(
                f"{path.parent}: in use by {_owner(record)}, whom no lock keeps others from; stop it first"
            )


def _beat(lock: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with contextlib.suppress(
            OSError
        ):  # of a file that is closed, or of a file system that is gone for a while
            os.utime(lock)


def remove_path(path: Path) -> None:
    """Remove a file or a folder as far as can be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


_RECORD_CHARS = 1000


def _record(path: Path) -> dict[str, Any]:
    """What a lock says of its owner; nothing where somebody is just writing it, or where it is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads(path.read_text(encoding="utf-8", errors="replace")[:_RECORD_CHARS])
        if isinstance(record, dict) and type(record.get("epoch", 0)) is int:
            return record
    return {}


def _owner(record: Mapping[str, Any]) -> str:
    try:
        return f"process {int(record['pid'])} on {str(record['host'])[:100]!r} since {str(record['since'])[:30]}"
    except (ValueError, LookupError, TypeError):
        return "another process"
