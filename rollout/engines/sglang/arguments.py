"""Arguments of an SGLang server: which there are, and which a setting of ours gives it."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mcore_mas.rollout.base.files import read_yaml
from mcore_mas.rollout.base.text import nearest
from mcore_mas.rollout.engines.sglang import SGLANG_VERSION

_OWN = {  # by the setting that they would contradict; the GPUs of a server are on one node
    "engine.tp": ("tp-size", "tensor-parallel-size", "pp-size", "pipeline-parallel-size"),
    "engine.replicas": ("dp-size", "data-parallel-size", "nnodes", "node-rank", "dist-init-addr"),
    "": ("host", "port", "model-path", "model", "config", "api-key"),
    "engine.adapters": ("enable-lora", "lora-paths"),
    "policies.<name>.lora.rank": ("max-lora-rank",),
    "policies.<name>.lora.targets": ("lora-target-modules",),
}
_TYPES = {"switch": ("true or false", (bool,)), "integer": ("an integer", (int,)), "number": ("a number", (int, float))}


@cache
def _kinds() -> dict[str, str]:
    told = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {name: kind for kind, names in told.items() for name in names.split()}


def argument_problem(options: Mapping[str, Any]) -> str:
    """Why a server cannot be given one of the `options`, as `engine.options` has them; "" if it can be given all."""
    for name, value in ((name.replace("_", "-"), value) for name, value in options.items()):
        for setting in (setting for setting, names in _OWN.items() if name in names):
            instead = f"set {setting} instead" if setting else "it is chosen here"
            return f"{name} is not to be given to the servers; {instead}"
        if (kind := _kinds().get(name)) is None:
            near = nearest(name, _kinds())
            return f"SGLang {SGLANG_VERSION} has no argument '{name}'{near}; `sglang.launch_server --help` lists them"
        words, types = _TYPES.get(kind, ("", (type(value),)))
        if value is not None and type(value) not in types:
            return f"{name}: expected {words} or null (got {value!r})"
    return ""
