"""A run's state in this machine's memory: a lost rank costs a step or two seconds, not all since a checkpoint."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from mcore_mas.config.run import RunConfig
from mcore_mas.planning.choose import placement_of, shapes_of
from mcore_mas.planning.estimate import trainer_kinds
from mcore_mas.planning.memory import checkpoint_bytes
from mcore_mas.runtime.checkpoint import CheckpointError, Checkpoints, Saved, Write, newest
from mcore_mas.runtime.recipe import Identity
from rollout.base.ownership import remove_path
from rollout.sync import MEMORY

_CGROUPS = Path("/sys/fs/cgroup")
_EVERY_S = 2.0  # at most, a state is kept: it costs a rank of 1.5 million weights 30 ms of a core, some steps take 700


def recent_state(folder: Path, identity: Identity, told: Callable[[str], None]) -> Saved | None:
    """The state in a folder in memory; one that cannot be used is removed, as older ones may come, and `told` why."""
    found = newest(folder, identity, told)
    if found is None:
        remove_path(folder)
    return found


class RecentState:
    """A state that was not saved to disk: the last step's, or of short steps one of the last two seconds.

    It is kept as long as this machine's memory has room for it.
    """

    def __init__(
        self, folder: Path, identity: Identity, size: float, note: Callable[[str], None]
    ) -> None:
        """`size`: bytes of one state; `note` is told, once, that there is no room or that it could not be written."""
        self._folder, self._size, self._note, self._told = folder, size, note, False
        self._due = 0.0  # when the next is kept
        self._states = Checkpoints(folder, identity, keep=1, room_s=0.0)

    async def keep(self, step: int, state: dict[str, Any], write: Write) -> None:
        """Begin to keep the state after `step` steps in place of the one before, if it is time (`Checkpoints.save`)."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + _EVERY_S
        await self.finish()
        try:
            if (free := free_memory()) < 2 * self._size:  # as much again stays free
                raise CheckpointError(f"{free / 2**20:.0f} MiB of memory are free")
            await self._states.save(step, state, write)
        except CheckpointError as error:
            self._skip(error)

    async def finish(self) -> None:
        """Wait for the state that is being written, if one is."""
        try:
            await self._states.finish()
        except CheckpointError as error:
            self._skip(error)

    async def abandon(self) -> None:
        """Give up the state that is being written, if one is."""
        await self._states.abandon()

    def _skip(self, why: CheckpointError) -> None:
        for path in (
            self._folder.iterdir()
        ):  # what is left of it, and an older one, worth less with each step
            remove_path(path)
        if not self._told:
            self._told = True
            self._note(
                f"no state in memory, which takes twice {self._size / 2**20:.0f} MiB ({why}): a lost rank "
                "costs all steps since the newest checkpoint on disk"
            )


def state_bytes(config: RunConfig) -> float:
    """What the state of all that a run trains takes."""
    models, placement = shapes_of(config), placement_of(config)
    return sum(
        checkpoint_bytes(models[name], trainer_kinds(config, name, placement))
        for name in config.trained
    )


def free_memory() -> int:
    """Bytes that shared memory may take: as much as its file system, this machine and its control groups have."""
    free: list[int] = [shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available]
    own = next(
        (
            line[3:]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line[:3] == "0::"
        ),
        "/",
    )
    for group in (_CGROUPS / own.strip("/"), *(_CGROUPS / own.strip("/")).parents):
        if (limit := group / "memory.max").is_file() and (
            most := limit.read_text().strip()
        ) != "max":
            rows = (row.split() for row in (group / "memory.stat").read_text().splitlines())
            pages = sum(
                int(size) for name, size in rows if name in ("active_file", "inactive_file")
            )  # given back
            free.append(int(most) - int((group / "memory.current").read_text()) + pages)
    return min(free)
