"""Names in shared memory that say whose they are."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")  # noqa: S108  (a file system in memory, not a place for temporary files)
_PREFIX = "mcore_mas-weights"


def fresh_place() -> Path:
    """A path that nobody uses; what ended processes left behind is removed first."""
    for left in MEMORY.glob(f"{_PREFIX}-*"):
        owner = left.name.split("-")[2]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            with suppress(OSError):
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
    return MEMORY / f"{_PREFIX}-{os.getpid()}-{time.monotonic_ns()}"
