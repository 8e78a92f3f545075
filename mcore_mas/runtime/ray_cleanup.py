"""Cleanup after a killed run: a small process that outlives it and removes its Ray.

Run as `python -m mcore_mas.runtime.ray_cleanup PID SESSION [LOGS]` by `reaped`.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from mcore_mas.runtime.stop_signal import called_before_end
from rollout.sync.memory import remove_memory_files

_SUCCESS = b"success"
_FAILURE = b"failure"
_STOPPED = b"stopped"  # the process ended at once, and has printed the reason itself


@contextmanager
def reaped(session: Path, logs: Path | None) -> Iterator[None]:
    """Shut Ray down when this process ends, even if it is killed, and remove the session folder.

    Ray's processes survive a killed driver. A helper process waits until this process's end of a
    pipe is closed, then kills every process that still writes to the session's logs. If this
    process was killed, the helper prints that.

    Args:
        session: folder of the session.
        logs: folder that the session's logs are moved to if the block fails; None: they are removed.
    """
    arguments = [str(os.getpid()), str(session)]
    if logs is not None:
        arguments.append(str(logs))
    command = [sys.executable, "-m", "mcore_mas.runtime.ray_cleanup", *arguments]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    stdin = reaper.stdin
    assert stdin is not None

    def report(outcome: bytes) -> None:
        with suppress(OSError, ValueError):  # the helper was killed, or has an outcome already
            stdin.write(outcome)
            stdin.close()

    outcome = _FAILURE
    with called_before_end(lambda: report(_STOPPED)):
        try:
            yield
            outcome = _SUCCESS
        finally:
            report(outcome)
            reaper.wait()


def kill_processes_of(session: Path) -> None:
    """Kill every process that has a file of the session open, except this one and its parent."""
    spared = (os.getpid(), os.getppid())
    for process in psutil.process_iter():
        if process.pid in spared:
            continue
        with suppress(psutil.Error):
            if any(Path(file.path).is_relative_to(session) for file in process.open_files()):
                process.kill()


def remove_session(session: Path, logs: Path | None = None, *, keep_logs: bool = False) -> None:
    """Remove the folder of a session that has ended.

    Args:
        session: folder of the session.
        logs: folder for the session's logs; the logs of an earlier session in it are removed.
        keep_logs: move the session's logs there.
    """
    if logs is not None:
        shutil.rmtree(logs, ignore_errors=True)
        if keep_logs:
            with suppress(OSError):
                shutil.move(session / "logs", logs)
    shutil.rmtree(session, ignore_errors=True)

    latest = session.parent / "session_latest"
    with suppress(OSError):  # another Ray's session is there
        if not latest.exists():  # a link to a session that is gone
            latest.unlink(missing_ok=True)
        session.parent.rmdir()


def main(pid: int, session: Path, logs: Path | None) -> None:
    """Wait until a training has ended, and remove what it leaves behind.

    Args:
        pid: process id of the training.
        session: folder of its Ray session.
        logs: see `reaped`.
    """
    outcome = sys.stdin.buffer.read()  # returns when that process has ended, however it ended
    kill_processes_of(session)
    if not outcome:
        message = "a signal ended the training (SIGTERM, or SIGKILL; was there memory left?)"
        print(f"error: {message}", file=sys.stderr)
    if outcome in (b"", _STOPPED):
        # A process that ends without unwinding its stack leaves weights in shared memory.
        remove_memory_files(pid)
    remove_session(session, logs, keep_logs=outcome != _SUCCESS)


if __name__ == "__main__":
    paths = [Path(argument).resolve() for argument in sys.argv[2:]]
    main(int(sys.argv[1]), paths[0], paths[1] if len(paths) > 1 else None)
