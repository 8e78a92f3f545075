"""The published game team, whose tool agent's program runs in a sandbox."""

from __future__ import annotations

import asyncio

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from rollout.config.agents import build_team
from rollout.config.environment import build_env
from rollout.config.reward import build_allocator
from rollout.engines import EngineClient
from rollout.records.trajectory import Task
from tests.support.casts import speakers
from tests.support.play import Bytes, collect
from tests.support.sandboxes import started
from tests.support.scripted_engine import ScriptedEngine

PUZZLE = "S 1 1 G 1 4\nS # . G\n. # . #\n. . . ."
SOLUTION = "D D R R U U R"
PROGRAM = '''<think>The grid is small: breadth-first search.</think>
```python
from collections import deque

rows = """S # . G
. # . #
. . . .""".splitlines()
signs = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row.split())}
start, goal = [next(cell for cell in signs if signs[cell] == sign) for sign in "SG"]
paths = {start: []}
queue = deque([start])
while queue:
    r, c = queue.popleft()
    for move, cell in (("U", (r - 1, c)), ("D", (r + 1, c)), ("L", (r, c - 1)), ("R", (r, c + 1))):
        if signs.get(cell, "#") != "#" and cell not in paths:
            paths[cell] = paths[r, c] + [move]
            queue.append(cell)
print("**Actions List**:", *paths[goal])
```'''


@pytest.mark.slow
def test_a_breadth_first_search_is_the_proposal_of_the_published_team() -> None:
    config = RunConfig.from_values(
        resolve(["experiment=strongermas_t1_plan_path_shared"]), "a test"
    )
    replies = (PROGRAM, f"#### {SOLUTION}")
    engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
    client = EngineClient(engine=engine, renderer=Bytes())  # type: ignore[arg-type]
    team = build_team(config.agents, {"shared": client})
    task = Task(
        id="t",
        prompt=PUZZLE,
        answers=(SOLUTION,),
        env="plan_path",
        source="plan_path",
        split="test",
    )
    sandbox = started("auto")
    try:
        make_env = build_env(config.env, sandbox=sandbox)
        [group] = asyncio.run(
            collect([task], team, make_env, config.orchestra.call, group_size=1, seed=0, step=0)
        )
    finally:
        sandbox.close()

    [trajectory] = group.trajectories
    assert trajectory.error == ""
    assert speakers(trajectory) == ["tool", "planner"]
    planner_prompt = bytes(engine.calls[1][0]).decode()
    assert planner_prompt.count(SOLUTION) == 1
    assert trajectory.success == 1.0

    allocate = build_allocator(config.reward, config.agents)
    [tool, planner] = allocate(group).trajectories[0].turns
    # Seven steps of -0.01; distances 3 4 5 4 3 2 1 before and 4 5 4 3 2 1 0 after them; the goal
    # and the shortest path. The proposal and the plan are the same, so both have this local score.
    expected = 7 * -0.01 + 22 - 0.99 * 19 + 1 + 0.5
    assert tool.scores["local"] == planner.scores["local"] == pytest.approx(expected)
    assert tool.reward == planner.reward == pytest.approx(2 * expected)  # local and team
