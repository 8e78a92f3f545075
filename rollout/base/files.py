"""Atomic files (complete or absent), and one owner per run folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from mcore_mas.rollout.base.failpoints import failpoint

Digest = dict[str, int | str]  # a file's "bytes" and "sha256"

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STRETCH = 16 << 20  # bytes hashed and written at a time


class FolderError(RuntimeError):
    """A folder cannot be used: one line that says what, where, what to do."""


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`: what is written there becomes `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = f".{path.name}.{socket.gethostname()}-"
    temporary = path.with_name(f"{mine}{os.getpid()}.partial")
    for left in path.parent.glob(".*.partial"):  # of this path, by processes that were killed
        owner = left.name.removeprefix(mine).removesuffix(".partial")
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            left.unlink(missing_ok=True)
    try:
        failpoint(f"file.begun:{path.name}")
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        failpoint(f"file.written:{path.name}")
        check_owner(path)
        temporary.replace(path)
        failpoint(f"file.there:{path.name}")
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path, mode: int = 0o700) -> Iterator[Path]:
    """A new folder beside `path`, this user's alone, that takes its place when the block ends without an error."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode, parents=True)
    failpoint(f"folder.begun:{path.name}")
    yield partial
    failpoint(f"folder.written:{path.name}")
    shutil.rmtree(path, ignore_errors=True)
    failpoint(f"folder.removed:{path.name}")
    partial.rename(path)
    failpoint(f"folder.there:{path.name}")


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8, complete or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


_MOST_YAML, _MOST_DEPTH = 4 << 20, 100  # characters of a file with its aliases written out, and levels in each other


def read_yaml(path: Path, reader: Any = _YAML) -> Any:
    """The content of a YAML file of plain values, parsed in C where PyYAML has that, or by another safe reader.

    Raises:
        OSError: it cannot be read.
        yaml.YAMLError: it is none, or far too large or deep, also by what its aliases stand for.
    """
    with path.open(encoding="utf-8") as stream:  # whose name stands in errors
        if os.fstat(stream.fileno()).st_size > _MOST_YAML:
            raise yaml.YAMLError(f"more than {_MOST_YAML} bytes")
        _check_size(yaml.parse(stream, reader))
        stream.seek(0)
        loader = reader(stream)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()


