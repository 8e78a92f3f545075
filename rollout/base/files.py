"""Files and folders that are written completely or not at all."""

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from rollout.base.failpoints import failpoint
from rollout.base.ownership import FolderError


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; its file replaces `path` when the block ends without an error.

    Parent folders are created. The file and its name are on disk when the block has ended.

    Raises:
        OSError: the file cannot be written; the error names `path`, its folder or the temporary path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.{socket.gethostname()}-"
    _remove_abandoned(path.parent, prefix)
    temporary = path.with_name(f"{prefix}{os.getpid()}.partial")
    try:
        failpoint(f"file.begun:{path.name}")
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        failpoint(f"file.written:{path.name}")
        temporary.replace(path)
        failpoint(f"file.there:{path.name}")
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        # A full disk raises an error without the name of the file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove temporary files with this prefix whose process on this machine was killed."""
    for file in folder.glob(".*.partial"):
        pid = file.name.removeprefix(prefix).removesuffix(".partial")
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path, mode: int = 0o700) -> Iterator[Path]:
    """Yield a new folder beside `path`; it replaces `path` when the block ends without an error.

    After an error in the block, `path` is as before, and the partial folder stays until the next call
    for `path`. A process that is killed between the removal of the old folder and the renaming of the
    new one leaves no `path`, but never a partial one.

    Args:
        mode: permissions; by default only this user has access.
    """
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
    """Write a UTF-8 file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, which flushing its files does not do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def ensure_writable(folder: Path) -> Path:
    """Create a folder for this user alone unless it exists, and return it.

    Raises:
        FolderError: it cannot be created or written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FolderError(
            f"{folder}: cannot write here ({error.strerror}); "
            "choose another results folder, or change its permissions"
        ) from error
    return folder


def check_output_path(path: Path) -> None:
    """Check that a file or folder can be written at a path, without writing anything.

    Parent folders that are missing can be made if the first one that exists can be written.

    Raises:
        FolderError: it cannot be written.
    """
    folder = path.absolute()
    # `lexists` is also False if the user may not search the parent folder.
    while not os.path.lexists(folder):
        folder = folder.parent
    if folder == path.absolute() and not folder.is_dir():
        folder = folder.parent  # a file is replaced
    if not folder.is_dir():
        raise FolderError(
            f"{path}: cannot be written, because {folder} is no folder; name another path"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FolderError(
            f"{path}: cannot be written, because you may not write to {folder}; name another path, "
            "or change its permissions"
        )


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of `path` among the processes of this machine; wait until it is free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
