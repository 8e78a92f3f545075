"""Arguments of an SGLang server: which there are, and which a setting of ours gives it."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mcore_mas.rollout.base.files import read_yaml
from mcore_mas.rollout.base.text import nearest
from mcore_mas.rollout.engines.sglang import SGLANG_VERSION

_TYPES = {"switch": ("true or false", (bool,)), "integer": ("an integer", (int,)), "number": ("a number", (int, float))}


@cache
def _kinds() -> dict[str, str]:
    told = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {name: kind for kind, names in told.items() for name in names.split()}


def argument_problem(options: Mapping[str, Any]) -> str:
    """Why a server cannot be given one of the `options`, as `engine.options` has them; "" if it can be given all."""
    for name, value in ((name.replace("_", "-"), value) for name, value in options.items()):
        kind = _kinds().get(name)
        words, types = _TYPES.get(kind or "", ("", (type(value),)))
        if kind is None:
            near = nearest(name, _kinds())
            return f"SGLang {SGLANG_VERSION} has no argument '{name}'{near}; `sglang.launch_server --help` lists them"
        if kind.endswith(("instead", "here")):
            return f"{name} is not to be given to the servers; {kind}"
        if value is not None and type(value) not in types:
            return f"{name}: expected {words} or null (got {value!r})"
    return ""
