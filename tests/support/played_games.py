"""Games played by a scripted team."""

from __future__ import annotations

import asyncio
from functools import partial

from rollout.environments import ENVS
from rollout.orchestras import ORCHESTRAS
from rollout.records.trajectory import Task, Trajectory
from tests.support.casts import make_team
from tests.support.play import collect
from tests.support.scripted_engine import ScriptedEngine

_ROLES = {
    "single": {"player": "player"},
    "game_team": {"tool": "game_tool", "planner": "game_planner"},
}


def play_game(task: Task, *replies: str, orchestra: str = "single") -> Trajectory:
    """Return the trajectory of a team that gives these replies in order."""
    engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
    team = make_team(engine, _ROLES[orchestra])
    make_env = partial(ENVS[task.env], max_turns=5)
    [group] = asyncio.run(
        collect([task], team, make_env, ORCHESTRAS[orchestra], group_size=1, seed=1, step=0)
    )
    return group.trajectories[0]
