"""SHA-256 digests of files, cached beside the files."""

import contextlib
import hashlib
import json
from pathlib import Path

from retrieval.atomic_files import write_json_file
from retrieval.regular_files import open_regular, read_regular_bytes


def file_status(path: Path) -> list[int]:
    """Return size, modification time, change time and inode of a file.

    A file whose four values are unchanged is assumed to have unchanged content.
    """
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def cached_sha256(*paths: Path, reread: bool = False) -> str:
    """Return the hexadecimal SHA-256 of the concatenated files, cached until they change.

    The cache is the file `.NAME.sha256` beside the first file. If that folder is read-only, as it
    is for models that several people share, the cache is in `~/.cache/mcore-mas`.

    Args:
        reread: read the files even if the cache has their digest.
    """
    paths = tuple(path.resolve() for path in paths)
    statuses = [file_status(path) for path in paths]
    neighbour = paths[0].with_name(f".{paths[0].name}.sha256")
    name = hashlib.sha256(bytes(neighbour)).hexdigest()[:32]
    caches = (neighbour, Path.home() / ".cache" / "mcore-mas" / f"{name}.sha256")

    if not reread:
        for cache in caches:
            # A cache that is missing, damaged or written by another version is ignored.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                entry = json.loads(read_regular_bytes(cache))
                if entry["of"] == statuses:
                    return str(entry["sha256"])

    digest = hashlib.sha256()
    for path in paths:
        with open_regular(path) as file:
            hashlib.file_digest(file, lambda: digest)
    for cache in caches:
        with contextlib.suppress(OSError):
            write_json_file(cache, {"sha256": digest.hexdigest(), "of": statuses})
            break
    return digest.hexdigest()
