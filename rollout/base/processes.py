"""Child processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: int = signal.SIGTERM, parent: int = 0) -> None:
    """Have the kernel send this process the signal `number` when the thread that started it ends, however it ends.

    Args:
        parent: the pid that the parent had; if it has ended already, this process does so too. 0: not known.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent and os.getppid() != parent:
        sys.exit("the parent process ended before this one started")


def start_group(
    command: Sequence[str],
    *,
    log: Path | None = None,
    death: int = signal.SIGKILL,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a process group that ends with the thread that called this.

    Args:
        log: file that its output is appended to; None: it has this process's.
        death: the signal that it gets when this process dies.
        env: its environment; None: this process's.
    """
    tie = partial(die_with_parent, death, os.getpid())
    if log is None:
        return subprocess.Popen(command, env=env, cwd=cwd, start_new_session=True, preexec_fn=tie)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=tie,
        )


def stop_group(child: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """End `child`, which leads a process group, and everything else in its group: politely, then not."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    finally:
        with suppress(ProcessLookupError):  # members that outlived their leader
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def say(line: str) -> None:
    """Print `line` where the progress of a run goes."""
    print(line, file=sys.stderr, flush=True)
