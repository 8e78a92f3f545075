"""What a job takes that the kernel does not limit by itself: read from /proc between two ticks of its warden."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def threads(process: int) -> int:
    """How many threads a process has."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{process}/task"))
    return 0


def unlinked_bytes(process: int) -> int:
    """What a process's open files without a name take on disk, in bytes."""
    used = 0
    with suppress(OSError):
        for name in os.listdir(folder := f"/proc/{process}/fd"):
            with suppress(OSError):
                status = os.stat(f"{folder}/{name}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    used += status.st_blocks * 512
    return used


def tree_over(proc: int, limit: int) -> bool:
    """Whether all processes that descend from this one hold more than so many bytes of memory together.

    `proc` is an open /proc. Pages that several share count once, which is dear to find out: that is asked only where
    they are over the limit when every process counts its pages as its own.
    """
    tree = list(_descendants(proc, os.readlink("self", dir_fd=proc)))
    resident = sum(
        int((read_proc(proc, f"{process}/statm") or "0 0").split()[1]) for process in tree
    )
    if resident * PAGE_BYTES <= limit:
        return False
    return (
        sum(_proportional_bytes(read_proc(proc, f"{process}/smaps_rollup")) for process in tree)
        > limit
    )


def _descendants(proc: int, process: str) -> Iterator[str]:
    waiting = [process]
    while waiting:
        for thread in _entries(proc, f"{(parent := waiting.pop())}/task"):
            children = read_proc(proc, f"{parent}/task/{thread}/children").split()
            waiting += children
            yield from children


def _proportional_bytes(rollup: str) -> int:
    return next(
        (int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:")), 0
    )


def _entries(proc: int, name: str) -> list[str]:
    with suppress(OSError):
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)
    return []


def read_proc(proc: int, name: str) -> str:
    """A file of `proc`, "" when its process is gone."""
    with suppress(OSError):
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.read(file, 1 << 16).decode()
        finally:
            os.close(file)
    return ""
