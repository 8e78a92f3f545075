"""Location of an error in the code of a user: the file and the line that raised it."""

import sysconfig
import traceback
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2]
# Folders whose code is not the user's.
_LIBRARIES = [
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
]
_LIBRARIES += [_PROJECT / package for package in ("mcore_mas", "rollout", "retrieval")]


def describe_with_location(error: BaseException) -> str:
    """Return an error's type, message, file and line, such as `KeyError: 'x' (mine.py:12)`.

    The line is the innermost one that is in no library and not in this project, because the user
    can change it. If there is none, no line is named.
    """
    text = f"{type(error).__name__}: {error}"
    location = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not _is_in_library(file):
            location = f" ({Path(file).name}:{number})"
    return text + location


def _is_in_library(file: str) -> bool:
    path = Path(file)
    return file.startswith("<frozen") or any(path.is_relative_to(folder) for folder in _LIBRARIES)
