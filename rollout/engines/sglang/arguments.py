"""Arguments of an SGLang server: their names and types, and requirements of some of them."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rollout.base.hints import nearest_hint
from rollout.base.yaml_files import read_yaml
from rollout.engines.sglang import SGLANG_VERSION

# Description and Python types of the kinds of arguments whose values are checked.
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "switch": ("true or false", (bool,)),
    "integer": ("an integer", (int,)),
    "number": ("a number", (int, float)),
}
_UNCHECKED = "other"  # kind of the arguments whose values are not checked
# Environment variable with which a server that sleeps frees the CUDA graphs of decoding too, together
# with the KV cache.
_FREE_GRAPHS_VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"


@cache
def _argument_kinds() -> dict[str, str]:
    """Return the kind of each argument that can be set: a key of `_TYPES`, or `_UNCHECKED`."""
    kinds: dict[str, str] = {}
    for kind, names in _read_arguments().items():
        if kind in _TYPES or kind == _UNCHECKED:
            kinds |= dict.fromkeys(names.split(), kind)
    return kinds


@cache
def _refusal_reasons() -> dict[str, str]:
    """Return the reason why an argument cannot be set, for each such argument."""
    reasons: dict[str, str] = {}
    for kind_or_reason, names in _read_arguments().items():
        is_kind = kind_or_reason in _TYPES or kind_or_reason == _UNCHECKED
        if not is_kind:
            reasons |= dict.fromkeys(names.split(), kind_or_reason)
    return reasons


def _read_arguments() -> dict[str, str]:
    """Read the names of the arguments, separated by spaces, by their kind or the reason why they cannot be set."""
    return dict(read_yaml(Path(__file__).with_suffix(".yaml")))


def with_dashes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under the names of the server's command line."""
    return {name.replace("_", "-"): value for name, value in options.items()}


def argument_error(options: Mapping[str, Any]) -> str:
    """Validate `engine.options`; return the first problem, or ""."""
    kinds = _argument_kinds()
    reasons = _refusal_reasons()
    for name, value in with_dashes(options).items():
        if name in reasons:
            return f"{name} is not to be given to the servers; {reasons[name]}"
        if name not in kinds:
            hint = nearest_hint(name, [*kinds, *reasons])
            return (
                f"SGLang {SGLANG_VERSION} has no argument '{name}'{hint}; "
                "`sglang.launch_server --help` lists them"
            )
        kind = kinds[name]
        if kind in _TYPES:
            description, types = _TYPES[kind]
            if value is not None and type(value) not in types:
                return f"{name}: expected {description} or null (got {value!r})"
    return ""


def graph_error(options: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return the reason why a server that must be able to sleep would not start, or "".

    With `_FREE_GRAPHS_VARIABLE`, a server that sleeps frees its CUDA graphs of decoding. The default
    backend for the CUDA graphs of prompts, `BreakableCudaGraphBackend`, does not start with this
    variable, but the backend "full" does.
    """
    if environment.get(_FREE_GRAPHS_VARIABLE, "").lower() not in ("1", "true"):
        return ""
    arguments = with_dashes(options)
    if arguments.get("disable-prefill-cuda-graph") or arguments.get("disable-cuda-graph"):
        return ""
    config = arguments.get("cuda-graph-config")
    prefill = config.get("prefill", {}) if isinstance(config, Mapping) else {}
    backends = {prefill.get("backend"), arguments.get("cuda-graph-backend-prefill")}
    if backends & {"full", "disabled"}:
        return ""
    return (
        f"with {_FREE_GRAPHS_VARIABLE}, a server starts only without CUDA graphs of prompts, or with "
        'their backend "full"; set options.disable-prefill-cuda-graph'
    )


def nccl_cumem(options: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return the value of NCCL_CUMEM_ENABLE in a server; other ranks of its NCCL group need the same one.

    SGLang sets the variable if the environment does not, and sets 1 in any case for symmetric memory.
    See `_set_envs_and_config` of its entrypoints/engine.py and, for DeepEP v2, `_handle_a2a_moe` of
    its arg_groups/moe_hook.py.

    Args:
        options: arguments of the server.
        environment: environment variables of the server.
    """
    arguments = with_dashes(options)
    if arguments.get("enable-symm-mem"):
        return "1"
    default = "1" if arguments.get("moe-a2a-backend") == "deepep_v2" else "0"
    return environment.get("NCCL_CUMEM_ENABLE", default)
