"""Files with the trajectories of an evaluation, from which an interrupted evaluation goes on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from mcore_mas.runtime.full_disk import retry_while_full
from rollout.base.json_files import read_json, write_json
from rollout.records.files import read_scores, write_trajectories
from rollout.records.trajectory import Trajectory

_TRAJECTORIES_PER_FILE = 128


class TrajectoryShards:
    """Folder of trajectories in files part_000000.parquet, ... of 128 trajectories each.

    A trajectory is in memory only until the file that it belongs to has been written.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        """Open a folder; remove its trajectories if they were written with another identity.

        Args:
            folder: folder that exists.
            identity: digest of everything that decides the trajectories.
        """
        self._folder = folder
        identity_file = folder / "identity.json"
        if _read_identity(identity_file) != identity:
            for file in folder.glob("part_*.parquet"):
                file.unlink()
            write_json(identity_file, {"identity": identity})

        # Several files may be written at the same time, so after a kill an earlier number may be missing.
        self._earlier_files = sorted(folder.glob("part_*.parquet"))
        self._next_number = 0
        if self._earlier_files:
            self._next_number = int(self._earlier_files[-1].stem.removeprefix("part_")) + 1
        self._buffer: list[Trajectory] = []

    def read(self) -> Iterator[Trajectory]:
        """Yield the trajectories that were in the folder when it was opened, without texts, tokens and tool calls."""
        for file in self._earlier_files:
            yield from read_scores(file)

    async def add(self, trajectory: Trajectory) -> None:
        """Add a trajectory; if it fills a file, write the file."""
        self._buffer.append(trajectory)
        if len(self._buffer) == _TRAJECTORIES_PER_FILE:
            path = self._next_path()
            trajectories = self._buffer
            self._buffer = []
            await retry_while_full(
                lambda: asyncio.to_thread(write_trajectories, path, trajectories), path
            )

    def flush(self) -> None:
        """Write the trajectories that have not filled a file yet."""
        if self._buffer:
            write_trajectories(self._next_path(), self._buffer)
            self._buffer = []

    def _next_path(self) -> Path:
        path = self._folder / f"part_{self._next_number:06d}.parquet"
        self._next_number += 1
        return path


def _read_identity(file: Path) -> str | None:
    """Return the identity in a file; None if the file is missing or damaged.

    Other errors are raised: a file that cannot be read at the moment must not remove trajectories.
    """
    try:
        record = read_json(file)
    except (FileNotFoundError, ValueError):
        return None
    return record.get("identity") if isinstance(record, dict) else None
