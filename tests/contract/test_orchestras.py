"""Orchestras of the registry: they are documented, and configs/team/ has a valid team for each."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml

import rollout.orchestras
from rollout.config.agents import AgentConfig
from rollout.config.environment import EnvConfig
from rollout.config.orchestra import OrchestraConfig
from rollout.config.reward import RewardConfig
from rollout.orchestras import ORCHESTRAS
from rollout.teams.roles import ROLES

TEAMS = Path(__file__).resolve().parents[2] / "configs" / "team"
NAMES = sorted(ORCHESTRAS)


@pytest.mark.parametrize("name", NAMES)
def test_an_orchestra_is_an_async_function_that_the_package_describes(name: str) -> None:
    orchestra = ORCHESTRAS[name]
    assert inspect.iscoroutinefunction(orchestra)
    assert orchestra.__name__ == name
    assert re.search(rf"^{name} +\w", rollout.orchestras.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_the_team_file_of_an_orchestra_is_valid(name: str) -> None:
    team = yaml.safe_load((TEAMS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert OrchestraConfig(**team["orchestra"]).name == name

    # Options that refer to other keys of a run are resolved only when a config is composed.
    env_options = {
        key: value
        for key, value in team["env"].get("options", {}).items()
        if not str(value).startswith("${")
    }
    EnvConfig(name=team["env"]["name"], options=env_options)

    agents = {
        agent: AgentConfig(**config, policy="shared")
        for agent, config in team.get("agents", {}).items()
    }
    for agent, config in agents.items():
        assert (config.role or agent) in ROLES
    reward = RewardConfig(**team["reward"])
    if agents:
        reward.check_agents(agents)
