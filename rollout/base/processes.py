"""Children that do not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the thread that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def stop_group(child: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """End `child`, which leads a process group, and everything else in its group: politely, then not."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    with suppress(ProcessLookupError):  # members that outlived their leader
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
