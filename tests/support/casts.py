"""Trajectories of shipped orchestras and roles with scripted replies.

Team, environment and collector are the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.engines import EngineClient
from rollout.environments import ENVS
from rollout.environments.protocol import Env
from rollout.orchestras import ORCHESTRAS
from rollout.records.trajectory import Sampling, Task, Trajectory
from rollout.teams.roles import ROLES, Agent
from rollout.teams.team import Team
from rollout.teams.tree import Branching
from tests.support.play import SEED, STEP, Bytes, collect, seeded
from tests.support.scripted_engine import ScriptedEngine

SUM = Task(id="t", prompt="What is 3+4?", answers=("7",), env="math", source="sums", split="train")


def make_team(engine: object, roles: Mapping[str, str]) -> Team:
    """Return a team on one policy; `roles` has the role of each agent. It has no system prompts."""
    agents = {
        name: Agent(
            name=name,
            role=replace(ROLES[role], system=""),
            policy="p",
            sampling=Sampling(max_tokens=999),
        )
        for name, role in roles.items()
    }
    return Team(agents, {"p": EngineClient(engine=engine, renderer=Bytes())})  # type: ignore[arg-type]


def play(
    orchestra: str,
    roles: Mapping[str, str],
    *replies: str,
    task: Task = SUM,
    make_env: Callable[[Task], Env] | None = None,
    **options: Any,
) -> tuple[Trajectory, list[str]]:
    """Return a trajectory in which the agents reply with `replies` in order, and their prompts."""
    engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
    trajectory = _collect(make_team(engine, roles), orchestra, task, make_env, None, options)
    assert len(engine.calls) == len(replies), trajectory.error
    return trajectory, [bytes(prompt).decode() for prompt, _ in engine.calls]


def grow(
    orchestra: str,
    roles: Mapping[str, str],
    replies: Mapping[tuple[str, int, str], str],
    *,
    task: Task = SUM,
    make_env: Callable[[Task], Env] | None = None,
    width: int = 2,
    **options: Any,
) -> Trajectory:
    """Return a tree of trajectories; `replies` are by (agent, turn, node), see `seeded`."""
    engine, _ = seeded(replies)
    return _collect(
        make_team(engine, roles), orchestra, task, make_env, Branching(width=width), options
    )


def _collect(
    team: Team,
    orchestra: str,
    task: Task,
    make_env: Callable[[Task], Env] | None,
    tree: Branching | None,
    options: Mapping[str, Any],
) -> Trajectory:
    [group] = asyncio.run(
        collect(
            [task],
            team,
            make_env or ENVS[task.env],
            partial(ORCHESTRAS[orchestra], **options),
            group_size=1,
            seed=SEED,
            step=STEP,
            tree=tree,
        )
    )
    return group.trajectories[0]


def speakers(trajectory: Trajectory) -> list[str]:
    """Return the agent of every turn."""
    return [turn.agent for turn in trajectory.turns]


def scores(trajectory: Trajectory, name: str = "local") -> Sequence[float | None]:
    """Return a score of every turn; None where it was not measured."""
    return [turn.scores.get(name) for turn in trajectory.turns]


def validity(trajectory: Trajectory) -> list[bool]:
    """Return for every turn whether its reply was well-formed."""
    return [turn.valid for turn in trajectory.turns]
