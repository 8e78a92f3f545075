"""Digests of everything that a training reads and runs besides its tasks and its config."""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mcore_mas import PACKAGES, package_folders
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.recipe import CODE_KEY, recipe_of
from retrieval.digests import cached_sha256
from rollout.base.digests import sha256
from rollout.records.files import read_tasks

INDEX_KEY = "retriever.index"
GAMES_KEY = "data.games"

# Folders with more files than this are not read: such a folder is rather one of the system or of a
# Python environment than one of the run.
MAX_FOLDER_FILES = 10_000

# Files larger than this are only read again when they have changed.
_LARGE_FILE_BYTES = 1 << 26

# MODULE:NAME; Gymnasium's `module:Name-v0` is one too.
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w-]*")

# Prefixes of keys whose files have separate digests.
_DIGESTED_ELSEWHERE = ("data.", "policies.", "retriever.")


def input_digests(config: RunConfig) -> dict[str, str]:
    """Return digests by name of the inputs of a run, besides its tasks.

    The inputs are the models with their tokenizers, the manifest of the index (which has the
    digests of its files and corpus), the modules that the config names by import path, the files
    and folders that the recipe or a task names, and the code of this project.
    """
    digests = {CODE_KEY: code_digest()}
    for policy, folder in config.models.items():
        for file in sorted(Path(folder).glob("*")):
            if file.is_file() and not file.name.startswith("."):
                digests[f"{model_key(policy)}/{file.name}"] = _path_digest(file)

    if config.retriever is not None:
        index = config.retriever.folder or config.folder / "index"
        manifest = index / "index.json"
        if manifest.is_file():
            digests[INDEX_KEY] = sha256(manifest)

    game_files = _game_files(config.folder / "tasks" / "train.parquet")
    if game_files:
        digests[GAMES_KEY] = sha256(*(file for file in game_files if file.is_file()))

    for key, value in _recipe_with_files(config).items():
        for text in _texts_in(value):
            if _is_path(text):
                digests[f"{key}={text}"] = _path_digest(Path(text))
    return digests | recipe_module_digests(config)


def model_key(policy: str) -> str:
    """Return the beginning of the names of the digests of a policy's starting model."""
    return f"policies.{policy}.model"


def recipe_module_digests(config: RunConfig) -> dict[str, str]:
    """Return the part of `input_digests` about the modules that the recipe names."""
    values = _recipe_with_files(config)
    # The names of tools are keys of a mapping, of which the recipe has only the values.
    for agent, settings in config.agents.items():
        values[f"agents.{agent}.tools"] = list(settings.tools)
    digests = {}
    for key, value in values.items():
        for text, digest in module_digests(value).items():
            digests[f"{key}={text}"] = digest
    return digests


def _recipe_with_files(config: RunConfig) -> dict[str, Any]:
    """Return the part of the recipe whose values may name modules, files and folders."""
    return {
        key: value
        for key, value in recipe_of(config).items()
        if not key.startswith(_DIGESTED_ELSEWHERE) and not key.endswith(".cwd")
    }


def module_digests(value: Any) -> dict[str, str]:
    """Return digests of the user's modules that a value of a config names, by import path.

    Modules that these import are not included.
    """
    digests = {}
    for text in _texts_in(value):
        module = _module_file(text)
        if module is not None:
            digests[text] = sha256(module)
    return digests


@cache
def code_digest() -> str:
    """Return a digest of the sources of the three packages."""
    return sha256(*sorted(path for folder in package_folders() for path in folder.rglob("*.py")))


def _game_files(tasks: Path) -> list[Path]:
    """Return the files and folders that answers of tasks name, sorted; these are games of ALFWorld."""
    if not tasks.is_file():
        return []
    answers = {answer for task in read_tasks(tasks) for answer in task.answers}
    return sorted(
        Path(answer) for answer in answers if answer.startswith(os.sep) and _is_path(answer)
    )


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a value of a config, and the keys of its mappings, which may name tools."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts_in(key)
            yield from _texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)


def _is_path(text: str) -> bool:
    """Return True if a text with a separator is a path that exists.

    `Path.exists` would raise an error for texts that cannot be paths, such as very long ones.
    """
    return os.sep in text and os.path.exists(text)  # noqa: PTH110


def _module_file(text: str) -> Path | None:
    """Return the file of the module that an import path names.

    None: the text is no import path, there is no such module, or it is one of this project.
    """
    package = text.partition(".")[0]
    if not _IMPORT_PATH.fullmatch(text) or package in PACKAGES:
        return None
    spec = None
    with suppress(ImportError, ValueError):
        spec = find_spec(text.partition(":")[0])
    if spec is None or not spec.has_location or not spec.origin:
        return None
    return Path(spec.origin)


def _path_digest(path: Path) -> str:
    """Return a digest of a file, or of all files in a folder with their names.

    Hidden files do not count.
    """
    if path.is_file():
        is_large = path.stat().st_size > _LARGE_FILE_BYTES
        return cached_sha256(path) if is_large else sha256(path)

    visible = (file for file in path.rglob("*") if file.is_file() and file.name[0] != ".")
    files = sorted(itertools.islice(visible, MAX_FOLDER_FILES + 1))
    if len(files) > MAX_FOLDER_FILES:
        return f"more than {MAX_FOLDER_FILES} files"
    rows = [[str(file.relative_to(path)), _path_digest(file)] for file in files]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
