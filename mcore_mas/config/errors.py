"""What is wrong with a config, in one line."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any

from hydra.errors import MissingConfigException
from pydantic import ValidationError

from rollout.base.schema_words import expected, json_schema, walk
from rollout.base.section import Section


def invalid(error: ValidationError, model: type[Section]) -> str:
    """The first of pydantic's complaints about values for `model`."""
    errors = error.errors()
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])  # a typo explains the others
    place = ".".join(str(part) for part in first["loc"]) or "the config"
    if first["type"] == "extra_forbidden":
        return _unknown(first["loc"], model) or f"unknown key '{place}'"
    if first["type"] == "missing":
        return f"'{place}' is missing"
    if first["type"] == "value_error":
        return f"{place}: {first['msg'].removeprefix('Value error, ')}"
    message = first["msg"]
    if first["type"] != "option":  # whose message says already what was expected
        schema = json_schema(model)
        keys, at = walk(schema, first["loc"])
        place, message = ".".join(map(str, keys)), f"expected {expected(at, schema['$defs'])}"
    got = "" if isinstance(first["input"], dict) else f" (got {first['input']!r})"
    return f"{place}: {message}{got}"


def uncomposed(error: Exception) -> str:
    """Why Hydra could not compose values."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        once = re.fullmatch(r"(\w+)_(separate|partly)", name)
        if group == "team" and once and once[1] in error.options:
            return f"team '{name}' is now team '{once[1]}' with sharing: {once[2]} (team={once[1]} sharing={once[2]})"
        near = get_close_matches(name, error.options, n=5, cutoff=0.5)
        which = f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(error.options)}"
        return f"no file '{name}' in configs/{group}; {which}"
    return " ".join(str(error).split())


def _unknown(loc: Sequence[int | str], model: type[Section]) -> str | None:
    """The first part of `loc` that is no key, with the keys there; None when all may be."""
    at: Any = model
    for depth, part in enumerate(loc):
        if isinstance(at, type) and issubclass(at, Section):
            if part not in at.model_fields:
                place = ".".join(map(str, loc[: depth + 1]))
                return f"unknown key '{place}'; known here: {', '.join(at.model_fields)}"
            at = _present(at.model_fields[str(part)].annotation)
        else:  # in a dict or list of sections any name goes, in a dict of plain values all that follows
            at = _present((typing.get_args(at) or (None,))[-1])
    return None


def _present(annotation: Any) -> Any:
    """What a key holds when it is not None."""
    options = [option for option in typing.get_args(annotation) if option is not NoneType]
    optional = NoneType in typing.get_args(annotation)
    return options[0] if optional else annotation
