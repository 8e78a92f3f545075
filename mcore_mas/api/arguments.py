"""Arguments of `Run` as sections of a config."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mcore_mas.api.agents import AgentSpec
from mcore_mas.api.references import ArgumentError, reference_to
from mcore_mas.api.rewards import reward_section
from mcore_mas.config.experiments import GROUPS
from mcore_mas.config.policy import PolicyConfig
from mcore_mas.config.run import RunConfig
from mcore_mas.config.trainer import TrainerConfig
from rollout.base.error_lines import KEY_SYNONYMS
from rollout.base.hints import nearest_hint
from rollout.base.nested import merged

# Arguments of `Run`, by the names that other libraries give to them.
_ARGUMENT_SYNONYMS = {
    "dataset": "tasks",
    "environment": "env",
    "model": "policies",
    "model_name_or_path": "policies",
    "models": "policies",
    "output_dir": "folder",
    "reward_funcs": "reward",
    "train_dataset": "tasks",
}
# Sections of a config that a setting of `Run` cannot give, because an argument does.
_SECTIONS_OF_ARGUMENTS = ("data", "env", "orchestra", "policies", "reward")


def team_sections(
    run: str,
    agents: Sequence[AgentSpec] | str,
    orchestra: Callable[..., Any] | str | None,
    env: Callable[..., Any] | str | None,
    reward: Callable[..., Any] | str | None,
) -> dict[str, Any]:
    """Return the sections of agents, orchestra, environment and reward.

    Sections of arguments that are None are left out if `agents` names a team that ships, which has
    them.

    Raises:
        ArgumentError: the agents are not a list of AgentSpec with different names, they have no
            orchestra, or the reward is not a function of one argument.
    """
    sections: dict[str, Any] = {}
    if not isinstance(agents, str):
        _check_agents(agents)
        if orchestra is None:
            raise ArgumentError(
                "orchestra is missing; expected an async function (task, team, env), or a name "
                "that ships"
            )
        sections["agents"] = {agent.name: agent.section(run) for agent in agents}
        env = env or "math"
        reward = reward or "shared_outcome"

    if orchestra is not None:
        sections["orchestra"] = {"name": reference_to(orchestra, f"{run}.orchestra")}
    if env is not None:
        sections["env"] = {"name": reference_to(env, f"{run}.env")}
    if reward is not None:
        sections["reward"] = reward_section(reward, f"{run}.reward")
    return sections


def _check_agents(agents: Any) -> None:
    is_list = isinstance(agents, Sequence) and len(agents) > 0
    if not is_list or not all(isinstance(agent, AgentSpec) for agent in agents):
        raise ArgumentError(
            f"agents: {agents!r:.80}; expected a list of AgentSpec, or the name of a team that "
            "ships"
        )
    for name, count in Counter(agent.name for agent in agents).items():
        if count > 1:
            raise ArgumentError(f"agents: '{name}' is there twice; expected different names")


def policy_sections(
    agents: Sequence[AgentSpec] | str, policies: str | Path | Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the section `policies`, and `policy_defaults` if one model is given for all policies.

    Args:
        agents: agents, or the name of a team that ships.
        policies: a model for all policies, or a model or section for each.

    Raises:
        ArgumentError: the policies are neither a model nor a mapping.
    """
    if not isinstance(policies, str | Path | Mapping):
        raise ArgumentError(
            f"policies is {policies!r:.80}; expected a model's folder or id for all policies, or a "
            "mapping of each policy's name to its model"
        )
    if not isinstance(policies, Mapping):
        names = [] if isinstance(agents, str) else [agent.policy for agent in agents]
        return {
            "policies": {name: {} for name in names},
            "policy_defaults": {"model": str(policies)},
        }
    sections = {
        name: {"model": str(policy)} if isinstance(policy, str | Path) else policy
        for name, policy in policies.items()
    }
    return {"policies": sections}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Keyword arguments of `Run`: overrides that choose a config of a group, and sections of the config."""

    choices: list[str] = field(default_factory=list)
    sections: dict[str, Any] = field(default_factory=dict)


def check_given(name: str, value: Any) -> None:
    """Raise ArgumentError if a required argument of `Run` is None, or an empty string or mapping."""
    if value is None or (isinstance(value, str | Mapping) and not value):
        raise ArgumentError(f"{name} is missing; `help(mm.Run)` says what it may be")


def read_settings(arguments: Mapping[str, Any]) -> Settings:
    """Sort keyword arguments into choices of groups and sections.

    Args:
        arguments: names of groups of configs, sections, or keys of the trainer and of policies.

    Raises:
        ArgumentError: a name is none of these.
    """
    settings = Settings(
        sections={
            "trainer": {"steps": 20, "group_size": 8},
            "policy_defaults": {"lr": 1e-6},
        }
    )
    sections = settings.sections
    for key, value in arguments.items():
        if key == "model":  # a key of a policy, but one model for all is an argument
            raise ArgumentError(f"Run has no setting 'model'; {_expected_setting(key)}")
        if key in GROUPS and isinstance(value, str):
            settings.choices.append(f"{key}={value}")
        elif key == "penalties":  # the other keys of this section come from the argument `reward`
            sections["reward"] = {key: value}
        elif key in RunConfig.model_fields or key == "sharing":
            if isinstance(value, Mapping):
                value = merged(sections.get(key, {}), value)
            sections[key] = value
        elif key in TrainerConfig.model_fields:
            sections["trainer"][key] = value
        elif key in PolicyConfig.model_fields:
            sections["policy_defaults"][key] = value
        else:
            raise ArgumentError(f"Run has no setting '{key}'; {_expected_setting(key)}")
    return settings


def _expected_setting(key: str) -> str:
    """Return the end of the error about an unknown setting, such as "write lr=...".

    It names the setting that another library's name stands for, or the section in which the key must be
    written; or else similar settings, or all settings.
    """
    if key in _ARGUMENT_SYNONYMS:
        return f"write {_ARGUMENT_SYNONYMS[key]}=..."
    key = KEY_SYNONYMS.get(key, key)
    if key in TrainerConfig.model_fields or key in PolicyConfig.model_fields:
        return f"write {key}=..."
    value = f'{{"{key}": ...}}'
    spellings = []
    for name, section in RunConfig.model_fields.items():
        types = (section.annotation, *get_args(section.annotation))
        if not any(key in getattr(type_, "model_fields", ()) for type_ in types):
            continue
        if name == "agents":
            spellings.append(f"AgentSpec(..., settings={value})")
        elif name not in _SECTIONS_OF_ARGUMENTS:
            spellings.append(f"{name}={value}")
    if spellings:
        return f"write {' or '.join(spellings)}"

    settings = [
        *RunConfig.model_fields,
        *TrainerConfig.model_fields,
        *PolicyConfig.model_fields,
    ]
    hint = nearest_hint(key, settings).removeprefix("; ")
    return hint or f"expected one of {', '.join(settings)}"


def plain_values(value: Any) -> Any:
    """Convert NumPy's numbers in nested values to Python's, as a config has them."""
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value
