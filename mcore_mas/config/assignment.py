"""Assignment of policies to agents by the keys `sharing`, `partly` and `policy_defaults` of a composed config."""

from collections.abc import Mapping
from typing import Any

from mcore_mas.config.run import ConfigError
from rollout.base.nested import merged


def assign_policies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with a policy for each agent, and with `policy_defaults` merged into every policy.

    The policies are those that `sharing` assigns and those of the section `policies`. Settings of that section
    replace the defaults.

    Raises:
        ConfigError: the config has no team, or `sharing` or `policy_defaults` has a wrong value.
    """
    missing = [key for key in ("orchestra", "env", "reward", "agents") if key not in values]
    if missing:
        raise ConfigError(
            f"no team: {', '.join(missing)} missing; choose one by `defaults: [override /team: NAME]` in the "
            "experiment or team=NAME, or write orchestra, env, reward and agents"
        )
    sections = dict(values)
    sharing = sections.pop("sharing", "shared")
    partly = sections.pop("partly", None)
    defaults = sections.pop("policy_defaults", {})
    if not _are_mappings(sections["agents"]):
        return sections  # the validation of the config reports malformed agents

    policy_names = _policy_names(sharing, partly, list(sections["agents"]))
    agents = {
        name: {**agent, "policy": agent.get("policy", policy_names[name])}
        for name, agent in sections["agents"].items()
    }
    sections["agents"] = agents
    if not isinstance(defaults, dict):
        raise ConfigError(
            f"policy_defaults is {defaults}; expected keys of a policy, for example lr: 1.0e-6"
        )
    policies = sections.get("policies") or {}
    if defaults and isinstance(policies, dict):
        played = [agent["policy"] for agent in agents.values()]
        assigned = [policy for policy in played if policy in policy_names.values()]
        sections["policies"] = {
            name: merged(defaults, policies.get(name) or {})
            for name in dict.fromkeys([*assigned, *policies])
        }
    return sections


def _are_mappings(agents: Any) -> bool:
    return isinstance(agents, dict) and all(isinstance(agent, dict) for agent in agents.values())


def _policy_names(sharing: Any, partly: Any, agents: list[str]) -> Mapping[str, str]:
    """Return the policy of each agent that names none itself."""
    ways = {
        "shared": dict.fromkeys(agents, "shared"),
        "separate": {agent: agent for agent in agents},
        "partly": partly,
    }
    names = ways.get(sharing) if isinstance(sharing, str) else sharing
    if not isinstance(names, dict) or names.keys() != set(agents):
        expected = [way for way, policies in ways.items() if policies]
        raise ConfigError(
            f"sharing is {sharing}; expected {', '.join(expected)}, or a policy for each of {', '.join(agents)}"
        )
    return names
