"""Cleanup after a killed run: what is left of its own Ray (`python -m` this, PID DIR [LOGS])."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rollout.sync.memory import clear_memory

_WELL, _BADLY = b"well", b"badly"


@contextmanager
def reaped(session: Path, logs: Path | None) -> Iterator[None]:
    """See to it that a Ray ends with this process, even when this process is killed, and takes its folder along.

    Ray's agents survive a killed driver. A small process of ours waits for our end of a pipe to close, and then ends
    all that still write to the logs of `session`, which it moves to `logs` unless all went well. Where we were killed
    it says so, because we could not.
    """
    given = [str(os.getpid()), str(session), *([str(logs)] if logs else [])]
    command = [sys.executable, "-m", "mcore_mas.runtime.ray_cleanup", *given]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert watcher.stdin is not None
    ended = _BADLY
    try:
        yield
        ended = _WELL
    finally:
        with suppress(BrokenPipeError):  # somebody has killed it
            watcher.stdin.write(ended)
            watcher.stdin.close()
        watcher.wait()


def sweep(session: Path) -> None:
    """Kill every process that has a file under `session` open, except us and the one that started us, if it lives."""
    spared = os.getpid(), os.getppid()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            files = process.open_files() if process.pid not in spared else ()
            if any(Path(file.path).is_relative_to(session) for file in files):
                process.kill()


def tidy(session: Path, logs: Path | None, *, keep: bool) -> None:
    """Remove what a Ray that has ended leaves in its folder; what it logged becomes `logs`, if that is to be kept."""
    if logs:
        shutil.rmtree(logs, ignore_errors=True)
        with suppress(OSError):
            if keep:
                shutil.move(session / "logs", logs)
    shutil.rmtree(session, ignore_errors=True)
    with suppress(OSError):  # another Ray's
        if not (latest := session.parent / "session_latest").exists():
            latest.unlink()
        session.parent.rmdir()


if __name__ == "__main__":
    ended = (
        sys.stdin.buffer.read()
    )  # returns when the process that started us has ended, however it ended
    own, *logged = (Path(argument).resolve() for argument in sys.argv[2:])
    sweep(own)
    if not ended:
        print(
            "error: a signal ended the training (SIGTERM, or SIGKILL; was there memory left?)",
            file=sys.stderr,
        )
        clear_memory(int(sys.argv[1]))
    tidy(own, *logged or (None,), keep=ended != _WELL)
