"""The published game team: its tool agent's program really searches, in a sandbox, and its output is the proposal."""

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
from tests.support.play import Bytes, collect
from tests.support.sandboxes import started
from tests.support.scripted_engine import ScriptedEngine

PUZZLE = "S 1 1 G 1 4\nS # . G\n. # . #\n. . . ."  # down twice, right twice, up twice, right
WAY = "D D R R U U R"
PROGRAM = '''<think>The grid is small: breadth-first search.</think>
```python
from collections import deque

rows = """S # . G
. # . #
. . . .""".splitlines()
signs = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row.split())}
start, goal = [next(cell for cell in signs if signs[cell] == sign) for sign in "SG"]
ways, waiting = {start: []}, deque([start])
while waiting:
    r, c = waiting.popleft()
    for move, cell in (("U", (r - 1, c)), ("D", (r + 1, c)), ("L", (r, c - 1)), ("R", (r, c + 1))):
        if signs.get(cell, "#") != "#" and cell not in ways:
            ways[cell] = ways[r, c] + [move]
            waiting.append(cell)
print("**Actions List**:", *ways[goal])
```'''


@pytest.mark.slow
def test_a_breadth_first_search_is_the_proposal_of_the_published_team() -> None:
    config = RunConfig.check(resolve(["experiment=strongermas_t1_plan_path_shared"]), "a test")
    engine = ScriptedEngine(lambda prompt, call: (*(PROGRAM, f"#### {WAY}")[call].encode(), 0))
    team = build_team(config.agents, {"shared": EngineClient(engine=engine, renderer=Bytes())})  # type: ignore[arg-type]
    task = Task(
        id="t", prompt=PUZZLE, answers=(WAY,), env="plan_path", source="plan_path", split="test"
    )
    sandbox = started("auto")
    try:
        make_env = build_env(config.env, sandbox=sandbox)
        [group] = asyncio.run(
            collect([task], team, make_env, config.orchestra.call, group_size=1, seed=0, step=0)
        )
    finally:
        sandbox.close()
    [played] = group.trajectories
    assert (played.error, [turn.agent for turn in played.turns]) == ("", ["tool", "planner"])
    assert (
        bytes(engine.calls[1][0]).decode().count(WAY) == 1
    )  # the planner reads what the program printed
    assert played.success == 1.0
    [tool, planner] = build_allocator(config.reward, config.agents)(group).trajectories[0].turns
    # seven steps of -0.01, distances 3 4 5 4 3 2 1 before and 4 5 4 3 2 1 0 after them, the goal and the shortest way
    value = 7 * -0.01 + 22 - 0.99 * 19 + 1 + 0.5
    assert (
        tool.scores["local"] == planner.scores["local"] == pytest.approx(value)
    )  # what was proposed was done
    assert tool.reward == planner.reward == pytest.approx(2 * value)  # local and team
