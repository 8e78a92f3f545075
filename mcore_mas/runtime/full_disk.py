"""A full disk: what cannot be written is tried again until somebody has made room, for a while."""

import asyncio
import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from rollout.base.processes import say

_T = TypeVar("_T")

ROOM_S = 1800.0  # that somebody has to make room
_FIRST_S, _MOST_S = 1.0, 60.0  # between two tries
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


async def until_room(write: Callable[[], Awaitable[_T]], path: Path) -> _T:
    """What `write` comes to, which writes `path`: called again while a disk or a quota is full, of which a line tells.

    Raises:
        Exception: what `write` raises for another reason, or when there has been no room for `ROOM_S` seconds.
    """
    time, pause = asyncio.get_running_loop().time, _FIRST_S
    deadline = time() + ROOM_S
    while True:
        try:
            return await write()
        except (
            Exception
        ) as error:  # Ray, safetensors and shutil have types of their own, without a number
            if not any(why in str(error) for why in _FULL) or time() + pause > deadline:
                raise
            if pause == _FIRST_S:
                there = next(folder for folder in path.absolute().parents if folder.exists())
                free = shutil.disk_usage(there).free >> 20
                say(
                    f"{path}: the disk or a quota is full ({free} MiB are free); make room: it is tried again for "
                    f"{ROOM_S / 60:.0f} minutes, and nothing is lost"
                )
        await asyncio.sleep(pause)
        pause = min(2 * pause, _MOST_S)
