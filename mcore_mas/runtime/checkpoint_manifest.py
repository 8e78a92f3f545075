"""Manifest of a checkpoint: run, models, recipe and state, and the size and digest of every file."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open

from mcore_mas.runtime.recipe import Identity, describe_differences
from rollout.base.digests import sha256
from rollout.base.json_files import read_json, unsealed

CHECKPOINT_FORMAT = 2  # version of the format of the files in a checkpoint's folder
CHECKPOINT_MANIFEST = "manifest.json"


class ManifestError(ValueError):
    """Error of a manifest that cannot be used; the message says why."""


class _File(BaseModel):
    bytes: int
    sha256: str


class _Manifest(BaseModel):
    """The fields of a manifest and their types."""

    run: str
    models: dict[str, dict[str, Any]]
    recipe: dict[str, Any] = {}
    inputs: dict[str, str] = {}
    step: int
    metric: float | None
    state: dict[str, Any]
    files: dict[str, _File]


def step_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step_{step:06d}"


def read_checkpoint_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Raises:
        ManifestError: the manifest is missing, damaged or of another format.
    """
    try:
        sealed_manifest = read_json(folder / CHECKPOINT_MANIFEST)
        version = sealed_manifest["format"]
        _ = sealed_manifest["sha256"]  # must exist, because `unsealed` accepts a record without it
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ManifestError(f"no readable {CHECKPOINT_MANIFEST}") from None
    if version != CHECKPOINT_FORMAT:
        raise ManifestError(
            f"written in format {version}, this version reads format {CHECKPOINT_FORMAT}"
        )

    try:
        manifest = dict(unsealed(sealed_manifest))
        _Manifest.model_validate(manifest, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ManifestError(f"{CHECKPOINT_MANIFEST}: {field}: {first['msg']}") from None
    except ValueError as error:
        raise ManifestError(f"{CHECKPOINT_MANIFEST}: {error}") from None
    return manifest


def validate_checkpoint(folder: Path, identity: Identity) -> str:
    """Validate a checkpoint for a run; return the first problem, or ""."""
    try:
        manifest = read_checkpoint_manifest(folder)
    except ManifestError as error:
        return str(error)
    if folder.name != step_name(manifest["step"]):
        return f"{CHECKPOINT_MANIFEST}: of step {manifest['step']}, but the folder has the name of another step"
    return (
        models_problem(manifest, identity)
        or recipe_problem(manifest, identity)
        or _check_files(folder, manifest)
    )


def surplus_steps_problem(folder: Path, taken_steps: int, total_steps: int) -> str:
    """Return why a run cannot continue from a checkpoint that has more steps than the run, or "".

    Args:
        folder: folder of the checkpoint, for the message.
        taken_steps: number of steps after which it was written.
        total_steps: trainer.steps of the run.
    """
    if taken_steps <= total_steps:
        return ""
    return (
        f"{folder}: the run has taken {taken_steps} steps, more than trainer.steps {total_steps}; set trainer.steps "
        f"to {taken_steps} or more, or name the run anew"
    )


def models_problem(manifest: Mapping[str, Any], identity: Identity) -> str:
    """Return why a checkpoint is of another run or of other architectures, or ""."""
    if manifest["run"] != identity.run:
        return f"of run '{manifest['run']}', not '{identity.run}'"

    models = manifest["models"]
    for name, model in identity.models.items():
        if name not in models:
            return f"has no policy '{name}' (it has {', '.join(models)})"
        as_json = json.loads(json.dumps(model))  # tuples become lists, as they are in the manifest
        for key, value in as_json.items():
            if models[name].get(key, value) != value:
                return f"policy '{name}' has {key} {models[name][key]}, but the run's model has {value}"
    surplus = set(models) - set(identity.models)
    if surplus:
        return f"has policy '{min(surplus)}', which the run does not have"
    return ""


def recipe_problem(manifest: Mapping[str, Any], identity: Identity) -> str:
    """Return how a checkpoint's recipe or inputs differ from the run's, and what to do.

    Return "" if they are equal, or if the run may change them.
    """
    if identity.may_change:
        return ""
    difference = describe_differences(manifest, identity)
    if not difference:
        return ""
    return f"trained with {difference}; fork it with --fork (trainer.resume=changed), or name the run anew"


def _check_files(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Validate the files of a checkpoint; return the first problem, or ""."""
    files: Mapping[str, Mapping[str, Any]] = manifest["files"]
    without_files = set(manifest["models"]) - {name.partition("/")[0] for name in files}
    if without_files:
        return f"{CHECKPOINT_MANIFEST}: no files of policy '{min(without_files)}'"

    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written"

    # hashing releases the interpreter's lock
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        digests = threads.map(lambda name: sha256(folder / name), files)
        for (name, expected), digest in zip(files.items(), digests, strict=True):
            if digest != expected["sha256"]:
                return f"{name} is not what was written"

    for name in files:
        if not name.endswith(".safetensors"):
            continue
        try:
            with safe_open(str(folder / name), "np"):
                pass
        except SafetensorError as error:
            return f"{name}: not a safetensors file ({error})"
    return ""
