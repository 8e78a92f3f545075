"""Agents for games with short prompts, for tests of orchestras and of demonstrations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.engines import EngineClient
from rollout.environments import ENVS
from rollout.environments.protocol import Env
from rollout.records.trajectory import Sampling, Task, Trajectory
from rollout.teams.episode import Orchestra
from rollout.teams.roles import ROLES, Agent, Role
from rollout.teams.team import Team
from tests.support.play import Bytes, collect
from tests.support.scripted_engine import ScriptedEngine

# a path of two steps to the right
PATH_TASK = Task(
    id="t",
    prompt="S 1 1 G 1 3\nS . G",
    answers=("R R",),
    env="plan_path",
    source="plan_path_1x3",
    split="train",
)

_SHIPPED_ROLES = {"tool": "game_tool", "planner": "game_planner", "player": "player"}
_TEMPLATES = {
    "tool": "propose {state}|{history}",
    "planner": "decide {state}|{history}|{proposal}",
    "player": "play {state}|{history}",
}


def puzzle_role(agent: str, shipped_role: str | None = None) -> Role:
    """Return the role of an agent with the shipped parser and a short prompt.

    Args:
        agent: `tool`, `planner` or `player`.
        shipped_role: role whose parser is used; None: that of the agent in the shipped teams.
    """
    role = ROLES[shipped_role or _SHIPPED_ROLES[agent]]
    return replace(role, system="", user=_TEMPLATES[agent])


def puzzle_roles(agents: Sequence[str]) -> dict[str, Role]:
    """Return the roles of these agents by name."""
    return {agent: puzzle_role(agent) for agent in agents}


def make_puzzle_team(engine: ScriptedEngine, roles: Mapping[str, Role]) -> Team:
    """Return a team on one policy, with an agent for each role."""
    agents = {
        name: Agent(name=name, role=role, policy="p", sampling=Sampling(max_tokens=99))
        for name, role in roles.items()
    }
    return Team(agents, {"p": EngineClient(engine=engine, renderer=Bytes())})  # type: ignore[arg-type]


def play_puzzle(
    orchestra: Orchestra,
    roles: Mapping[str, Role],
    *replies: str,
    task: Task = PATH_TASK,
    make_env: Any = None,
    **env_options: Any,
) -> tuple[Trajectory, list[str]]:
    """Play one trajectory in which the agents give `replies` in order.

    Args:
        orchestra: called with task, team and environment.
        roles: roles by agent.
        replies: replies of the agents.
        task: the task.
        make_env: makes the environment of a task; None: the task's, with `env_options`.
        env_options: options of the environment.

    Returns:
        The trajectory, and the prompt of every turn.
    """
    engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
    team = make_puzzle_team(engine, roles)
    env: partial[Env] = make_env or partial(ENVS[task.env], **env_options)
    [group] = asyncio.run(collect([task], team, env, orchestra, group_size=1, seed=0, step=0))
    return group.trajectories[0], [bytes(prompt).decode() for prompt, _ in engine.calls]
