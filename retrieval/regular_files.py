"""Reading of small files that somebody else may have made: regular files of a bounded size.

Opening a named pipe waits until somebody writes to it, and a device such as /dev/zero has no end.
Both are refused before anything is read.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MAX_REGULAR_BYTES = 64 << 20

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: Path) -> int:
    """Check that a path is a regular file, or a link to one; return its size in bytes.

    Libraries that open a file themselves need this check before they get its path.

    Raises:
        OSError: the file does not exist, or is of another kind.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise OSError(errno.EINVAL, f"{kind}, where a regular file is expected", str(path))
    return status.st_size


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: the file cannot be opened, or is of another kind.
    """
    check_regular(path)
    return path.open("rb")


def read_regular_bytes(path: Path, max_bytes: int = MAX_REGULAR_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file cannot be read, or is of another kind.
        ValueError: it has more than `max_bytes`.
    """
    with open_regular(path) as file:
        # Files that the kernel makes have no size, and others may grow while they are read.
        too_large = os.fstat(file.fileno()).st_size > max_bytes
        content = b"" if too_large else file.read(max_bytes + 1)
    if too_large or len(content) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    return content


def read_regular_text(path: Path, max_bytes: int = MAX_REGULAR_BYTES) -> str:
    """Return the content of a regular file in UTF-8.

    Raises:
        OSError: the file cannot be read, or is of another kind.
        ValueError: it has more than `max_bytes`, or is not in UTF-8.
    """
    return read_regular_bytes(path, max_bytes).decode("utf-8")
