"""Checkpoints of a run: a folder per step, trusted only with its manifest and its fingerprint."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open

from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.full_disk import until_room
from mcore_mas.runtime.recipe import Identity, differences
from rollout.base.async_tasks import cancel_tasks
from rollout.base.digests import Digest, sha256
from rollout.base.failpoints import failpoint
from rollout.base.files import sync_folder
from rollout.base.json_files import read_json, sealed, unsealed, write_json
from rollout.base.ownership import epoch_of, remove_path
from rollout.base.processes import ProcessLost

CHECKPOINT_FORMAT = 2  # of what a checkpoint's folder holds
_MANIFEST = "manifest.json"
_REFUSED = "refused_"

Written = Callable[[], Awaitable[dict[str, Digest]]]
Write = Callable[[Path], Awaitable[Written]]


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, or none can be used: one line that says what, where, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A valid checkpoint."""

    folder: Path
    step: int
    state: dict[str, Any]
    metric: float | None  # what `best` goes by; None where it was not measured


class Checkpoints:
    """The checkpoints under one folder, newest last."""

    def __init__(self, folder: Path, identity: Identity, *, keep: int, best: int = 0) -> None:
        """Keep the newest `keep` and the `best` by their metric; what a killed writer left behind is removed."""
        self._folder = folder
        self.identity = identity
        self._keep = keep
        self._best = best
        self._writing: asyncio.Task[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(".*.partial"):
            remove_path(partial)

    async def save(
        self, step: int, state: dict[str, Any], write: Write, metric: float | None = None
    ) -> None:
        """Save `state`, and what `write` puts into a folder, as the state after `step` steps.

        Returns once `write` has copied what it will put there and has given a function that waits for it, and writes it
        again if it is called again: every file's size and digest by name. The manifest follows in the background;
        `finish`, or the next save, waits for it. While the disk is full all is tried again, as `until_room` has it.

        Raises:
            CheckpointError: this one cannot be begun, or the one before could not be written.
        """
        await self.finish()
        partial = self._folder / f".{_name(step)}.{os.getpid()}.partial"
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
            await until_room(begin, partial)
            files = await write(partial)
        except OSError as error:
            raise _unwritten(partial, error) from error
        self._writing = asyncio.create_task(self._complete(partial, manifest, files))

    async def finish(self) -> None:
        """Wait for the checkpoint that is being written, if one is.

        Raises:
            CheckpointError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def abandon(self) -> None:
        """Give up the checkpoint that is being written, if one is."""
        writing, self._writing = self._writing, None
        await cancel_tasks([writing] if writing else ())

    def newest(self, told: Callable[[str], None]) -> Saved | None:
        """The newest checkpoint that can be used, None if there is none at all.

        `told` gets a line about each newer one, which is put aside under another name.

        Raises:
            CheckpointError: there are checkpoints, and none can be used.
        """
        found, refused = _search(self._folder, self.identity)
        if found is not None:
            for folder, fault in refused:
                aside = _free(folder.with_name(_REFUSED + folder.name))
                folder.rename(aside)
                told(f"{folder}: {fault}; kept as {aside.name}, {found.folder.name} is used")
            self._prune()  # what a process did not get to that was killed when the newest had its name
        elif refused:
            folder, fault = refused[0]
            others = f" (and {len(refused) - 1} older)" if len(refused) > 1 else ""
            raise CheckpointError(
                f"{folder}: {fault}; no checkpoint can be used{others}: bring a good one back, or move "
                f"{self._folder} away to start from step 0"
            )
        return found

    def best(self, told: Callable[[str], None]) -> Saved | None:
        """The checkpoint with the highest metric, the newest of equals; `told` of each that cannot be used."""
        for saved in self._by_metric():
            fault = _fault(saved.folder, self.identity)
            if not fault:
                return saved
            told(f"{saved.folder}: {fault}; the next best is used")
        return None

    def differs(self, saved: Saved) -> str:
        """What the run's recipe and inputs are other than a checkpoint's, "" if nothing."""
        return differences(_read_manifest(saved.folder), self.identity)

    def fork(self, saved: Saved, state: dict[str, Any], kept: str) -> Saved:
        """Make `saved` the only checkpoint, of this run's recipe and inputs and with `state`; `kept` has the others."""
        for older in _steps(self._folder):
            if older != saved.folder:
                remove_path(older)
        own = {
            "epoch": epoch_of(self._folder),
            "recipe": self.identity.recipe,
            "inputs": self.identity.inputs,
        }
        own |= {"forked_from": kept, "state": state, "metric": None}
        write_json(saved.folder / _MANIFEST, sealed(_read_manifest(saved.folder) | own))
        return _saved(saved.folder)

    def has(self, step: int) -> bool:
        """Whether the state after `step` steps is saved."""
        return (self._folder / _name(step)).is_dir()

    @property
    def newest_step(self) -> int:
        """After how many steps the newest state is that is saved; 0 without one."""
        return max(
            (int(folder.name.removeprefix("step_")) for folder in _steps(self._folder)), default=0
        )

    def rate(self, step: int, metric: float) -> None:
        """Write down the metric of a checkpoint that was saved without one."""
        folder = self._folder / _name(step)
        write_json(folder / _MANIFEST, sealed(_read_manifest(folder) | {"metric": metric}))

    def is_best(self, metric: float) -> bool:
        """Whether a checkpoint with this metric would be kept for it."""
        kept = self._by_metric()[: self._best]
        return self._best > len(kept) or any(metric >= (saved.metric or 0.0) for saved in kept)

    async def _complete(self, partial: Path, manifest: dict[str, Any], files: Written) -> None:
        try:
            manifest["files"] = dict(sorted((await until_room(files, partial)).items()))
            await until_room(lambda: asyncio.to_thread(self._commit, partial, manifest), partial)
        except ProcessLost:
            raise
        except Exception as error:
            raise _unwritten(partial, error) from error

    def _commit(self, partial: Path, manifest: dict[str, Any]) -> None:
        for folder in {(partial / name).parent for name in manifest["files"]}:
            sync_folder(folder)
        write_json(partial / _MANIFEST, sealed(manifest))
        sync_folder(partial)
        partial.rename(self._folder / _name(manifest["step"]))
        failpoint("checkpoint.there")
        sync_folder(self._folder)
        self._prune()

    def _prune(self) -> None:
        steps = _steps(self._folder)
        kept = {*steps[-self._keep :], *(saved.folder for saved in self._by_metric()[: self._best])}
        for old in steps:
            if old not in kept:
                gone = old.with_name(
                    f".{old.name}.partial"
                )  # if killed before it is all gone, it is swept at start
                old.rename(gone)
                failpoint("checkpoint.retired")
                remove_path(gone)

    def _by_metric(self) -> list[Saved]:
        """Those that have a metric, best first; of equals, the newest first."""
        rated = []
        for folder in _steps(self._folder):
            with suppress(_BadManifest):
                rated.append(_saved(folder))
        known = [saved for saved in rated if saved.metric is not None]
        return sorted(known, key=lambda saved: (saved.metric, saved.step), reverse=True)


def newest(folder: Path, identity: Identity, told: Callable[[str], None]) -> Saved | None:
    """The newest checkpoint in a folder that may be another process's: `told` of what is refused, which stays."""
    found, refused = _search(folder, identity)
    for other, fault in refused:
        told(f"{other}: {fault}")
    return found


def _search(folder: Path, identity: Identity) -> tuple[Saved | None, list[tuple[Path, str]]]:
    """The newest checkpoint that can be used, and the newer ones, each with what is wrong with it."""
    refused: list[tuple[Path, str]] = []
    steps = _steps(folder)
    epochs = list(accumulate(map(_epoch, steps), max))
    for step, latest in reversed(list(zip(steps, epochs, strict=True))):
        fault = _fault(step, identity)
        if not fault and _epoch(step) < latest:
            fault = f"written in epoch {_epoch(step)}, after a process of epoch {latest} had taken the folder over"
        if not fault:
            return _saved(step), refused
        refused.append((step, fault))
    return None, refused


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step_*"))


def _epoch(folder: Path) -> int:
    """Of the owner who wrote a checkpoint; 0 where it does not say."""
    with suppress(_BadManifest, ValueError, TypeError):
        return int(_read_manifest(folder).get("epoch", 0))
    return 0


def _fault(folder: Path, identity: Identity) -> str:
    """Why a checkpoint cannot be used, "" if it can."""
    try:
        manifest = _read_manifest(folder)
    except _BadManifest as fault:
        return str(fault)
    if folder.name != _name(manifest["step"]):
        return f"{_MANIFEST}: of step {manifest['step']}, under another's name"
    return _foreign(manifest, identity) or _damage(folder, manifest)


class _BadManifest(ValueError):
    """Why a manifest cannot be used."""


class _File(BaseModel):
    bytes: int
    sha256: str


class _Manifest(BaseModel):
    """What a manifest has, whoever sealed it."""

    run: str
    models: dict[str, dict[str, Any]]
    recipe: dict[str, Any] = {}
    inputs: dict[str, str] = {}
    step: int
    metric: float | None
    state: dict[str, Any]
    files: dict[str, _File]


def _read_manifest(folder: Path) -> dict[str, Any]:
    """A manifest; `_BadManifest` where it is not what was written, or is not there."""
    try:
        manifest = read_json(folder / _MANIFEST)
        version, _ = manifest["format"], manifest["sha256"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise _BadManifest(f"no readable {_MANIFEST}") from None
    if version != CHECKPOINT_FORMAT:
        raise _BadManifest(
            f"written in format {version}, this version reads format {CHECKPOINT_FORMAT}"
        )
    try:
        _Manifest.model_validate(whole := dict(unsealed(manifest)), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise _BadManifest(
            f"{_MANIFEST}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
    except ValueError as error:
        raise _BadManifest(f"{_MANIFEST}: {error}") from None
    return whole


def _foreign(manifest: Mapping[str, Any], identity: Identity) -> str:
    """What a checkpoint is of that the run is not, "" if nothing."""
    if manifest["run"] != identity.run:
        return f"of run '{manifest['run']}', not '{identity.run}'"
    models = manifest["models"]
    for name, own in identity.models.items():
        if name not in models:
            return f"has no policy '{name}' (it has {', '.join(models)})"
        for what, value in json.loads(json.dumps(own)).items():
            if models[name].get(what, value) != value:
                return f"policy '{name}' has {what} {models[name][what]}, the run's model {value}"
    if extra := set(models) - set(identity.models):
        return f"has policy '{min(extra)}', which the run does not have"
    if identity.may_change or not (different := differences(manifest, identity)):
        return ""
    return f"trained with {different}; fork it with --adopt (trainer.resume=changed), or name the run anew"


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _free(path: Path) -> Path:
    """`path`, or the first with a number behind it that is not there."""
    tries = (path, *(path.with_name(f"{path.name}_{n}") for n in range(2, 1000)))
    return next(candidate for candidate in tries if not candidate.exists())


def _saved(folder: Path) -> Saved:
    manifest = _read_manifest(folder)
    return Saved(
        folder=folder, step=manifest["step"], state=manifest["state"], metric=manifest["metric"]
    )


def _unwritten(partial: Path, error: Exception) -> CheckpointError:
    why = " ".join(str(error).split()) or type(error).__name__
    return CheckpointError(
        f"{partial}: checkpoint could not be written ({why}); make room or rights, then run again"
    )


def _damage(folder: Path, manifest: Mapping[str, Any]) -> str:
    """What is wrong with a checkpoint's files, "" if nothing is."""
    files: Mapping[str, Mapping[str, Any]] = manifest["files"]
    if bare := set(manifest["models"]) - {name.partition("/")[0] for name in files}:
        return f"{_MANIFEST}: no files of policy '{min(bare)}'"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written"
    with ThreadPoolExecutor(
        min(8, os.cpu_count() or 1)
    ) as threads:  # digesting leaves the interpreter to others
        digests = threads.map(lambda name: sha256(folder / name), files)
        for (name, expected), found in zip(files.items(), digests, strict=True):
            if found != expected["sha256"]:
                return f"{name} is not what was written"
    for name in files:
        try:
            if name.endswith(".safetensors"):
                with safe_open(str(folder / name), "np"):
                    pass
        except SafetensorError as error:
            return f"{name}: not a safetensors file ({error})"
    return ""
