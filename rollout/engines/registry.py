"""Engines by name: the function that builds each, and the weight transports that it has."""

from __future__ import annotations

from rollout.sync.transport import REMOVED_TRANSPORTS

# Import paths of the builders, so that naming an engine imports neither torch nor Ray. A builder
# takes an `EngineRequest` and returns the engines of its policies (see `build.py`).
ENGINES = {
    "embedded": "rollout.engines.embedded.build:build_embedded_engines",
    "sglang": "rollout.engines.sglang.build:build_sglang_engines",
}

# Weight transports of each shipped engine; the first is the default.
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
