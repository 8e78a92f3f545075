"""Fork of a run: keep the run as it was, and go on from its checkpoint with another recipe."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mcore_mas.runtime.checkpoint import Checkpoint, CheckpointError, Checkpoints
from rollout.base.files import atomic_folder

# Files that are never changed after they were written, so that a copy may be a hard link.
_IMMUTABLE_SUFFIXES = frozenset({".safetensors", ".parquet"})

# Files and folders in `train` that belong to its process, and not to the run.
_PROCESS_FILES = frozenset({"lock.json", "ray", "ranks"})

# Ids of the run at its trackers, where the fork is a separate run.
_TRACKER_IDS = ("mlflow.json", "wandb.id")


def fork_if_changed(
    train: Path,
    checkpoints: Checkpoints,
    newest: Checkpoint,
    steps: int,
    note: Callable[[str], None],
) -> Checkpoint:
    """Fork a run if its newest checkpoint was trained with another recipe or other inputs than now.

    The run as it was is kept in train.1 (train.2, ...). If the process is killed at any point,
    nothing of it is lost, and the same command forks it again.

    Args:
        train: folder `train` of the run.
        checkpoints: checkpoints of the run.
        newest: checkpoint to continue from.
        steps: `trainer.steps` of the new recipe.
        note: called with one line if the run is forked.

    Returns:
        The checkpoint to continue from; `newest` itself if its recipe and inputs have not changed.

    Raises:
        CheckpointError: the fork would train nothing, and the models of the old recipe would be
            taken for those of the new one.
        OSError: the run as it was cannot be kept; nothing has changed.
    """
    differences = checkpoints.differences(newest)
    if not differences:
        return newest
    if newest.step >= steps:
        raise CheckpointError(
            f"{newest.folder}: trained with {differences}; trainer.steps is {steps}, so that a fork "
            "would train nothing, and its models would be taken for those of the new recipe; raise "
            "trainer.steps, or name the run anew"
        )

    copy = _next_copy(train)
    with atomic_folder(copy) as partial:
        _copy_run(train, partial)
    for name in _TRACKER_IDS:
        (train / name).unlink(missing_ok=True)
    fork = checkpoints.fork(newest, newest.state, copy.name)
    note(f"forked at step {newest.step}: {differences}; the run as it was is kept in {copy}")
    return fork


def _next_copy(train: Path) -> Path:
    """Return the first of train.1, train.2, ... after all that exist."""
    numbers = [
        int(path.suffix[1:])
        for path in train.parent.glob(f"{train.name}.*")
        if path.suffix[1:].isdecimal()
    ]
    return train.with_name(f"{train.name}.{max(numbers, default=0) + 1}")


def _copy_run(train: Path, target: Path) -> None:
    """Copy all files of a run, except those of its process, to a folder that exists."""
    for path in train.iterdir():
        if path.name in _PROCESS_FILES:
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, symlinks=True, copy_function=_link_or_copy)
        elif path.is_file():
            _link_or_copy(str(path), str(target / path.name))


def _link_or_copy(source: str, target: str) -> None:
    """Make a hard link to an immutable file, if the file system has links; copy any other file."""
    if Path(source).suffix in _IMMUTABLE_SUFFIXES:
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)
