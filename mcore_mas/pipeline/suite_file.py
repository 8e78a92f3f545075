"""Suite files: their schema, their grids, and the folders that they name."""

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from mcore_mas import SHIPPED, resolve_page_paths
from mcore_mas.runtime.project_path import path_problem
from rollout.base.hints import nearest_hint
from rollout.base.redaction import redact_secrets
from rollout.base.yaml_files import read_yaml

SNAKEFILE = SHIPPED / "workflow" / "Snakefile"
SUITE_SCHEMA = SHIPPED / "workflow" / "schemas" / "suite.schema.json"


class SuiteError(ValueError):
    """A suite cannot be used; the message names the run and the key, and has no secrets."""

    def __init__(self, line: str) -> None:
        super().__init__(resolve_page_paths(redact_secrets(line)))


def check_command(arguments: Sequence[str]) -> None:
    """Check Snakemake's command line for targets that are taken for suite files or settings.

    The paths that Snakemake puts into shell commands are checked first. `--configfile` and
    `--config` take every word up to the next option. Snakemake's profile calls this before
    Snakemake reads any file.

    Raises:
        SystemExit: a path cannot be quoted, a target follows such an option, or a suite file is
            missing, no YAML or too large; the message is one line.
    """
    problem = path_problem()
    if problem:
        raise SystemExit(f"error: {problem}")

    files: list[str] = []
    option = ""
    for word in arguments:
        if word.startswith("-"):
            option = word
        elif option in ("--configfile", "--configfiles"):
            files.append(word)
        elif option in ("--config", "-C") and "=" not in word:
            raise SystemExit(
                f"error: --config took {word} for a setting; name targets before it, settings as "
                "KEY=VALUE"
            )

    targets = [file for file in files[1:] if Path(file).suffix not in (".yaml", ".yml")]
    if targets:
        raise SystemExit(
            f"error: --configfile took {targets[0]} for a suite; name targets before it: "
            f"snakemake {' '.join(targets)} --configfile {files[0]}"
        )
    for file in files:
        if not Path(file).is_file():
            raise SystemExit(f"error: --configfile {file}: no such suite file")
    for file in files:
        try:
            read_yaml(Path(file))
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise SystemExit(f"error: --configfile {file}: not YAML ({reason})") from None


def user_configs_folder(suite: Mapping[str, Any], folder: Path | None) -> Path | None:
    """Return the folder of the user's configs, or None if there is none.

    It is the one that the suite names in `config_dir`, or else `configs` beside the suite file.

    Raises:
        SuiteError: the folder that the suite names is not there.
    """
    name = suite.get("config_dir")
    configs = ((folder or Path()) / (name or "configs")).resolve()
    if name:
        if not configs.is_dir():
            raise SuiteError(
                f"config_dir: {configs} is not a folder; expected one with experiment/, team/ or "
                "other groups"
            )
        return configs
    return configs if folder and configs.is_dir() else None


def make_importable(*folders: Path) -> None:
    """Add folders to the import path of this process, and to PYTHONPATH for its children.

    Folders that are on the import path already are left out of both.
    """
    new_paths: list[str] = []
    for folder in folders:
        path = str(folder.resolve())
        if path not in sys.path and path not in new_paths:
            new_paths.append(path)
    sys.path[:0] = new_paths

    inherited = os.environ.get("PYTHONPATH")
    python_path = [*new_paths, inherited] if inherited else new_paths
    os.environ["PYTHONPATH"] = os.pathsep.join(python_path)


def combinations(grid: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Return the overrides of each run of a grid, by the run's name.

    They are an override for each axis, then the grid's `settings` of each value of the run, then the
    grid's `overrides`.
    """
    if grid is None:
        return {}
    runs = {}
    for values in itertools.product(*grid["axes"].values()):
        overrides = [f"{axis}={value}" for axis, value in zip(grid["axes"], values, strict=True)]
        for value in values:
            overrides += grid.get("settings", {}).get(str(value), [])
        overrides += grid.get("overrides", [])
        runs["_".join(map(str, values))] = overrides
    return runs


def check_schema(suite: Mapping[str, Any], file: str = "") -> None:
    """Check a suite by workflow/schemas/suite.schema.json.

    Args:
        suite: the content of a suite file.
        file: the file, as errors name it; "": it is not known.

    Raises:
        SuiteError: a key is unknown, missing or of another type. The message names one of them.
    """
    validator = jsonschema.Draft202012Validator(
        json.loads(SUITE_SCHEMA.read_text(encoding="utf-8"))
    )
    error = jsonschema.exceptions.best_match(validator.iter_errors(suite))
    if error is not None:
        message = error.message
        if "errorMessage" in error.schema and error.validator != "required":
            message = f"{error.schema['errorMessage']} (got {repr(error.instance)[:200]})"
        if error.validator == "additionalProperties":
            allowed_keys = error.schema.get("properties", {})
            unknown_key = next(key for key in error.instance if key not in allowed_keys)
            message = (
                f"unknown key '{unknown_key}'; known here: {', '.join(allowed_keys)}"
                f"{nearest_hint(unknown_key, allowed_keys)}"
            )
        key = ".".join(map(str, ("suite", *error.absolute_path)))
        prefix = f"{file}: " if file else ""
        raise SuiteError(f"{prefix}{key}: {message}")


def check_writable(results: Path) -> None:
    """Check that the results folder can be made and written.

    Raises:
        SuiteError: the folder cannot be made or written.
    """
    folder = results.absolute()
    try:
        while not folder.exists():
            folder = folder.parent
        # A check of permissions would not do: root has all of them, also on a read-only disk.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SuiteError(
            f"results folder '{results}': {folder} is not a folder that can be written; "
            "make it writable, or name another one under `results:` in the suite file"
        ) from error
