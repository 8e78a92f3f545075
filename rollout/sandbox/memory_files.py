"""Files in memory (memfd) through which host and jail exchange programs, input and output."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rollout.sandbox.records import SandboxError

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


@contextmanager
def memory_files(*contents: str | bytes | None) -> Iterator[list[int]]:
    """Return a context with the descriptors of new files.

    Args:
        contents: content of each file, which nobody can change; None: an empty file to write to.

    Raises:
        SandboxError: this machine has no memory or descriptors left for a file.
    """
    with ExitStack() as open_files:
        files = []
        for content in contents:
            try:
                file = _create_file(content)
            except OSError as error:
                raise SandboxError(
                    f"the sandbox cannot make a file in memory ({error.strerror})"
                ) from error
            open_files.callback(os.close, file)
            files.append(file)
        yield files


def _create_file(content: str | bytes | None) -> int:
    file = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if content is None:
        return file

    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    remaining = memoryview(content)
    while remaining:  # pwrite leaves the file's position at its start, where the job reads from
        written = os.pwrite(file, remaining, os.fstat(file).st_size)
        remaining = remaining[written:]
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return file


def read_bytes(file: int, max_bytes: int) -> bytes:
    """Return up to `max_bytes` bytes from the start of an open file."""
    parts: list[bytes] = []
    offset = 0
    while offset < max_bytes:
        part = os.pread(file, max_bytes - offset, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def read_texts(files: Sequence[int], max_bytes: int) -> tuple[list[str], bool]:
    """Read up to `max_bytes` bytes from the start of each open file.

    Returns:
        The texts, with U+FFFD for bytes that are not UTF-8; True if no file is longer.
    """
    texts = [read_bytes(file, max_bytes).decode("utf-8", "replace") for file in files]
    are_complete = all(os.fstat(file).st_size <= max_bytes for file in files)
    return texts, are_complete
