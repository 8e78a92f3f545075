"""The folder of a job, handled from outside the job: no link in it is ever followed."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress

from . import linux

_COPY_BYTES = 1 << 20


def put(box: int, name: str, content: int) -> None:
    """Write the open file `content` to `name` below the open folder `box`, in place of a file of that name.

    Raises:
        OSError: it does not fit, or a link is in the way.
    """
    folder = os.dup(box)
    try:
        *parents, last = name.split("/")
        for parent in parents:
            with suppress(FileExistsError):
                os.mkdir(parent, 0o700, dir_fd=folder)
            inner = linux.open_inside(folder, parent, os.O_RDONLY | os.O_DIRECTORY)
            os.close(folder)
            folder = inner
        with suppress(FileNotFoundError):
            os.unlink(last, dir_fd=folder)
        target = linux.open_inside(folder, last, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(target, "wb") as out, open(content, "rb") as source:
            shutil.copyfileobj(source, out, _COPY_BYTES)
    finally:
        os.close(folder)


def get(box: int, name: str) -> int:
    """An open regular file below the open folder `box`.

    Raises:
        OSError: there is none of that name.
    """
    file = linux.open_inside(box, name, os.O_RDONLY)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(2, "not a regular file")
    return file


def listing(path: str) -> int:
    """An open file with a JSON object: path below `path` to size in bytes, of every regular file."""
    sizes = {}
    for entry in _walk(path):
        with suppress(OSError):
            if entry.is_file(follow_symlinks=False):
                sizes[os.path.relpath(entry.path, path)] = entry.stat(follow_symlinks=False).st_size
    file = os.memfd_create("listing")
    with open(file, "wb", closefd=False) as out:
        out.write(json.dumps(sizes).encode("utf-8", "replace"))
    return file


def overfull(path: str, disk_bytes: float, files: float) -> bool:
    """Whether the folder holds more bytes or more entries than this; looks no further than needed to tell."""
    used = 0
    for count, entry in enumerate(_walk(path), start=1):
        with suppress(OSError):
            used += entry.stat(follow_symlinks=False).st_blocks * 512
        if used > disk_bytes or count > files:
            return True
    return False


def _walk(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    yield from _walk(entry.path)
    except OSError:  # removed meanwhile, or made unreadable: what is in it cannot be handed out either
        return
