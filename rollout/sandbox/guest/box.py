"""Working folder of a job, read and written from outside the job without following links."""

import json
import os
import shutil
import stat
import subprocess
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
    """An open regular file below the open folder `box`; OSError if there is none of that name."""
    file = linux.open_inside(box, name, os.O_RDONLY)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(2, "not a regular file")
    return file


def listing(path: str) -> int:
    """An open file with a JSON object: path below `path` to size in bytes, of every regular file."""
    sizes = {name: status.st_size for name, status in _walk(path) if stat.S_ISREG(status.st_mode)}
    file = os.memfd_create("listing")
    with open(file, "wb", closefd=False) as out:
        out.write(json.dumps(sizes).encode())
    return file


def overfull(path: str, disk_bytes: int, files: int, unlinked: int) -> bool:
    """Whether the folder holds more bytes, with those `unlinked`, more entries or a longer path than allowed.

    Looks no further than needed to tell.
    """
    used = unlinked
    for count, (name, status) in enumerate(_walk(path), start=1):
        used += status.st_blocks * 512
        if used > disk_bytes or count > files or len(name) > _LONGEST:
            return True
    return used > disk_bytes


_LONGEST = 2048  # characters of a path below the box: what is in longer ones is not looked at


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Path and status of every entry; links are not followed."""
    waiting = [""]
    while waiting:
        inner = waiting.pop()
        # removed meanwhile, or made unreadable: what is in it cannot be handed out either
        with suppress(OSError), os.scandir(os.path.join(folder, inner)) as entries:
            for entry in entries:
                with suppress(OSError):
                    yield (name := inner + entry.name), entry.stat(follow_symlinks=False)
                    if len(name) <= _LONGEST and entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{name}/")


def remove_tree(path: str) -> bool:
    """Remove a folder with all that is in it, however deep or closed; whether it is gone."""
    with suppress(RecursionError):  # deeper than Python goes
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # without these programs it stays
        if os.path.isdir(path) and not os.path.islink(path):
            # of folders alone: a file may be linked elsewhere
            opened = [
                "find",
                path,
                "-type",
                "d",
                "!",
                "-perm",
                "-700",
                "-execdir",
                "chmod",
                "u+rwx",
                "{}",
                ";",
            ]
            for command in (opened, ["rm", "-rf", path]):
                subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    return not os.path.lexists(path)
