"""This user's folder in shared memory, where weights lie on their way to an engine."""

import os
import stat
import time
from pathlib import Path

import psutil

from rollout.base.ownership import FolderError, remove_path

MEMORY = Path("/dev/shm")  # noqa: S108  (a file system in memory, not a place for temporary files)


def memory_path() -> Path:
    """Return an unused path in this user's folder in shared memory.

    Files of processes that have ended are removed first.

    Raises:
        FolderError: the folder belongs to another user, or other users can read it.
    """
    folder = _user_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise FolderError(
            f"{folder}: must be a folder of user {os.getuid()} with mode 0700; ask its owner or the "
            "administrator to remove it"
        )
    for path in folder.iterdir():
        pid = path.name.partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            remove_path(path)
    return folder / f"{os.getpid()}-{time.monotonic_ns()}"


def remove_memory_files(pid: int) -> None:
    """Remove the files of a process, which must have ended, from shared memory."""
    for path in _user_folder().glob(f"{pid}-*"):
        remove_path(path)


def _user_folder() -> Path:
    return MEMORY / f"mcore_mas-{os.getuid()}"
