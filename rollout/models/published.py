"""Shapes of published models by name, for what is planned before their folders are there."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture, architecture_of, read_architecture

_TABLE = Path(__file__).with_name("published.yaml")


@cache
def published_shapes() -> dict[str, Any]:
    """The table: columns, a row for each of `models`, names that are `like` one, and those whose shape is `assumed`."""
    table: dict[str, Any] = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return table


def planned_architecture(folder: str) -> Architecture:
    """The sizes in `folder`/config.json, or where the folder is not there, of the published model of its name.

    Raises:
        ModelError: there is neither, or the config.json describes another kind of model.
    """
    if (Path(folder) / "config.json").is_file():
        return read_architecture(folder)
    return _published(Path(folder).name, folder)


@cache
def _published(name: str, folder: str) -> Architecture:
    table = published_shapes()
    plain = name.removesuffix("-Instruct").removesuffix("-Base")
    row = table["models"].get(table["like"].get(plain, plain))
    if row is None:
        known = ", ".join([*table["models"], *table["like"]])
        raise ModelError(f"{folder}: no config.json here, and no published model of this name; known: {known}")
    return architecture_of(dict(zip(table["columns"], row, strict=True)), folder)
