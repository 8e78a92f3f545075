"""Collections in virtual time, on an engine whose prompts say how long the replies take."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollout.config.agents import build_player
from tests.support.play import SEED, STEP, TASK, Adder, Bytes, collect, make_team
from tests.support.scripted_engine import ScriptedEngine
from tests.support.virtual_time import run_virtually


class Slow:
    """Engine that replies `1` after the number of seconds in the prompt.

    Attributes:
        busy: number of requests in progress.
        busiest: largest number of requests at a time.
        began: prompt and start time of each request.
    """

    def __init__(self) -> None:
        self.busy = 0
        self.busiest = 0
        self.began: list[tuple[str, float]] = []
        self._scripted = ScriptedEngine(lambda *_: (*b"1", 0))

    async def generate(self, prompt_ids, sampling):
        text = Bytes().decode(prompt_ids)
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        self.began.append((text, asyncio.get_running_loop().time()))
        try:
            await asyncio.sleep(float(text))
        finally:
            self.busy -= 1
        return await self._scripted.generate(prompt_ids, sampling)


def team_of(engine, **settings):
    """Return the team of `play` on an engine; `settings` are those of `build_player`."""
    return replace(make_team(engine), policies={"p": build_player(engine, Bytes(), **settings)})


def play(orchestra, engine, *, tasks=(TASK,), make_env=Adder, settings=None, **options):
    """Return the groups of one collection, and the time at which it ended.

    Afterwards the engine must be idle, and no asyncio task may be left.
    """

    async def run():
        options.setdefault("group_size", 1)
        team = team_of(engine, **(settings or {}))
        groups = await collect(tasks, team, make_env, orchestra, seed=SEED, step=STEP, **options)
        assert engine.busy == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return groups, asyncio.get_running_loop().time()

    return run_virtually(run())


def tasks(*seconds):
    """Return tasks whose replies take these numbers of seconds."""
    return [
        replace(TASK, id=str(number), prompt=str(duration_s))
        for number, duration_s in enumerate(seconds)
    ]


async def ask(task, team, env):
    """Play one turn of agent a, which takes as long as the task says."""
    await team.act("a", said=env.reset(task))
    await env.step("1")


def statuses(groups):
    """Return the status of every trajectory."""
    return [trajectory.status for group in groups for trajectory in group.trajectories]
