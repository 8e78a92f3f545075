"""Checkpoints of a run: a folder per step, trusted only with its manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mcore_mas.files import sha256, write_json

_MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints under one folder, newest last."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Keep the newest `keep` under `folder`; what a killed writer left behind is removed."""
        self._folder = folder
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(".*.partial"):
            shutil.rmtree(partial)

    async def save(self, step: int, state: dict[str, Any], write: Callable[[Path], Awaitable[None]]) -> None:
        """Save what `write` puts into a folder, with `state`, as the state after `step` steps."""
        name = f"step_{step:06d}"
        partial = self._folder / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        await write(partial)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        manifest = {
            "state": state,
            "files": {
                str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
            },
        }
        write_json(partial / _MANIFEST, manifest)
        target = self._folder / name
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in self._steps()[: -self._keep]:
            shutil.rmtree(old)

    def newest(self, skipped: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
        """The newest valid checkpoint and its state, None if there is none; `skipped` is told of each invalid one."""
        for folder in reversed(self._steps()):
            fault = _fault(folder)
            if not fault:
                return folder, json.loads((folder / _MANIFEST).read_text())["state"]
            skipped(f"{folder}: {fault}; an older checkpoint is used")
        return None

    def _steps(self) -> list[Path]:
        return sorted(self._folder.glob("step_*"))


def _fault(folder: Path) -> str:
    """Why a checkpoint cannot be trusted, "" if it can."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return f"no readable {_MANIFEST}"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"] or sha256(path) != expected["sha256"]:
            return f"{name} is not what was written"
    return ""
