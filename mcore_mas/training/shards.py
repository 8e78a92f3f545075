"""Resumable evaluation: trajectories in parquet files of a fixed size, written as they come, read at a restart."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from mcore_mas.config.run import RunConfig
from rollout.base.files import FolderError, sha256, write_json
from rollout.records.files import read_trajectories, write_trajectories
from rollout.records.trajectory import Trajectory

_SIZE = 128  # trajectories of a file


class Shards:
    """A folder of trajectories, of which no more than those of one file are in memory."""

    def __init__(self, folder: Path, identity: str) -> None:
        """Go on with the files in `folder` if they are of the same `identity`; else remove them."""
        self._folder, said = folder, folder / "identity.json"
        if not said.is_file() or json.loads(said.read_text()) != {"identity": identity}:
            for file in folder.glob("part_*.parquet"):
                file.unlink()
            write_json(said, {"identity": identity})
        # several may be under way when a process is killed, and a later one is there without an earlier one
        self._earlier = sorted(folder.glob("part_*.parquet"))
        self._next_number = int(self._earlier[-1].stem.removeprefix("part_")) + 1 if self._earlier else 0
        self._waiting: list[Trajectory] = []

    def read(self) -> Iterator[Trajectory]:
        """What earlier starts have played, file by file."""
        for file in self._earlier:
            yield from read_trajectories(file)

    async def keep(self, trajectory: Trajectory) -> None:
        """Take a trajectory; with the last of a file, write it."""
        self._waiting.append(trajectory)
        if len(self._waiting) == _SIZE:
            await asyncio.to_thread(write_trajectories, *self._next())

    def flush(self) -> None:
        """Write what has not filled a file."""
        if self._waiting:
            write_trajectories(*self._next())

    def _next(self) -> tuple[Path, list[Trajectory]]:
        taken, self._waiting = self._waiting, []
        path = self._folder / f"part_{self._next_number:06d}.parquet"
        self._next_number += 1
        return path, taken


def identity_of_play(config: RunConfig) -> str:
    """A digest of all that decides what a team says to the test tasks: the tasks, the models' files, the settings.

    How many samples there are is not of it, nor how long things may take: an evaluation goes on when these change.

    Raises:
        FolderError: there is no such model folder.
    """
    models = {policy: [folder, *_files(Path(folder))] for policy, folder in config.models.items()}
    decides = {"seed", "env", "orchestra", "agents", "policies", "retriever"}
    settings = config.model_dump(mode="json", include=decides) | {"sampling": config.evaluation.sampling}
    engine = config.engine.model_dump(mode="json", include={"max_length", "overlong_prompts"})
    tasks = sha256(config.folder / "tasks" / "test.parquet")
    told = json.dumps([settings, engine, models, tasks], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """(Name, bytes, time of the last change in ns) of each file."""
    if not folder.is_dir():
        raise FolderError(f"{folder}: no such model folder; name one that is on this machine")
    stats = ((file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file())
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
