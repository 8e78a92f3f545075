"""Engines and their weight transports by name."""

from __future__ import annotations

from functools import partial

from rollout.base.lookup import lookup_import
from rollout.sync.transport import REMOVED_TRANSPORTS

# Import paths, so that naming an engine imports neither torch nor Ray.
ENGINES = {
    "embedded": "rollout.engines.embedded.engine:HostedEngine",
    "embedded_replicas": "rollout.engines.embedded.replicas:ReplicatedEngine",
    "embedded_local": "rollout.engines.embedded.batching:LocalEngine",
    "sglang": "rollout.engines.sglang.engine:SGLangEngine",
}
engine_class = partial(lookup_import, "engine", paths=ENGINES)  # of a name

# Weight transports of each engine that can be trained; the first is the default.
TRANSPORTS = {
    "embedded": ("shared", "disk"),
    "sglang": ("disk", "tensor", "distributed"),
}


def transport_error(engine: str, transport: str) -> str:
    """Validate the transport of an engine in `TRANSPORTS`; return the problem, or ""."""
    if transport in TRANSPORTS[engine]:
        return ""
    if transport in REMOVED_TRANSPORTS:
        return f"transport '{transport}' was removed; use {REMOVED_TRANSPORTS[transport]}"
    return f"{engine} has no transport '{transport}'; known: {', '.join(TRANSPORTS[engine])}"
