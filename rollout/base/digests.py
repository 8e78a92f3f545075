"""SHA-256 digests of files and of folders."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from retrieval.regular_files import open_regular
from rollout.base.failpoints import failpoint
from rollout.base.ownership import FolderError

Digest = dict[str, int | str]  # of a file: "bytes" and "sha256"


def sha256(*paths: Path) -> str:
    """Return the hexadecimal digest of the concatenated files, as `sha256sum` prints it."""
    digest = hashlib.sha256()
    for path in paths:
        with open_regular(path) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> Digest:
    """Write chunks to a file, flush it to disk, and return its digest."""
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        failpoint(f"chunks.begun:{path.name}")
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)  # bytes; the length of a memoryview may count elements
        file.flush()
        os.fsync(file.fileno())
    failpoint(f"chunks.written:{path.name}")
    return {"bytes": size, "sha256": digest.hexdigest()}


def tree_sha256(folder: Path) -> dict[str, str]:
    """Return `sha256` of every file below a folder by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def check_tree(folder: Path, digests: Mapping[str, str]) -> None:
    """Compare a folder with an earlier `tree_sha256`; further files do not matter.

    Raises:
        FolderError: a file is missing or has another digest.
    """
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or sha256(path) != digest:
            raise FolderError(
                f"{path}: not there, or not as it was written; train again or bring it back"
            )
