"""A job's working folder (box), which its warden accesses without following symbolic links."""

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress

from . import linux

_COPY_BYTES = 1 << 20
_BLOCK_BYTES = 512  # unit of st_blocks
_MAX_PATH_CHARS = 2048  # folders with longer paths below the box are not searched


def put(box: int, name: str, content: int) -> None:
    """Write a file of the box and create its folders; replace a file of this name.

    Args:
        box: descriptor of the box.
        name: path below the box.
        content: descriptor of an open file.

    Raises:
        OSError: the content does not fit, or a symbolic link is in the way.
    """
    folder = os.dup(box)
    try:
        *parents, file_name = name.split("/")
        for parent in parents:
            with suppress(FileExistsError):
                os.mkdir(parent, 0o700, dir_fd=folder)
            inner_folder = linux.open_inside(folder, parent, os.O_RDONLY | os.O_DIRECTORY)
            os.close(folder)
            folder = inner_folder
        with suppress(FileNotFoundError):
            os.unlink(file_name, dir_fd=folder)
        target = linux.open_inside(folder, file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(target, "wb") as target_file, open(content, "rb") as source_file:
            shutil.copyfileobj(source_file, target_file, _COPY_BYTES)
    finally:
        os.close(folder)


def get(box: int, name: str) -> int:
    """Return a descriptor of a regular file of the box; raise OSError if there is none."""
    file = linux.open_inside(box, name, os.O_RDONLY)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(2, "not a regular file")
    return file


def listing(path: str) -> int:
    """Return an open file with a JSON object: the size in bytes of every regular file, by path."""
    sizes = {name: status.st_size for name, status in _walk(path) if stat.S_ISREG(status.st_mode)}
    file = os.memfd_create("listing")
    with open(file, "wb", closefd=False) as listing_file:
        listing_file.write(json.dumps(sizes).encode())
    return file


def exceeds(path: str, *, max_bytes: int, max_files: int, unlinked_bytes: int) -> bool:
    """Return True if a box holds too much: too many bytes, too many entries or too long a path.

    The search stops as soon as a limit is exceeded.

    Args:
        path: path of the box.
        max_bytes: limit on the size on disk.
        max_files: limit on the number of files and folders.
        unlinked_bytes: size of open files without a name, which counts too.
    """
    used_bytes = unlinked_bytes
    for count, (name, status) in enumerate(_walk(path), start=1):
        used_bytes += status.st_blocks * _BLOCK_BYTES
        if used_bytes > max_bytes or count > max_files or len(name) > _MAX_PATH_CHARS:
            return True
    return used_bytes > max_bytes


def _walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path below the box and the status of every entry, without following links."""
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        # A folder that the job has removed or made unreadable meanwhile is skipped: its files could
        # not be handed out either.
        with suppress(OSError), os.scandir(os.path.join(path, prefix)) as entries:
            for entry in entries:
                name = prefix + entry.name
                with suppress(OSError):
                    yield name, entry.stat(follow_symlinks=False)
                    if len(name) <= _MAX_PATH_CHARS and entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{name}/")


def remove_tree(path: str) -> bool:
    """Remove a folder with its content, even if it is very deep or has unreadable folders.

    Returns:
        True if nothing is left at the path.
    """
    with suppress(RecursionError):  # shutil.rmtree fails on trees deeper than Python's stack
        shutil.rmtree(path, ignore_errors=True)
    if os.path.isdir(path) and not os.path.islink(path):
        with suppress(OSError):  # without these programs the folder stays
            _remove_with_programs(path)
    return not os.path.lexists(path)


def _remove_with_programs(path: str) -> None:
    """Remove a folder with find, chmod and rm, which know no limit on its depth."""
    # Only folders are made readable: a file may be linked outside of the box, where its mode
    # matters.
    closed_folders = [path, "-type", "d", "!", "-perm", "-700"]
    make_readable = ["find", *closed_folders, "-execdir", "chmod", "u+rwx", "{}", ";"]
    for command in (make_readable, ["rm", "-rf", path]):
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
