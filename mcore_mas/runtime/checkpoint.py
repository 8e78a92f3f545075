"""Checkpoints of a run: a folder per step, which is used only if its manifest and its files are valid."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from mcore_mas.runtime.checkpoint_manifest import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_MANIFEST,
    ManifestError,
    read_checkpoint_manifest,
    recipe_problem,
    step_name,
    validate_checkpoint,
)
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.full_disk import retry_while_full
from mcore_mas.runtime.recipe import Identity, describe_differences
from rollout.base.async_tasks import cancel_tasks
from rollout.base.digests import Digest
from rollout.base.failpoints import failpoint
from rollout.base.files import sync_folder
from rollout.base.json_files import sealed, write_json
from rollout.base.ownership import epoch_of, remove_path
from rollout.base.restarts import ProcessLost

_REFUSED = "refused_"  # begins the name of a checkpoint that was put aside

# Function that waits until all files are on disk, and returns size and digest of each by name.
WaitWritten = Callable[[], Awaitable[dict[str, Digest]]]
# Function that copies the training state and starts to write it to a folder; it returns the function
# that waits for the files.
Write = Callable[[Path], Awaitable[WaitWritten]]


class CheckpointError(TrainingError):
    """Error of a checkpoint that cannot be written, or of a run without a usable one.

    The message is one line: what is wrong, where, and what to do.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A valid checkpoint."""

    folder: Path
    step: int
    state: dict[str, Any]  # of the controller, such as engine versions and KL coefficients
    metric: float | None  # by which the best checkpoints are chosen; None: not measured


class Checkpoints:
    """The checkpoints of a run under one folder."""

    def __init__(self, folder: Path, identity: Identity, *, keep: int, best: int = 0) -> None:
        """Make the folder, and remove the checkpoints in it that a killed process did not complete.

        Args:
            folder: folder of the checkpoints.
            identity: identity of the run that they belong to.
            keep: number of newest checkpoints that are kept.
            best: number of checkpoints that are kept for their metric.
        """
        self.identity = identity
        self._folder = folder
        self._keep = keep
        self._best = best
        self._writing: asyncio.Task[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(".*.partial"):
            remove_path(partial)

    async def save(
        self, step: int, state: dict[str, Any], write: Write, metric: float | None = None
    ) -> None:
        """Save the state after `step` steps.

        Returns as soon as `write` has copied the state. Files and manifest are written in the background; `finish`, or
        the next save, waits for them. While the disk is full, writing is retried (see `retry_while_full`).

        Args:
            step: number of steps taken.
            state: state for the manifest, as plain JSON values.
            write: copies the state, and starts to write it; the function that it returns waits for the
                files, and is called again after a full disk.
            metric: metric by which the best checkpoints are chosen.

        Raises:
            CheckpointError: this checkpoint cannot be begun, or the one before could not be written.
            ProcessLost: a rank that writes its part has died, or hangs.
        """
        await self.finish()
        partial = self._folder / f".{step_name(step)}.{os.getpid()}.partial"
        manifest = {
            "format": CHECKPOINT_FORMAT,
            "epoch": epoch_of(self._folder),
            "run": self.identity.run,
            "models": self.identity.models,
            "recipe": self.identity.recipe,
            "inputs": self.identity.inputs,
            "step": step,
            "metric": metric,
            "state": state,
        }

        async def begin() -> None:
            partial.mkdir(exist_ok=True)
            failpoint("checkpoint.begun")

        try:
            await retry_while_full(begin, partial)
            wait_written = await write(partial)
        except OSError as error:
            raise _write_error(partial, error) from error
        self._writing = asyncio.create_task(self._complete(partial, manifest, wait_written))

    async def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            CheckpointError: it could not be written.
            ProcessLost: a rank died before it had written its part.
        """
        writing = self._writing
        self._writing = None
        if writing is not None:
            await writing

    async def abandon(self) -> None:
        """Give up the checkpoint that is being written, if there is one."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            await cancel_tasks([writing])

    def recover_newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest valid checkpoint, or None if there is no checkpoint at all.

        Newer ones, which are not valid, are renamed. Checkpoints that are neither among the newest nor
        among the best are removed.

        Args:
            warn: called with a line about each checkpoint that is renamed.

        Raises:
            CheckpointError: there are checkpoints, and none is valid.
        """
        checkpoint, refused = _find_newest(self._folder, self.identity)
        if checkpoint is None and refused:
            folder, problem = refused[0]
            if self._is_recipe_problem(folder, problem):
                raise CheckpointError(
                    f"{folder}: {problem}, or move {self._folder} away to start over"
                )
            others = "there is no older one"
            if len(refused) == 2:
                others = "the older one cannot be used either"
            elif len(refused) > 2:
                others = f"the {len(refused) - 1} older ones cannot be used either"
            raise CheckpointError(
                f"{folder}: {problem}; {others}; put back a checkpoint that can be used, or move "
                f"{self._folder} away to start over"
            )
        if checkpoint is None:
            return None

        for folder, problem in refused:
            aside = _unused_path(folder.with_name(_REFUSED + folder.name))
            folder.rename(aside)
            warn(f"{folder}: {problem}; kept as {aside.name}, {checkpoint.folder.name} is used")
        self._prune()  # a process may have been killed before it did
        return checkpoint

    def best(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Return the valid checkpoint with the highest metric, the newest of equals; None without any.

        Args:
            warn: called with a line about each better one that is not valid.
        """
        for checkpoint in self._by_metric():
            problem = validate_checkpoint(checkpoint.folder, self.identity)
            if not problem:
                return checkpoint
            warn(f"{checkpoint.folder}: {problem}; the next best is used")
        return None

    def differences(self, checkpoint: Checkpoint) -> str:
        """Describe how recipe or inputs of a checkpoint differ from the run's; "" if they do not."""
        return describe_differences(read_checkpoint_manifest(checkpoint.folder), self.identity)

    def fork(self, checkpoint: Checkpoint, state: dict[str, Any], source: str) -> Checkpoint:
        """Make a checkpoint the only one, with this run's recipe and inputs.

        Args:
            checkpoint: the checkpoint.
            state: its new state.
            source: name of the folder with the copy of the run as it was.
        """
        for folder in _step_folders(self._folder):
            if folder != checkpoint.folder:
                remove_path(folder)
        changes = {
            "epoch": epoch_of(self._folder),
            "recipe": self.identity.recipe,
            "inputs": self.identity.inputs,
            "forked_from": source,
            "state": state,
            "metric": None,
        }
        _change_manifest(checkpoint.folder, changes)
        return _read_checkpoint(checkpoint.folder)

    def has(self, step: int) -> bool:
        """Return True if the state after `step` steps is saved."""
        return (self._folder / step_name(step)).is_dir()

    @property
    def newest_step(self) -> int:
        """Number of steps of the newest saved state; 0 if there is none."""
        return max(map(_step_of, _step_folders(self._folder)), default=0)

    @property
    def oldest_restart(self) -> int:
        """Number of steps of the oldest state that is saved for a restart; 0 if there is none.

        A restart continues from it if the newer checkpoints turn out to be damaged.
        """
        for_restarts = _step_folders(self._folder)[-self._keep :]
        return min(map(_step_of, for_restarts), default=0)

    def rate(self, step: int, metric: float) -> None:
        """Add the metric to a checkpoint that was saved without it."""
        _change_manifest(self._folder / step_name(step), {"metric": metric})

    def is_best(self, metric: float) -> bool:
        """Return True if a checkpoint with this metric would be kept for it."""
        best = self._by_metric()[: self._best]
        if len(best) < self._best:
            return True
        return any(metric >= (checkpoint.metric or 0.0) for checkpoint in best)

    async def _complete(
        self, partial: Path, manifest: dict[str, Any], wait_written: WaitWritten
    ) -> None:
        """Wait until the files are written, then complete the checkpoint.

        Raises:
            ProcessLost: a rank has died. It is not raised as a CheckpointError, because the run starts
                lost ranks again.
            CheckpointError: the checkpoint could not be written for another reason.
        """
        try:
            files = await retry_while_full(wait_written, partial)
            manifest["files"] = dict(sorted(files.items()))
            await retry_while_full(
                lambda: asyncio.to_thread(self._commit, partial, manifest), partial
            )
        except ProcessLost:
            raise
        except Exception as error:
            raise _write_error(partial, error) from error

    def _commit(self, partial: Path, manifest: dict[str, Any]) -> None:
        """Write the manifest, and give the folder its name once everything in it is on disk."""
        for folder in {(partial / name).parent for name in manifest["files"]}:
            sync_folder(folder)
        write_json(partial / CHECKPOINT_MANIFEST, sealed(manifest))
        sync_folder(partial)
        partial.rename(self._folder / step_name(manifest["step"]))
        failpoint("checkpoint.there")
        sync_folder(self._folder)
        self._prune()

    def _is_recipe_problem(self, folder: Path, problem: str) -> bool:
        """Return True if the problem of a checkpoint is its recipe or its inputs."""
        with suppress(ManifestError):
            return problem == recipe_problem(read_checkpoint_manifest(folder), self.identity)
        return False

    def _prune(self) -> None:
        """Remove the checkpoints that are neither among the newest nor among the best."""
        folders = _step_folders(self._folder)
        best = [checkpoint.folder for checkpoint in self._by_metric()[: self._best]]
        retained = {*folders[-self._keep :], *best}
        for folder in folders:
            if folder in retained:
                continue
            # If this process is killed meanwhile, the next start removes the folder by this name.
            doomed = folder.with_name(f".{folder.name}.partial")
            folder.rename(doomed)
            failpoint("checkpoint.retired")
            remove_path(doomed)

    def _by_metric(self) -> list[Checkpoint]:
        """Return the checkpoints that have a metric, best first; of equals, the newest first."""
        rated = []
        for folder in _step_folders(self._folder):
            with suppress(ManifestError):
                checkpoint = _read_checkpoint(folder)
                if checkpoint.metric is not None:
                    rated.append(checkpoint)
        return sorted(
            rated, key=lambda checkpoint: (checkpoint.metric, checkpoint.step), reverse=True
        )


def newest_checkpoint(
    folder: Path, identity: Identity, warn: Callable[[str], None]
) -> Checkpoint | None:
    """Return the newest valid checkpoint, without renaming the others: a process may be using the folder."""
    checkpoint, refused = _find_newest(folder, identity)
    for other, problem in refused:
        warn(f"{other}: {problem}")
    return checkpoint


def _find_newest(
    folder: Path, identity: Identity
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """Return the newest valid checkpoint, and the newer ones with their problems.

    If none is valid, all are returned with their problems. A checkpoint whose epoch is earlier than
    that of an older one is not valid, because its process had lost the folder.
    """
    folders = _step_folders(folder)
    latest_epochs = accumulate(map(_epoch, folders), max)
    refused: list[tuple[Path, str]] = []
    for step_folder, latest in reversed(list(zip(folders, latest_epochs, strict=True))):
        problem = validate_checkpoint(step_folder, identity)
        epoch = _epoch(step_folder)
        if not problem and epoch < latest:
            problem = f"written in epoch {epoch}, after a process of epoch {latest} had taken the folder over"
        if not problem:
            return _read_checkpoint(step_folder), refused
        refused.append((step_folder, problem))
    return None, refused


def _step_folders(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints, oldest first."""
    return sorted(folder.glob("step_*"))


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _epoch(folder: Path) -> int:
    """Return the epoch of the process that wrote a checkpoint; 0 if the manifest does not say."""
    with suppress(ManifestError, ValueError, TypeError):
        return int(read_checkpoint_manifest(folder).get("epoch", 0))
    return 0


def _read_checkpoint(folder: Path) -> Checkpoint:
    manifest = read_checkpoint_manifest(folder)
    return Checkpoint(
        folder=folder, step=manifest["step"], state=manifest["state"], metric=manifest["metric"]
    )


def _change_manifest(folder: Path, changes: dict[str, Any]) -> None:
    write_json(folder / CHECKPOINT_MANIFEST, sealed(read_checkpoint_manifest(folder) | changes))


def _unused_path(path: Path) -> Path:
    """Return `path`, or the first path with a number appended that does not exist."""
    candidates = [path, *(path.with_name(f"{path.name}_{number}") for number in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def _write_error(partial: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return CheckpointError(
        f"{partial}: checkpoint could not be written ({reason}); make room, or make the folder "
        "writable, then run again"
    )
