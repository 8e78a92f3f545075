"""Architectures of published models by name, for planning a run before its models are downloaded."""

from functools import cache
from pathlib import Path
from typing import Any

from rollout.base.errors import ModelError
from rollout.base.yaml_files import read_yaml
from rollout.models.architecture import Architecture, parse_architecture, read_architecture


@cache
def published_shapes() -> dict[str, Any]:
    """Read published.yaml.

    Returns:
        `columns`: settings of config.json.
        `models`: row of values for these columns, by model name.
        `like`: name of a model of the same shape, by model name.
        `assumed`: names of models whose shape is not known for certain.
    """
    table: dict[str, Any] = read_yaml(Path(__file__).with_name("published.yaml"))
    return table


def planned_architecture(folder: str) -> Architecture:
    """Read `folder`/config.json, or if it does not exist, look up the published model of this name.

    Raises:
        ModelError: there is neither, or the model is not supported.
    """
    if (Path(folder) / "config.json").is_file():
        return read_architecture(folder)

    table = published_shapes()
    name = Path(folder).name.removesuffix("-Instruct").removesuffix("-Base")
    row = table["models"].get(table["like"].get(name, name))
    if row is None:
        published_names = ", ".join([*table["models"], *table["like"]])
        raise ModelError(
            f"{folder}: no config.json here, and no published model of this name; published models: "
            f"{published_names}"
        )
    return parse_architecture(dict(zip(table["columns"], row, strict=True)), folder)
