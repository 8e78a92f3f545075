"""Arguments of an SGLang server: which there are, which a setting of ours gives it, and what they ask for besides."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rollout.base.text import nearest_hint
from rollout.base.yaml_files import read_yaml
from rollout.engines.sglang import SGLANG_VERSION

_TYPES = {
    "switch": ("true or false", (bool,)),
    "integer": ("an integer", (int,)),
    "number": ("a number", (int, float)),
}


@cache
def _kinds() -> dict[str, str]:
    told = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {name: kind for kind, names in told.items() for name in names.split()}


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their names on the server's command line."""
    return {name.replace("_", "-"): value for name, value in options.items()}


def argument_problem(options: Mapping[str, Any]) -> str:
    """Why a server cannot be given one of the `options`, as `engine.options` has them; "" if it can be given all."""
    for name, value in named(options).items():
        kind = _kinds().get(name)
        words, types = _TYPES.get(kind or "", ("", (type(value),)))
        if kind is None:
            near = nearest_hint(name, _kinds())
            return f"SGLang {SGLANG_VERSION} has no argument '{name}'{near}; `sglang.launch_server --help` lists them"
        if kind.endswith(("instead", "here")):
            return f"{name} is not to be given to the servers; {kind}"
        if value is not None and type(value) not in types:
            return f"{name}: expected {words} or null (got {value!r})"
    return ""


def cumem(options: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """What a server tells NCCL of its memory, NCCL_CUMEM_ENABLE (`_set_envs_and_config` of entrypoints/engine.py).

    Symmetric memory needs 1, and then it takes no other word for it.
    """
    given = named(options)
    if given.get("enable-symm-mem"):
        return "1"
    return environment.get(
        "NCCL_CUMEM_ENABLE", "1" if given.get("moe-a2a-backend") == "deepep_v2" else "0"
    )


_SAVES_GRAPHS = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"  # a variable: graphs of decoding are given away with keys and values


def graph_problem(options: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Why a server that is to sleep would not start (`BreakableCudaGraphBackend`); "" if it would."""
    given = named(options)
    told = given.get("cuda-graph-config") or {}
    prompts = told.get("prefill", {}).get("backend") if isinstance(told, Mapping) else None
    off = given.get("disable-prefill-cuda-graph") or given.get("disable-cuda-graph")
    whole = {prompts, given.get("cuda-graph-backend-prefill")} & {"full", "disabled"}
    if environment.get(_SAVES_GRAPHS, "").lower() not in ("1", "true") or off or whole:
        return ""
    return f"with {_SAVES_GRAPHS} no server starts that makes graphs of prompts; set options.disable-prefill-cuda-graph"
