"""A wall clock that is as many seconds off as a file says, in every Python process with this folder in its path."""

import os
import time
from pathlib import Path

_PATH, _right = os.environ.get("MCORE_MAS_CHAOS_CLOCK"), time.time


def _wrong() -> float:
    return _right() + float(Path(str(_PATH)).read_text(encoding="utf-8") or 0)


if _PATH:
    time.time = _wrong
