"""Cleanup after a killed run: what is left of its own Ray (`python -m mcore_mas.training.ray_cleanup DIR`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_BYE = b"bye"


@contextmanager
def reaped(session: Path) -> Iterator[None]:
    """See to it that a Ray ends with this process, even when this process is killed.

    Ray's agents survive a killed driver. A small process of ours waits for our end of a pipe to close, and then ends
    all that still write to the logs of `session`. Where we were killed it says so, because we could not.
    """
    command = [sys.executable, "-m", "mcore_mas.training.ray_cleanup", str(session)]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert reaper.stdin is not None
        reaper.stdin.write(_BYE)
        reaper.stdin.close()
        reaper.wait()


def sweep(session: Path) -> None:
    """Kill every process that has a file under `session` open, except the one that started us, if it lives."""
    parent = os.getppid()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != parent and any(Path(file.path).is_relative_to(session) for file in process.open_files()):
                process.kill()


if __name__ == "__main__":
    killed = sys.stdin.buffer.read() != _BYE  # it returns when the process that started us has ended, however it ended
    sweep(Path(sys.argv[1]).resolve())
    if killed:
        print("error: the training process was killed (SIGKILL; was there memory left?)", file=sys.stderr)
