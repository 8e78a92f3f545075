"""The output that a person watches or keeps, also in a process whose own output goes to a log."""

import os
import stat
import sys
from typing import TextIO

_terminal: TextIO | None = None  # a duplicate of stderr from before it was redirected


def keep_terminal(*, files: bool = True) -> None:
    """Duplicate stderr before it is redirected, so that messages can still reach the user.

    It may be a terminal, a pipe that another program reads, such as `tee` or a notebook, or a file.

    Args:
        files: False: a file is not duplicated.
    """
    global _terminal
    mode = os.fstat(2).st_mode
    if os.isatty(2) or stat.S_ISFIFO(mode) or (files and stat.S_ISREG(mode)):
        _terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace", buffering=1)


def user_terminal() -> TextIO | None:
    """Return the terminal, pipe or file that this process was started with, or None if it has none."""
    if _terminal is not None:
        return _terminal
    return sys.stderr if sys.stderr.isatty() else None
