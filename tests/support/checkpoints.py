"""Checkpoints of a run for tests: begun, saved, listed, and as another version would have written them."""

import asyncio
from pathlib import Path

from mcore_mas.runtime.checkpoint import Checkpoints, Written
from mcore_mas.runtime.checkpoint_manifest import read_checkpoint_manifest
from mcore_mas.runtime.recipe import Identity
from rollout.base.digests import Digest, write_chunks
from rollout.base.json_files import sealed, write_json

MODELS = {"policy": {"vocab": 512, "layers": 2, "rope_factor": None}}


def open_(
    folder: Path, *, run: str = "r", models: dict = MODELS, keep: int = 2, best: int = 0
) -> Checkpoints:
    return Checkpoints(folder, Identity(run=run, models=models), keep=keep, best=best)


async def begin(checkpoints: Checkpoints, step: int, metric: float | None = None) -> asyncio.Event:
    """Begin a checkpoint whose files come to disk once the event is set."""
    go = asyncio.Event()

    async def write(folder: Path) -> Written:
        async def written() -> dict[str, Digest]:
            await go.wait()
            text = f"weights of step {step}".encode()
            for policy in checkpoints.identity.models:
                (folder / policy).mkdir()
            return {
                f"{policy}/weights": write_chunks(folder / policy / "weights", [text[:3], text[3:]])
                for policy in checkpoints.identity.models
            }

        return written

    await checkpoints.save(step, {"kl": step}, write, metric)
    return go


def save(checkpoints: Checkpoints, *steps: int, metrics: tuple[float | None, ...] = ()) -> None:
    async def play() -> None:
        for step, metric in zip(steps, metrics or (None,) * len(steps), strict=True):
            (await begin(checkpoints, step, metric)).set()
        await checkpoints.finish()

    asyncio.run(play())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def silent(line: str) -> None:
    raise AssertionError(line)


def edit(folder: Path, **changes: object) -> None:
    """As another run or version would have written it."""
    write_json(folder / "manifest.json", sealed(read_checkpoint_manifest(folder) | changes))
