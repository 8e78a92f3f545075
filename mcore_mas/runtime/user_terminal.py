"""The output that a person watches, also in a process whose own output goes to a log."""

import os
import stat
import sys
from typing import TextIO

_terminal: TextIO | None = None  # a duplicate of stderr from before it was redirected


def keep_terminal() -> None:
    """Duplicate stderr before it is redirected, so that messages can still reach the user.

    It may be a terminal, or a pipe that another program reads, such as `tee` or a notebook. If it is
    a file, such as the log of a Slurm job, it is not duplicated, because nobody watches a file.
    """
    global _terminal
    if os.isatty(2) or stat.S_ISFIFO(os.fstat(2).st_mode):
        _terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace", buffering=1)


def user_terminal() -> TextIO | None:
    """Return the terminal or pipe that this process was started from, or None if it has none."""
    if _terminal is not None:
        return _terminal
    return sys.stderr if sys.stderr.isatty() else None
