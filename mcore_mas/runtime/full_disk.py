"""Retries of writes while a disk or a quota is full."""

import asyncio
import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from rollout.base.terminal import say

_T = TypeVar("_T")

PATIENCE_S = 1800.0  # time for which a run waits for free space
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


async def retry_while_full(write: Callable[[], Awaitable[_T]], path: Path) -> _T:
    """Return the result of `write()`; call it again, with a warning, while the disk or the quota is full.

    Args:
        write: writes the file or folder `path`, and can be called again after a failure.
        path: file or folder that the warning names.

    Raises:
        Exception: an error of `write` for another reason, or half an hour after the first failure.
    """
    loop = asyncio.get_running_loop()
    deadline: float | None = None
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return await write()
        except Exception as error:
            if not _is_full(error):
                raise
            if deadline is None:
                # A write can take minutes before it finds the disk full.
                deadline = loop.time() + PATIENCE_S
                _warn(path)
            elif loop.time() + pause_s > deadline:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _is_full(error: Exception) -> bool:
    """Return True if an error says that the disk or the quota is full.

    The message is read, because the errors of Ray, safetensors and shutil have no errno.
    """
    return any(reason in str(error) for reason in _FULL)


def _warn(path: Path) -> None:
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    free_mib = shutil.disk_usage(folder).free >> 20
    say(
        f"{path}: the disk or a quota is full ({free_mib} MiB are free); make room; the write is repeated for "
        f"{PATIENCE_S / 60:.0f} minutes, and nothing is lost"
    )
