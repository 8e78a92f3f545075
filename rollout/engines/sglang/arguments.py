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
    """Return the kind of each argument: a key of `_TYPES`, `_UNCHECKED`, or the reason why it cannot be set."""
    kinds: dict[str, str] = {}
    for kind, names in read_yaml(Path(__file__).with_suffix(".yaml")).items():
        kinds |= dict.fromkeys(names.split(), kind)
    return kinds


def with_dashes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under the names of the server's command line."""
    return {name.replace("_", "-"): value for name, value in options.items()}


def argument_error(options: Mapping[str, Any]) -> str:
    """Validate `engine.options`; return the first problem, or ""."""
    kinds = _argument_kinds()
    for name, value in with_dashes(options).items():
        kind = kinds.get(name)
        if kind is None:
            return (
                f"SGLang {SGLANG_VERSION} has no argument '{name}'{nearest_hint(name, kinds)}; "
                "`sglang.launch_server --help` lists them"
            )
        if kind in _TYPES:
            description, types = _TYPES[kind]
            if value is not None and type(value) not in types:
                return f"{name}: expected {description} or null (got {value!r})"
        elif kind != _UNCHECKED:
            return f"{name} is not to be given to the servers; {kind}"
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
    """Return the value of NCCL_CUMEM_ENABLE that a server sets for itself.

    See `_set_envs_and_config` of SGLang's entrypoints/engine.py and, for DeepEP v2, `_handle_a2a_moe`
    of its arg_groups/moe_hook.py. Symmetric memory needs 1, whatever the environment says.
    """
    arguments = with_dashes(options)
    if arguments.get("enable-symm-mem"):
        return "1"
    default = "1" if arguments.get("moe-a2a-backend") == "deepep_v2" else "0"
    return environment.get("NCCL_CUMEM_ENABLE", default)
