"""A suite: which runs one call of the pipeline makes, checked and resolved before any job starts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from mcore_mas.config import ConfigError, resolve
from mcore_mas.files import write_text

SCHEMA = Path(__file__).resolve().parent.parent / "workflow" / "schemas" / "suite.schema.json"


class SuiteError(ValueError):
    """A suite cannot be used: says which key of which run, what was expected and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The runs of a suite by name, each with its resolved config."""

    name: str
    runs: Mapping[str, Mapping[str, Any]]  # run -> resolved config
    experiments: Mapping[str, str]  # run -> experiment; runs that differ only in their seed share one
    published: tuple[Mapping[str, Any], ...] = ()  # numbers to print beside ours

    @classmethod
    def load(cls, suite: Mapping[str, Any]) -> Suite:
        """Check the content of a suite file and compose the config of each of its runs.

        Raises:
            SuiteError: a key is unknown or of the wrong type, an override does not compose, or the results folder
                cannot be written.
        """
        _check_schema(suite)
        results = suite.get("results", "results")
        _check_writable(Path(results))
        runs = {}
        for run, overrides in suite["experiments"].items():
            try:
                runs[run] = resolve([*overrides, f"run={run}", f"results={results}"])
            except ConfigError as error:
                raise SuiteError(f"suite '{suite['suite']}', run '{run}': {error}") from error
        return cls(
            name=suite["suite"],
            runs=runs,
            experiments=_experiments(suite["experiments"]),
            published=tuple(suite.get("published", ())),
        )

    def cold_starts(self, run: str) -> bool:
        """Whether `run` makes its own first model; otherwise its policies name model folders that exist."""
        return self.runs[run].get("cold_start") is not None

    def indexes(self, run: str) -> bool:
        """Whether `run` builds an index of its own: its team searches, and no server elsewhere answers."""
        retriever = self.runs[run].get("retriever")
        return retriever is not None and retriever.get("url") is None

    def pattern(self, *, indexes: bool) -> str:
        """A regular expression of the runs that build an index, or of those that do not."""
        names = [run for run in self.runs if self.indexes(run) is indexes]
        return "|".join(map(re.escape, names)) or "(?!)"  # (?!) matches no run


def _check_schema(suite: Mapping[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    error = jsonschema.exceptions.best_match(validator.iter_errors(suite))
    if error is not None:
        place = "/".join(map(str, error.absolute_path)) or "top level"
        raise SuiteError(
            f"suite file, {place}: {error.message} (workflow/schemas/suite.schema.json says what is allowed)"
        )


def _check_writable(results: Path) -> None:
    folder = results.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise SuiteError(
            f"results folder '{results}': {folder} is not a folder that can be written; "
            "free it, or name another one under `results:` in the suite file"
        )


def _experiments(overrides: Mapping[str, list[str]]) -> dict[str, str]:
    first: dict[tuple[str, ...], str] = {}
    experiments = {}
    for run, items in overrides.items():
        recipe = tuple(item for item in items if item.partition("=")[0] != "seed")
        experiments[run] = first.setdefault(recipe, run)
    return experiments


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a resolved config as YAML, complete or not at all."""
    write_text(path, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=120))
