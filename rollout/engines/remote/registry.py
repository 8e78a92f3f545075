"""Providers of frozen models by name."""

from __future__ import annotations

from typing import Any

from rollout.base.lookup import lookup_import

# Import paths, so that naming a provider imports no library.
PROVIDERS = {
    "openai": "rollout.engines.remote.providers:OpenAIChat",
    "anthropic": "rollout.engines.remote.providers:AnthropicMessages",
    "gemini": "rollout.engines.remote.providers:GeminiContent",
}


def provider_class(name: str) -> Any:
    """Return the class of a provider by its key in `PROVIDERS`, or by its import path.

    Raises:
        UnknownName: there is no such provider.
    """
    return lookup_import("provider", name, PROVIDERS)
