"""Agents of the Python API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_mas.api.references import reference_to
from rollout.teams.roles import Parser


def stripped_reply(text: str) -> str | None:
    """Return a reply without surrounding white space, or None if it is empty."""
    return text.strip() or None


@dataclass(frozen=True)
class AgentSpec:
    """An agent: its prompts, the parser of its replies, and the policy that generates them.

    Args:
        name: the name by which the orchestra calls it.
        user: the user prompt; the orchestra fills the slots in braces.
        system: the system prompt, "" for none.
        parse: takes a reply and returns its value, or None if it is malformed.
        policy: agents with the same policy share weights.
        settings: further keys of `agents.<name>` of a config, such as max_tokens, temperature, loss_weight
            and tools.
    """

    name: str
    user: str
    system: str = ""
    parse: Parser = stripped_reply
    policy: str = "shared"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def section(self, run: str) -> dict[str, Any]:
        """Return the agent's section of the config of a run."""
        return {
            "role": reference_to(self.parse, f"{run}.{self.name}"),
            "policy": self.policy,
            "system": self.system,
            "user": self.user,
            **self.settings,
        }
