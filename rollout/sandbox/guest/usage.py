"""Resources of a job that the kernel does not limit, as the warden reads them from /proc."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BLOCK_BYTES = 512  # unit of st_blocks
_MAX_PROC_FILE_BYTES = 1 << 16


def thread_count(pid: int) -> int:
    """Return the number of threads of a process; 0 if it has ended."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def unlinked_bytes(pid: int) -> int:
    """Return the size on disk of a process's open files that have no name any more."""
    total = 0
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                status = os.stat(f"{folder}/{name}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    total += status.st_blocks * _BLOCK_BYTES
    return total


def tree_exceeds(proc: int, max_bytes: int) -> bool:
    """Return True if all descendants of this process hold more than `max_bytes` of memory together.

    Pages that several processes share count once. The kernel takes long to tell which pages are
    shared, so this is read only if the resident sizes add up to more than the limit.

    Args:
        proc: descriptor of a /proc.
    """
    pids = list(_descendants(proc, os.readlink("self", dir_fd=proc)))
    if sum(_resident_bytes(proc, pid) for pid in pids) <= max_bytes:
        return False
    return sum(_proportional_bytes(proc, pid) for pid in pids) > max_bytes


def _descendants(proc: int, pid: str) -> Iterator[str]:
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for thread in _list_folder(proc, f"{parent}/task"):
            children = read_proc(proc, f"{parent}/task/{thread}/children").split()
            waiting += children
            yield from children


def _resident_bytes(proc: int, pid: str) -> int:
    page_counts = (read_proc(proc, f"{pid}/statm") or "0 0").split()
    return int(page_counts[1]) * PAGE_BYTES


def _proportional_bytes(proc: int, pid: str) -> int:
    """Return the memory of a process, where a page that n processes share counts as 1/n."""
    for line in read_proc(proc, f"{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _list_folder(proc: int, name: str) -> list[str]:
    with suppress(OSError):
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)
    return []


def read_proc(proc: int, name: str) -> str:
    """Return the content of a file below the open folder `proc`; "" if its process has ended."""
    with suppress(OSError):
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.read(file, _MAX_PROC_FILE_BYTES).decode()
        finally:
            os.close(file)
    return ""
