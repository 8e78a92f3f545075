"""Trees of trajectories with scripted replies."""

from __future__ import annotations

import asyncio

from rollout.base.errors import EngineError
from rollout.records.trajectory import Trajectory
from tests.support.play import SEED, STEP, TASK, Adder, collect, make_team, seeded


class Refusing:
    """Engine that fails at the calls `refused`, each (agent, turn, branch)."""

    def __init__(self, replies, *refused):
        self._inner, _ = seeded({**replies, **dict.fromkeys(refused, "refuse")})

    async def generate(self, prompt_ids, sampling):
        completion = await self._inner.generate(prompt_ids, sampling)
        if bytes(completion.token_ids).startswith(b"refuse"):
            raise EngineError("no room")
        return completion


def grow(orchestra, engine, tree, *, make_env=Adder, **options) -> Trajectory:
    """Return one tree; its collection must leave no asyncio task."""

    async def run():
        [group] = await collect(
            [TASK],
            make_team(engine),
            make_env,
            orchestra,
            group_size=1,
            seed=SEED,
            step=STEP,
            tree=tree,
            **options,
        )
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return group.trajectories[0]

    return asyncio.run(run())


def rows(trajectory):
    """Return (node, index, agent, text, score of the branch) of every turn."""
    return [
        (turn.node, turn.index, turn.agent, turn.text, turn.scores.get("branch"))
        for turn in trajectory.turns
    ]


async def duet(task, team, env):
    """Play a turn of agent a, a step, a turn of agent b and a step."""
    reply = await team.act("a", said=env.reset(task))
    step = await env.step(reply.text)
    reply = await team.act("b", said=step.observation)
    await env.step(reply.text)


async def handle_failure(task, team, env):
    """Let agent b answer agent a, or the word "nobody" if a's policy fails; then take a step."""
    try:
        text = (await team.act("a", said="x")).text
    except EngineError:
        text = "nobody"
    reply = await team.act("b", said=text)
    await env.step(reply.text)


# replies of `duet`; see `play.seeded`
DUET = {
    ("a", 0, ""): "1",
    ("a", 0, "1"): "5",
    ("a", 0, "2"): "3",
    ("b", 1, "1.0"): "2",
    ("b", 1, "1.1"): "4",
    ("b", 1, "1.2"): "4",
}
