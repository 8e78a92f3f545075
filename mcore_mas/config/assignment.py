"""Assignment of policies to agents by the keys `sharing`, `partly` and `policy_defaults` of a composed config."""

from collections.abc import Mapping
from typing import Any

from mcore_mas.config.run import ConfigError
from rollout.base.nested import merged


def assign_policies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with a policy for each agent, and with `policy_defaults` merged into every policy.

    `sharing` assigns a policy to each agent that names none:

    - "shared": all agents get one policy, which is called shared.
    - "separate": each agent gets a policy with the agent's name.
    - "partly": each agent gets its policy in `partly`, a mapping that the team defines.
    - A mapping: each agent gets its policy in this mapping.

    `policy_defaults` is merged into the policies that `sharing` assigns and an agent plays, and into those of the
    section `policies`; a setting in that section takes precedence. The result lacks the three keys. Agents and policies
    that are not mappings stay as they are, for the validation to report.

    Raises:
        ConfigError: the config has no team, or `sharing`, `partly` or `policy_defaults` has a wrong value.
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
        return sections

    # YAML reads an unquoted name such as 1 as a number.
    agents = {str(name): agent for name, agent in sections["agents"].items()}
    policy_of_agent = _assigned_policies(sharing, partly, list(agents))
    for name, agent in agents.items():
        agents[name] = {**agent, "policy": agent.get("policy", policy_of_agent[name])}
    sections["agents"] = agents
    if not isinstance(defaults, dict):
        raise ConfigError(
            f"policy_defaults is {defaults}; expected keys of a policy, for example lr: 1.0e-6"
        )
    policies = sections.get("policies") or {}
    if defaults and isinstance(policies, dict):
        policies = {str(name): policy for name, policy in policies.items()}
        played = [agent["policy"] for agent in agents.values()]
        assigned = [policy for policy in played if policy in policy_of_agent.values()]
        merged_policies = {}
        for name in dict.fromkeys([*assigned, *policies]):
            policy = policies.get(name) or {}
            merged_policies[name] = merged(defaults, policy) if isinstance(policy, dict) else policy
        sections["policies"] = merged_policies
    return sections


def _are_mappings(agents: Any) -> bool:
    return isinstance(agents, dict) and all(isinstance(agent, dict) for agent in agents.values())


def _assigned_policies(sharing: Any, partly: Any, agents: list[str]) -> Mapping[str, str]:
    """Return the policy that `sharing` assigns to each agent.

    Args:
        sharing: "shared", "separate", "partly", or a mapping from each agent to a policy.
        partly: the mapping of "partly"; None: the team defines none.
        agents: names of the agents.

    Raises:
        ConfigError: `sharing` is another value; or a mapping lacks an agent, has a name that is no agent's, or assigns
            something else than the name of a policy.
    """
    mapping_by_sharing = {
        "shared": dict.fromkeys(agents, "shared"),
        "separate": {agent: agent for agent in agents},
        "partly": partly,
    }
    policy_of_agent = mapping_by_sharing.get(sharing) if isinstance(sharing, str) else sharing
    if isinstance(policy_of_agent, dict):
        policy_of_agent = {str(agent): policy for agent, policy in policy_of_agent.items()}
    if not _is_assignment(policy_of_agent, agents):
        if sharing == "partly" and partly is not None:
            raise ConfigError(
                f"partly is {partly}; expected the name of a policy for each of {', '.join(agents)}"
            )
        expected = [value for value, mapping in mapping_by_sharing.items() if mapping]
        raise ConfigError(
            f"sharing is {sharing}; expected {', '.join(expected)}, or the name of a policy for each of "
            f"{', '.join(agents)}"
        )
    return policy_of_agent  # type: ignore[return-value]  # see `_is_assignment`


def _is_assignment(mapping: Any, agents: list[str]) -> bool:
    """Return True if the value is a mapping from each agent to the name of a policy."""
    if not isinstance(mapping, dict) or mapping.keys() != set(agents):
        return False
    return all(isinstance(policy, str) for policy in mapping.values())
