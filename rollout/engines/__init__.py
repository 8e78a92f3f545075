"""Rollout engines, by name.

- `protocol`      what every engine promises, and its records
- `local`         the embedded engine in this process
- `hosted`        the embedded engine in a Ray actor of its own;  `host`: the actor's inside
- `sglang`        SGLang servers, over HTTP
- `external`      no engine but a voice: a frozen model behind an API, in text only
- `scripted`      canned replies, for tests
- `embedded`      the embedded engine itself: admission, prefix reuse, decoding, version spans
- `request`       what can be wrong with a request
- `rows`          its table of cache rows;  `sampler`: its random draws
- `decoder`       its model;  `weights`: the buffers and their names;  `architecture`: the sizes
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
