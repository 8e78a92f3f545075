"""Trajectories of shipped teams with scripted replies.

Prompts, environment and rewards are those of the team's config.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import yaml

from mcore_mas.config.experiments import CONFIGS
from retrieval.client import Passage
from rollout.config.agents import AgentConfig, build_team
from rollout.config.environment import EnvConfig, build_env
from rollout.config.orchestra import OrchestraConfig
from rollout.config.reward import RewardConfig, build_allocator
from rollout.engines import EngineClient
from rollout.records.trajectory import Task, Trajectory
from tests.support.play import Bytes, collect
from tests.support.scripted_engine import ScriptedEngine

TEAMS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((CONFIGS / "team").glob("*.yaml"))
}


def sharings(team: str) -> list[str]:
    """Return the names of the ways in which the agents of a shipped team may share policies."""
    names = ["shared"]
    if len(TEAMS[team]["agents"]) > 1:
        names.append("separate")
    if "partly" in TEAMS[team]:
        names.append("partly")
    return names


class Library:
    """Retriever that finds `k` passages for any query except "nothing".

    Attributes:
        searches: query and `k` of each search.
    """

    def __init__(self) -> None:
        self.searches: list[tuple[str, int]] = []

    async def search(self, query: str, k: int) -> list[Passage]:
        self.searches.append((query, k))
        ranks = () if query == "nothing" else range(1, k + 1)
        return [Passage.compose(str(rank), query, f"{query} {rank}") for rank in ranks]


def play_shipped(
    name: str,
    task: Task,
    replies: Sequence[str],
    *,
    sections: dict[str, Any] | None = None,
    **tools: Any,
) -> Trajectory:
    """Return the rewarded trajectory of a shipped team on a task.

    Args:
        name: name of the team.
        replies: replies of the agents in order. The team must use all of them.
        sections: options that replace those of the team, by section; for example
            `{"env": {"style": "text"}}`.
        tools: arguments of the environment, such as a retriever.
    """
    values = copy.deepcopy(TEAMS[name])
    for section, options in (sections or {}).items():
        values[section].setdefault("options", {}).update(options)
    agents = {
        agent: AgentConfig(**config, policy="shared") for agent, config in values["agents"].items()
    }
    reward = RewardConfig(**values["reward"])
    orchestra = OrchestraConfig(**values["orchestra"])
    reward.check_agents(agents)
    engine = ScriptedEngine(lambda _, call: (*replies[call].encode(), 0))
    team = build_team(agents, {"shared": EngineClient(engine=engine, renderer=Bytes())})  # type: ignore[arg-type]
    env = build_env(EnvConfig(**values["env"]), **tools)
    collection = collect([task], team, env, orchestra.call, group_size=1, seed=1, step=0)
    (group,) = asyncio.run(collection)
    (trajectory,) = build_allocator(reward, agents)(group).trajectories
    assert trajectory.error == ""
    assert len(engine.calls) == len(replies)
    return trajectory


def last_message(trajectory: Trajectory, turn: int) -> str:
    """Return the last message of a turn's prompt."""
    return trajectory.turns[turn].messages[-1].content
