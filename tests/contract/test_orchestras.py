"""Every orchestra of the registry is described, has a team file that fits it, and asks whom that file names."""

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

ROOT = Path(__file__).resolve().parent.parent.parent
TEAMS = ROOT / "configs" / "team"
NAMES = sorted(ORCHESTRAS)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_described(name: str) -> None:
    orchestra = ORCHESTRAS[name]
    assert inspect.iscoroutinefunction(orchestra) and orchestra.__name__ == name
    assert re.search(rf"^{name} +\w", rollout.orchestras.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_its_team_file_fits_it(name: str) -> None:
    team = yaml.safe_load((TEAMS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert OrchestraConfig(**team["orchestra"]).name == name
    options = {
        key: value
        for key, value in team["env"].get("options", {}).items()
        if not str(value).startswith("${")
    }
    EnvConfig(name=team["env"]["name"], options=options)
    reward = RewardConfig(**team["reward"])
    agents = {
        agent: AgentConfig(**config, policy="shared")
        for agent, config in team.get("agents", {}).items()
    }
    assert [agent for agent, config in agents.items() if (config.role or agent) not in ROLES] == []
    if agents:
        reward.check_agents(agents)
