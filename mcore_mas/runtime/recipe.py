"""Identity of a run: its models, its recipe (what decides what is learnt), its inputs; and of an evaluation."""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mcore_mas import PACKAGES, package_folders
from mcore_mas.config.run import RunConfig
from retrieval.storage import cached_sha256
from rollout.base.digests import sha256
from rollout.base.nested import dotted_items
from rollout.base.ownership import FolderError
from rollout.base.yaml_files import read_yaml
from rollout.models.architecture import read_architecture
from rollout.records.files import read_tasks, tasks_digest

_LISTED = 8  # keys that are named of a recipe that differs
_LARGE = 1 << 26  # bytes of a file that is not read at every start, but when it has changed
_MANY = 10_000  # files of a folder, beyond which it is not read
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w-]*")  # or Gymnasium's `module:Name-v0`
_DIGESTED = ("data.", "policies.", "retriever.")  # what these keys name has its digest already


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose checkpoints these are."""

    run: str
    models: Mapping[
        str, Mapping[str, Any]
    ]  # architecture as plain data, by policy and `<policy>.critic`
    recipe: Mapping[str, Any] = field(
        default_factory=dict
    )  # what decides what is learnt, as JSON, by dotted key
    inputs: Mapping[str, str] = field(
        default_factory=dict
    )  # digests of what is read and run, by name; {}: not known
    may_change: bool = (
        False  # whether a checkpoint of another recipe or of other inputs can be used, for a fork
    )


def identity_of(config: RunConfig) -> Identity:
    """The run's name; of every trained policy and critic the model and what of it is trained; the recipe and its tasks.

    Raises:
        RecordError: the tasks cannot be read.
    """
    models: dict[str, dict[str, Any]] = {}
    for name in config.trained:
        policy = config.policies[name]
        lora = policy.lora
        adapted = lora and {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
        models[name] = {**asdict(read_architecture(Path(policy.model))), "lora": adapted}
        if policy.critic is not None:
            models[f"{name}.critic"] = models[name]
    recipe, tasks = recipe_of(config), config.folder / "tasks" / "train.parquet"
    if tasks.is_file():
        recipe["data.tasks"] = tasks_digest(read_tasks(tasks))
    return Identity(
        run=config.run, models=models, recipe=recipe, may_change=config.trainer.resume == "changed"
    )


def input_digests(config: RunConfig) -> dict[str, str]:
    """Digests of what a training reads and runs besides its tasks, by name.

    They are of models with their tokenizers, the index (whose manifest has those of its files and corpus), modules that
    the config names by import path, files and folders that the recipe or a task names, and this package's own code.
    """
    found = {"code": _code()}
    for policy, folder in config.models.items():
        for file in sorted(
            path for path in Path(folder).iterdir() if path.is_file() and path.name[0] != "."
        ):
            found[f"policies.{policy}.model/{file.name}"] = _digest(file)
    if (retriever := config.retriever) is not None:
        manifest = (retriever.folder or config.folder / "index") / "index.json"
        found |= {"retriever.index": sha256(manifest)} if manifest.is_file() else {}
    tasks = config.folder / "tasks" / "train.parquet"
    texts = (
        {text for task in read_tasks(tasks) for text in task.answers} if tasks.is_file() else set()
    )
    if games := sorted(Path(text) for text in texts if text[:1] == os.sep and os.path.exists(text)):  # noqa: PTH110
        found["data.games"] = sha256(*filter(Path.is_file, games))
    for key, value in recipe_of(config).items():
        for name in (
            _texts(value) if not key.startswith(_DIGESTED) and not key.endswith(".cwd") else ()
        ):
            if (module := _module(name)) is not None:
                found[f"{key}={name}"] = sha256(module)
            elif os.sep in name and os.path.exists(name):  # noqa: PTH110  (Path's raises for texts that are no path)
                found[f"{key}={name}"] = _digest(Path(name))
    return found


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of a config."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for own in value.values() if isinstance(value, dict) else value:
            yield from _texts(own)


def _digest(path: Path) -> str:
    """A digest of a file, or of all files in a folder with their names; none of a folder of more than `_MANY` files."""
    if path.is_file():
        return cached_sha256(path) if path.stat().st_size > _LARGE else sha256(path)
    there = (file for file in path.rglob("*") if file.is_file() and file.name[0] != ".")
    files = sorted(itertools.islice(there, _MANY + 1))
    if len(files) > _MANY:  # of a system or an environment of Python, more likely than of a run
        return f"more than {_MANY} files"
    return hashlib.sha256(
        json.dumps([[str(f.relative_to(path)), _digest(f)] for f in files]).encode()
    ).hexdigest()


@cache
def _code() -> str:
    """Return a digest of the sources of the three packages."""
    return sha256(*sorted(path for folder in package_folders() for path in folder.rglob("*.py")))


def _module(name: str) -> Path | None:
    """The file of an import path's module that is not this package's; None where it is no import path."""
    if _IMPORT_PATH.fullmatch(name) and name.partition(".")[0] not in PACKAGES:
        with suppress(ImportError, ValueError):
            spec = find_spec(name.partition(":")[0])
            return (
                Path(spec.origin)
                if spec is not None and spec.has_location and spec.origin
                else None
            )
    return None


def identity_digest(identity: Identity) -> str:
    """Return a digest of a run's identity, of 16 hexadecimal digits."""
    return hashlib.sha256(
        json.dumps(asdict(replace(identity, may_change=False))).encode()
    ).hexdigest()[:16]


