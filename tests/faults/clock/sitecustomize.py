"""Wall clock that is wrong by the seconds in a file, in every Python process that has this folder in its path."""

import os
import time
from pathlib import Path

_ERROR_FILE = os.environ.get("MCORE_MAS_CHAOS_CLOCK")
_right_time = time.time


def _wrong_time() -> float:
    return _right_time() + float(Path(str(_ERROR_FILE)).read_text(encoding="utf-8") or 0)


if _ERROR_FILE:
    time.time = _wrong_time
