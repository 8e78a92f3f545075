"""Frozen models behind an API: one call layer for coaches and for agents that are not trained here.

- `protocol`   the config section, what a provider promises, how a call can fail, and the API key
- `providers`  any URL that speaks OpenAI's chat completions; Anthropic's and Google's own libraries
- `ledger`     replies and spending on disk
- `caller`     the call: cache, budget, retries, one request for equal questions
"""

from __future__ import annotations

from typing import Any

from rollout.base.registry import lookup

# Import paths, so that naming a provider imports no library.
PROVIDERS = {
    "openai": "rollout.engines.remote.providers:OpenAIChat",
    "anthropic": "rollout.engines.remote.providers:AnthropicMessages",
    "gemini": "rollout.engines.remote.providers:GeminiContent",
}


def provider_class(name: str) -> Any:
    """The class of the provider `name` (or at the import path `name`); imports what that provider needs.

    Raises:
        UnknownName: no such provider.
    """
    found = lookup("provider", name, PROVIDERS)
    return lookup("provider", found, {}) if isinstance(found, str) else found
