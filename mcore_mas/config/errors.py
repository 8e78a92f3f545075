"""Config errors: what is wrong with a config, in one line."""

from __future__ import annotations

import re
from difflib import get_close_matches

from hydra.errors import MissingConfigException
from pydantic import ValidationError

from rollout.base.options import Section
from rollout.base.schema_words import expected, json_schema, keys_of, walk


def invalid(error: ValidationError, model: type[Section]) -> str:
    """The first of pydantic's complaints about values for `model`; a misspelt key comes before a missing one."""
    first = min(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
    place = ".".join(map(str, first["loc"])) or "the config"
    if first["type"] == "missing":
        return f"'{place}' is missing"
    if first["type"] == "value_error":
        return f"{place}: {first['msg'].removeprefix('Value error, ')}"
    message = first["msg"]
    if first["type"] != "option":  # whose message says already what was expected
        schema = json_schema(model)
        keys, at = walk(schema, first["loc"])
        if first["type"] == "extra_forbidden":
            unknown = ".".join(map(str, first["loc"][: len(keys) + 1]))
            return f"unknown key '{unknown}'; known here: {', '.join(keys_of(schema, at))}"
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
