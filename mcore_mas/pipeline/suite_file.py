"""File of a suite: its words on the command line, its schema, its grid, and the folders that it names."""

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
from rollout.base.text import nearest_hint, redact_secrets
from rollout.base.yaml_files import read_yaml

SUITE_SCHEMA = SHIPPED / "workflow" / "schemas" / "suite.schema.json"


class SuiteError(ValueError):
    """A suite cannot be used: says which key of which run, what was expected and what to do; no password or token."""

    def __init__(self, line: str) -> None:
        super().__init__(resolve_page_paths(redact_secrets(line)))


def check_command(arguments: Sequence[str]) -> None:
    """Refuse targets behind `--configfile` or `--config` of Snakemake, which take every word up to the next option.

    Snakemake's profile calls it before Snakemake reads any file.

    Raises:
        SystemExit: with the error in one line; also for a file that is not there, no YAML, or would fill memory.
    """
    files, option = [], ""
    for word in arguments:
        if word.startswith("-"):
            option = word
        elif option in ("--configfile", "--configfiles"):
            files.append(word)
        elif option in ("--config", "-C") and "=" not in word:
            raise SystemExit(
                f"error: --config took {word} for a setting; name targets before it, settings as KEY=VALUE"
            )
    if targets := [file for file in files[1:] if Path(file).suffix not in (".yaml", ".yml")]:
        raise SystemExit(
            f"error: --configfile took {targets[0]} for a suite; name targets before it: "
            f"snakemake {' '.join(targets)} --configfile {files[0]}"
        )
    if missing := [file for file in files if not Path(file).is_file()]:
        raise SystemExit(f"error: --configfile {missing[0]}: no such suite file")
    for file in files:
        try:
            read_yaml(Path(file))
        except yaml.YAMLError as error:
            raise SystemExit(
                f"error: --configfile {file}: not YAML ({' '.join(str(error).split())})"
            ) from None


def own_configs(suite: Mapping[str, Any], folder: Path | None) -> Path | None:
    """The folder of configs that a suite names in `config_dir`, or `configs` beside it if that is there.

    Raises:
        SuiteError: the named one is not there.
    """
    named = suite.get("config_dir")
    configs = ((folder or Path()) / (named or "configs")).resolve()
    if named and not configs.is_dir():
        raise SuiteError(
            f"config_dir: {configs} is not a folder; expected one with experiment/, team/ or other groups"
        )
    return configs if named or (folder and configs.is_dir()) else None


def make_importable(*folders: Path) -> None:
    """Have Python find modules of `folders`, here and in processes started here."""
    new = [
        path
        for path in dict.fromkeys(str(folder.resolve()) for folder in folders)
        if path not in sys.path
    ]
    sys.path[:0] = new
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*new, *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def combinations(grid: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """The runs of a grid with their overrides: an override per axis, then the settings of its value, then all runs'."""
    if grid is None:
        return {}
    runs = {}
    for values in itertools.product(*grid["axes"].values()):
        own = [f"{axis}={value}" for axis, value in zip(grid["axes"], values, strict=True)]
        own += [item for value in values for item in grid.get("settings", {}).get(str(value), [])]
        runs["_".join(str(value) for value in values)] = own + grid.get("overrides", [])
    return runs


def check_schema(suite: Mapping[str, Any]) -> None:
    """Refuse what workflow/schemas/suite.schema.json does not allow.

    Raises:
        SuiteError: the first such key, with the nearest that is known.
    """
    validator = jsonschema.Draft202012Validator(
        json.loads(SUITE_SCHEMA.read_text(encoding="utf-8"))
    )
    error = jsonschema.exceptions.best_match(validator.iter_errors(suite))
    if error is not None:
        message = error.message
        if "errorMessage" in error.schema and error.validator != "required":
            message = f"{error.schema['errorMessage']} (got {error.instance!r})"
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            unknown = next(key for key in error.instance if key not in known)
            message = f"unknown key '{unknown}'; known here: {', '.join(known)}{nearest_hint(unknown, known)}"
        raise SuiteError(f"{'.'.join(map(str, ('suite', *error.absolute_path)))}: {message}")


def check_writable(results: Path) -> None:
    """Refuse a results folder that cannot be made or written.

    Raises:
        SuiteError: which folder, and what to name in its place.
    """
    folder = results.absolute()
    try:
        while not folder.exists():
            folder = folder.parent
        tempfile.TemporaryFile(
            dir=folder
        ).close()  # to ask for rights is not enough: root has all of them
    except OSError as error:
        raise SuiteError(
            f"results folder '{results}': {folder} is not a folder that can be written; "
            "free it, or name another one under `results:` in the suite file"
        ) from error
