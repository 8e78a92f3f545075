"""A fork of a run: what it was is kept in a folder beside; its newest checkpoint becomes one of a new recipe."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from mcore_mas.rollout.base.files import atomic_folder
from mcore_mas.training.checkpoint import CheckpointError, Checkpoints, Saved
from mcore_mas.training.recipe import lineage_of

_NEVER_APPENDED = frozenset({".safetensors", ".parquet"})  # written once, so that one copy on the disk is enough
_OF_THE_PROCESS = ("lock.json", "ray", "ranks")


def fork_run(train: Path, checkpoints: Checkpoints, found: Saved, steps: int) -> tuple[Saved, str]:
    """Fork the run in `train` if `found`, which it goes on from, is of another recipe or other inputs.

    Killed at any point, it has kept all that there was, and the same command does it again.

    Args:
        steps: of the new recipe.

    Returns:
        What to go on from, and the line that says so; `found` and "" where it is of the run's own recipe.

    Raises:
        CheckpointError: nothing would be trained by the new recipe, whose result this then would be.
        OSError: the old state cannot be kept; nothing has changed.
    """
    changed = checkpoints.differs(found)
    if not changed:
        return found, ""
    if found.step >= steps:
        raise CheckpointError(
            f"{found.folder}: trained with {changed}; trainer.steps is {steps}, so that a fork would train nothing and "
            "be taken for the new recipe's: raise it, or name the run anew"
        )
    taken = (int(path.suffix[1:]) for path in train.parent.glob(f"{train.name}.*") if path.suffix[1:].isdecimal())
    kept = train.with_name(f"{train.name}.{max(taken, default=0) + 1}")
    with atomic_folder(kept) as partial:
        for path in train.iterdir():
            if path.is_dir() and path.name not in _OF_THE_PROCESS:
                shutil.copytree(path, partial / path.name, symlinks=True, copy_function=_linked)
            elif path.is_file() and path.name not in _OF_THE_PROCESS:
                _linked(str(path), str(partial / path.name))
    (train / "mlflow.json").unlink(missing_ok=True)  # a run of its own there, too
    start, before = lineage_of(checkpoints.identity), found.state.get("lineage", {})
    lineage = {version: hashlib.sha256(f"{start} {own}".encode()).hexdigest()[:16] for version, own in before.items()}
    state = {**found.state, "mlflow_run": None, "lineage": lineage | {"0": start}}
    line = f"forked at step {found.step}: {changed}; the run as it was is kept in {kept}"
    return checkpoints.fork(found, state, kept.name), line


def _linked(source: str, target: str) -> None:
    if Path(source).suffix in _NEVER_APPENDED:
        try:
            os.link(source, target)
        except OSError:  # a file system without links
            pass
        else:
            return
    shutil.copy2(source, target)
