"""The terminal that a person watches, also in a process whose output goes to a log."""

import os
import sys
from typing import TextIO

_terminal: TextIO | None = None  # a duplicate of stderr from before it was redirected


def keep_terminal() -> None:
    """Duplicate stderr if it is a terminal, so that it can be written to after stderr has been redirected."""
    global _terminal
    if os.isatty(2):
        _terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace", buffering=1)


def user_terminal() -> TextIO | None:
    """Return the terminal of this process, or None if it was not started from one."""
    if _terminal is not None:
        return _terminal
    return sys.stderr if sys.stderr.isatty() else None
