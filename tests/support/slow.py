"""Collections in virtual time, on an engine whose replies take as long as they are told to."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollout.config.agents import build_player
from tests.support.play import SEED, STEP, TASK, Adder, Bytes, collect, make_team
from tests.support.scripted_engine import ScriptedEngine
from tests.support.virtual_time import run_virtually


class Slow:
    """An engine that answers `1` after as many seconds as the prompt says; it counts those it is at."""

    def __init__(self) -> None:
        self.busy = self.busiest = 0
        self.began: list[tuple[str, float]] = []  # prompt, time
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
    return replace(make_team(engine), policies={"p": build_player(engine, Bytes(), **settings)})


def play(orchestra, engine, *, tasks=(TASK,), make_env=Adder, settings=None, **options):
    """The groups of one collection, and when it ended; the engine must be left idle, and no task behind."""

    async def run():
        options.setdefault("group_size", 1)
        team = team_of(engine, **(settings or {}))
        groups = await collect(tasks, team, make_env, orchestra, seed=SEED, step=STEP, **options)
        assert engine.busy == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return groups, asyncio.get_running_loop().time()

    return run_virtually(run())


def tasks(*seconds):
    return [replace(TASK, id=str(n), prompt=str(s)) for n, s in enumerate(seconds)]


async def ask(task, team, env):
    """`a` is asked once, for as long as the task says."""
    await team.act("a", said=env.reset(task))
    await env.step("1")


def statuses(groups):
    return [trajectory.status for group in groups for trajectory in group.trajectories]
