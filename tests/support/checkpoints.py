"""Checkpoints of a run, for tests: open, save, list and change them."""

import asyncio
from pathlib import Path

from mcore_mas.runtime.checkpoint import Checkpoints, WaitWritten
from mcore_mas.runtime.checkpoint_manifest import read_checkpoint_manifest
from mcore_mas.runtime.recipe import Identity
from rollout.base.digests import Digest, write_chunks
from rollout.base.json_files import sealed, write_json

MODELS = {"policy": {"vocab": 512, "layers": 2, "rope_factor": None}}


def open_(
    folder: Path, *, run: str = "r", models: dict = MODELS, keep: int = 2, best: int = 0
) -> Checkpoints:
    """Return the checkpoints in `folder`; see `Checkpoints`."""
    return Checkpoints(folder, Identity(run=run, models=models), keep=keep, best=best)


async def begin(checkpoints: Checkpoints, step: int, metric: float | None = None) -> asyncio.Event:
    """Begin a checkpoint; return an event. The checkpoint's files are written after the event is set."""
    may_write = asyncio.Event()

    async def write(folder: Path) -> WaitWritten:
        async def wait_written() -> dict[str, Digest]:
            await may_write.wait()
            text = f"weights of step {step}".encode()
            digests = {}
            for policy in checkpoints.identity.models:
                (folder / policy).mkdir()
                path = folder / policy / "weights"
                digests[f"{policy}/weights"] = write_chunks(path, [text[:3], text[3:]])
            return digests

        return wait_written

    await checkpoints.save(step, {"kl": step}, write, metric)
    return may_write


def save(checkpoints: Checkpoints, *steps: int, metrics: tuple[float | None, ...] = ()) -> None:
    """Save a checkpoint of each step, with its metric if `metrics` are given; see `Checkpoints.save`."""

    async def save_all() -> None:
        for step, metric in zip(steps, metrics or (None,) * len(steps), strict=True):
            may_write = await begin(checkpoints, step, metric)
            may_write.set()
        await checkpoints.finish()

    asyncio.run(save_all())


def names(folder: Path) -> list[str]:
    """Return the sorted names of a folder's entries."""
    return sorted(path.name for path in folder.iterdir())


def silent(line: str) -> None:
    """Fail the test; used as a `tell` callback that must not be called."""
    raise AssertionError(line)


def edit(folder: Path, **changes: object) -> None:
    """Change fields of a checkpoint's manifest, and seal it again."""
    write_json(folder / "manifest.json", sealed(read_checkpoint_manifest(folder) | changes))