def differences(manifest: Mapping[str, Any], identity: Identity) -> str:
    """What of the recipe, or else of the inputs, is other than it was, "" if nothing."""
    inputs = manifest.get("inputs", {}) if identity.inputs else {}
    return _changed(manifest.get("recipe", {}), identity.recipe) or _changed(
        inputs, identity.inputs
    )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What of the recipe is other than it was, "" if nothing, or if the checkpoint is too old to say."""
    changes = [
        f"{key}={_said(before, key)}, and the config says {_said(now, key)}"
        for key in sorted({*before, *now} if before else ())
        if before.get(key) != now.get(key)
    ]
    if not changes:
        return ""
    more = f" (and {len(changes) - _LISTED} more keys)" if len(changes) > _LISTED else ""
    return "; ".join(changes[:_LISTED]) + more


def _said(recipe: Mapping[str, Any], key: str) -> str:
    return json.dumps(recipe[key]) if key in recipe else "(default)"


@cache
def _sections() -> dict[str, frozenset[str]]:
    """The sections that decide what is learnt, each with its keys that may change."""
    return {
        name: frozenset(free)
        for name, free in read_yaml(Path(__file__).with_name("recipe.yaml")).items()
    }


def recipe_of(config: RunConfig) -> dict[str, Any]:
    """What of a config decides what is learnt, as plain JSON values by dotted key; without what is at its default.

    So a key that a later version adds is not taken for a change.
    """
    values = config.model_dump(mode="json", include=set(_sections()), exclude_defaults=True)
    parts = (
        dotted_items({name: values[name]}, free)
        for name, free in _sections().items()
        if name in values
    )
    return dict(itertools.chain.from_iterable(parts))


def identity_of_play(config: RunConfig) -> str:
    """A digest of all that decides what a team says to the test tasks: the tasks, the models' files, the settings.

    How many samples there are is not of it, nor how long things may take: an evaluation goes on when these change.

    Raises:
        FolderError: there is no such model folder.
    """
    models = {policy: [folder, *_files(Path(folder))] for policy, folder in config.models.items()}
    decides = {"seed", "env", "orchestra", "agents", "policies", "retriever"}
    settings = config.model_dump(mode="json", include=decides) | {
        "sampling": config.evaluation.sampling
    }
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
