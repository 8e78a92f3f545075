"""Rollout engines, by name: what samples a policy's completions.

- `protocol`   what every engine promises, and what can be wrong with a request
- `embedded`   continuous batching in plain torch, in this process or in a Ray actor
- `sglang`     SGLang servers, over HTTP
- `remote`     no engine: frozen models behind an API, in text only
- `scripted`   canned replies, for tests
"""

from __future__ import annotations

from typing import Any

from rollout.base.registry import lookup

# Import paths, so that naming an engine imports neither torch nor Ray.
ENGINES = {
    "embedded": "rollout.engines.embedded.engine:HostedEngine",
    "embedded_local": "rollout.engines.embedded.engine:LocalEngine",
    "sglang": "rollout.engines.sglang.engine:SGLangEngine",
    "scripted": "rollout.engines.scripted:ScriptedEngine",
}

TRANSPORTS = {  # of each engine that is trained, its own choice first; `rollout.sync`
    "embedded": ("shared", "disk", "delta"),
    "sglang": ("disk", "changed", "tensor", "distributed"),
}


def engine_class(name: str) -> Any:
    """The class of the engine `name` (or at the import path `name`); imports what that engine needs.

    Raises:
        UnknownName: no such engine.
    """
    found = lookup("engine", name, ENGINES)
    return lookup("engine", found, {}) if isinstance(found, str) else found