def _check_size(events: Iterable[yaml.Event]) -> None:
    """Refuse what would fill memory, or the stack of a reader in C."""
    known: dict[str | None, float] = {}  # size by anchor; what is not closed yet would be endless
    under_way: list[tuple[str | None, float]] = [(None, 0)]
    for event in events:
        anchor, size = getattr(event, "anchor", None), 1.0
        if isinstance(event, yaml.CollectionStartEvent):
            known[anchor] = math.inf
            under_way.append((anchor, size))
        elif isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            if isinstance(event, yaml.AliasEvent):
                size = known.get(anchor, size)
            elif isinstance(event, yaml.ScalarEvent):
                size += len(event.value)
            else:
                anchor, size = under_way.pop()
            around, so_far = under_way.pop()
            known[anchor] = size
            under_way.append((around, so_far + size))
        if len(under_way) > _MOST_DEPTH or under_way[-1][1] > _MOST_YAML:
            most = f"{_MOST_YAML} characters with its aliases written out, or {_MOST_DEPTH} levels"
            raise yaml.YAMLError(f"more than {most}")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, complete or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path, most: int = 64 << 20) -> Any:
    """The content of a JSON file of at most `most` bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none, or larger, or too deep.
    """
    if path.stat().st_size > most:
        raise ValueError(f"more than {most} bytes")
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("too many brackets in each other") from None


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` as JSON keeps it, with a digest of all else that is in it."""
    plain = {name: own for name, own in json.loads(json.dumps(value)).items() if name != "sha256"}
    return {**plain, "sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def unsealed(value: Any) -> Any:
    """What was `sealed`, and what has no seal as it is.

    Raises:
        ValueError: it is not what was written.
    """
    if not isinstance(value, dict) or "sha256" not in value:
        return value
    if sealed(value) != value:
        raise ValueError("it is not what was written")
    return {name: own for name, own in value.items() if name != "sha256"}


def json_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects in a file's lines from byte `start` on, and where the last whole line ends.

    A line that holds none, as when a process was killed while it wrote, is passed over.
    """
    with path.open("rb") as file:
        file.seek(start)
        whole, end, _ = file.read().rpartition(b"\n")
    rows = []
    for line in whole.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)], start + len(whole) + len(end)


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> Digest:
    """Write `chunks` through to the disk; what was written, digested on the way."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        failpoint(f"chunks.begun:{path.name}")
        for chunk in chunks:
            for first in range(0, len(chunk), _STRETCH):
                stretch = chunk[first : first + _STRETCH]
                digest.update(stretch)
                file.write(stretch)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    failpoint(f"chunks.written:{path.name}")
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


def tree_sha256(folder: Path) -> dict[str, str]:
    """`sha256` of every file below a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def check_tree(folder: Path, written: Mapping[str, str]) -> None:
    """Refuse a folder whose files are not those of an earlier `tree_sha256`; further ones are nobody's concern.

    Raises:
        FolderError: which is not there, or another.
    """
    for name, digest in written.items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            raise FolderError(f"{folder / name}: not there, or not as it was written; train again or bring it back")


def file_stamp(path: Path) -> list[int]:
    """Size, times and inode of a file: as long as they are the same, so is what it holds."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def known_sha256(*paths: Path, again: bool = False) -> str:
    """`sha256` of files, from the stamp `.NAME.sha256` beside the first while sizes, times and inodes are as they were.

    Args:
        again: read the files whatever the stamp says.
    """
    paths = tuple(path.resolve() for path in paths)
    of, stamp = list(map(file_stamp, paths)), paths[0].with_name(f".{paths[0].name}.sha256")
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        said = json.loads(stamp.read_bytes())
        if said["of"] == of and not again:
            return str(said["sha256"])
    found = sha256(*paths)
    with contextlib.suppress(OSError):  # a folder that is read only
        write_json(stamp, {"sha256": found, "of": of})
    return found


BEAT_S = 20.0  # between two signs of life of a folder's owner
_owned: dict[Path, int] = {}  # folders that this process owns, and its epoch there


def epoch_of(path: Path) -> int:
    """The epoch of this process as the owner of a folder around `path`; 0 where it owns none."""
    path = path.absolute()
    return max((epoch for folder, epoch in _owned.items() if path.is_relative_to(folder)), default=0)


def check_owner(path: Path) -> None:
    """Refuse a write below a folder that this process owned until somebody else took it over.

    No lock keeps one out who removed it, or whose file system gave it away because this host was cut off.

    Raises:
        FolderError: who has it now.
    """
    path = path.absolute()
    for folder, epoch in _owned.items():
        if path.is_relative_to(folder):
            record = _record(folder / "lock.json")
            if record.get("epoch", 0) > epoch:
                owner = _owner(record)
                raise FolderError(f"{folder}: taken over by {owner}; this process, of epoch {epoch}, writes no more")


def writable(folder: Path) -> Path:
    """Make `folder`, which is this user's alone if it is new, and return it.

    Raises:
        FolderError: it cannot be made or written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    with path.open("a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            quiet = time.time() - path.stat().st_mtime
            sign = f", which shows no sign of life for {quiet:.0f} s" if quiet > 3 * BEAT_S else ""
            raise FolderError(f"{folder}: in use by {_owner(_record(path))}{sign}; stop it first") from None
        except OSError as error:
            raise FolderError(
                f"{folder}: its file system has no locks ({error.strerror}); choose another results folder"
            ) from error
        _refuse_living(path)
        # later than that of an owner whose record is gone, too
        epoch = max(_record(path).get("epoch", 0) + 1, time.time_ns() // 1_000_000)
        file.truncate(0)
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": now, "epoch": epoch}, file)
        file.flush()
        for partial in folder.rglob(".*.partial"):
            around = next((own for own in partial.parents if (own / "lock.json").exists()), folder)
            if around == folder:  # else a folder in this one has its own owner, who may be writing
                remove_path(partial)
        _owned[folder.absolute()] = epoch
        ended = threading.Event()
        beats = threading.Thread(target=_beat, args=(file.fileno(), ended), name="heartbeat", daemon=True)
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()  # before its descriptor is somebody else's
            del _owned[folder.absolute()]
            if _record(path).get("epoch") == epoch:
                file.truncate(0)
                json.dump({"epoch": epoch}, file)


def _refuse_living(path: Path) -> None:
    """Refuse a folder that this host could lock while its owner, on another one, goes on to show signs of life."""

    def latest() -> float:
        with path.open() as file:  # which has NFS ask its server
            return os.fstat(file.fileno()).st_mtime

    record, last = _record(path), latest()
    if record.get("host", here := socket.gethostname()) == here or time.time() - last > 3 * BEAT_S:
        return
    deadline = time.monotonic() + 1.5 * BEAT_S
    while time.monotonic() < deadline:
        time.sleep(BEAT_S / 20)
        if latest() != last:
            raise FolderError(
                f"{path.parent}: in use by {_owner(record)}, whom no lock keeps others from; stop it first"
            )


def _beat(lock: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with contextlib.suppress(OSError):  # of a file that is closed, or of a file system that is gone for a while
            os.utime(lock)


@contextlib.contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in such a block for `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
