"""Collection of trajectories: scores of turns, failures, deadlines, and tasks left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mcore_mas.credit.samples import step_rewards, to_samples
from rollout.base.errors import EngineError, Unusable
from rollout.environments import ENVS
from rollout.records.trajectory import Group, Status, Trajectory
from rollout.teams.collect import Deadlines
from tests.support.play import SEED, STEP, TASK, Adder, Bytes, collect, make_team, seeded
from tests.support.scripted_engine import ScriptedEngine


def play(
    orchestra, engine, *, tasks=(TASK,), group_size=1, make_env=Adder, **options
) -> list[Trajectory]:
    """Collect trajectories, and assert that no asyncio task is left behind."""

    async def run():
        team = make_team(engine)
        groups = await collect(
            tasks, team, make_env, orchestra, group_size=group_size, seed=SEED, step=STEP, **options
        )
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return groups

    return [trajectory for group in asyncio.run(run()) for trajectory in group.trajectories]


def replying(*replies):
    """Return an engine that gives these replies in the order of its calls."""
    return ScriptedEngine(lambda _, call: (*replies[call].encode(), 0))


class Slow:
    """Engine that replies `1` after a number of seconds that depends on the prompt."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.aborted = 0
        self._scripted = ScriptedEngine(lambda *_: (*b"1", 0))

    async def generate(self, prompt_ids, sampling):
        try:
            await asyncio.sleep(self.seconds[Bytes().decode(prompt_ids)])
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return await self._scripted.generate(prompt_ids, sampling)


async def relay(task, team, env):
    """Play turns of a and b, a step, another turn of a, and a step."""
    problem = env.reset(task)
    first = await team.act("a", said=problem)
    second = await team.act("b", said=first.text)
    step = await env.step(second.text)
    last = await team.act("a", said=step.observation)
    await env.step(last.text)


def test_a_step_scores_every_turn_since_the_step_before():
    [trajectory] = play(relay, replying("9", "2", "3"))
    assert [turn.scores for turn in trajectory.turns] == [
        {"team": 2.0, "total": 2.0},
        {"team": 2.0, "total": 2.0},
        {"team": 3.0, "total": 5.0},
    ]
    assert (trajectory.outcome, trajectory.metrics) == (5.0, {"total": 5.0})


def test_steps_without_a_turn_between_them_add_up():
    async def orchestra(task, team, env):
        await team.act("a", said="x")
        await env.step("1")
        await env.step("4")
        await team.act("b", said="y")
        await env.step("2")

    [trajectory] = play(orchestra, replying("0", "0"))
    assert [turn.scores for turn in trajectory.turns] == [
        {"team": 5.0, "total": 5.0},
        {"team": 2.0, "total": 7.0},
    ]


def test_a_turn_without_a_later_step_has_no_scores():
    async def orchestra(task, team, env):
        await team.act("a", said="x")
        await env.step("1")
        await team.act("b", said="y")

    [trajectory] = play(orchestra, replying("0", "0"))
    assert [turn.scores for turn in trajectory.turns] == [{"team": 1.0, "total": 1.0}, {}]


def test_an_orchestra_reports_local_scores():
    async def orchestra(task, team, env):
        first = await team.act("a", said="x")
        second = await team.act("b", said="y")
        await env.step(second.text)
        team.score(first.turn, local=0.5, format=1.0)

    [trajectory] = play(orchestra, replying("0", "3"))
    assert trajectory.turns[0].scores == {"team": 3.0, "total": 3.0, "local": 0.5, "format": 1.0}
    assert trajectory.turns[1].scores == {"team": 3.0, "total": 3.0}


def test_a_score_of_a_missing_turn_is_refused():
    async def orchestra(task, team, env):
        await team.act("a", said="x")
        team.score(1, local=0.5)

    [trajectory] = play(orchestra, replying("0"))
    line = orchestra.__code__.co_firstlineno + 2
    assert trajectory.error == (
        f"Defect: orchestra: KeyError: 'no turn 1 to score; turns: 0' (test_collect.py:{line})"
    )


def test_simultaneous_turns_keep_the_order_of_their_calls():
    async def orchestra(task, team, env):
        await asyncio.gather(team.act("a", said="slow"), team.act("b", said="fast"))
        await env.step("look")
        await env.step("2")

    [trajectory] = play(orchestra, Slow(slow=0.05, fast=0.0))
    assert [(turn.index, turn.agent, turn.scores["team"]) for turn in trajectory.turns] == [
        (0, "a", 2.0),
        (1, "b", 2.0),
    ]
    assert [event.after_turn for event in trajectory.tools] == [1]


def test_rounds_are_numbered_from_0_even_if_a_step_is_before_the_first_turn():
    async def orchestra(task, team, env):
        await env.step("5")
        await team.act("a", said="x")
        await env.step("2")
        await team.act("b", said="x")
        await env.step("3")

    [trajectory] = play(orchestra, replying("0", "0"))
    assert [turn.round for turn in trajectory.turns] == [0, 1]
    # The step before the first turn counts in the outcome, and in the reward of no round.
    assert trajectory.outcome == 10.0
    assert step_rewards(trajectory.turns) == (2.0, 3.0)


def test_the_state_key_depends_on_the_messages_only():
    async def orchestra(task, team, env):
        for text in ("x", "y", "x"):
            await team.act("a", said=text)
        await team.act("b", said="x")
        await env.step("1")

    [trajectory] = play(orchestra, replying("0", "1", "2", "3"))
    x, y, again, other = (turn.state_key for turn in trajectory.turns)
    assert x == again == other != y


def test_a_state_of_the_environment_is_an_anchor_without_history():
    """After steps right and left, the state is the first one, though the prompts have other histories."""
    maze = replace(TASK, prompt="S 1 1 G 3 3\nS . .\n# . #\n. . G", env="plan_path")

    async def walk(task, team, env):
        prompt = env.reset(task)
        for move in ("R", "L", "R, D"):
            await team.act("a", said=prompt)
            prompt += (await env.step(move)).observation

    [trajectory] = play(walk, replying("0", "1", "2"), tasks=(maze,), make_env=ENVS["plan_path"])
    start, right, again = (turn.anchor for turn in trajectory.turns)
    assert start == again != right and start
    assert len({turn.state_key for turn in trajectory.turns}) == 3
    rewarded = replace(
        trajectory, turns=tuple(replace(turn, reward=0.0) for turn in trajectory.turns)
    )
    samples = to_samples([Group(task=maze, trajectories=(rewarded,))])
    assert [sample.state for sample in samples] == [start, right, start]
    # without a state of the environment, samples have the digest of the prompt
    [plain] = play(relay, replying("1", "2", "3"))
    assert {turn.anchor for turn in plain.turns} == {""}


def test_the_temperature_of_all_agents_can_be_replaced():
    engine = replying("1", "2", "3")
    [trajectory] = play(relay, engine, sampling={"temperature": 0.0})
    assert {sampling.temperature for _, sampling in engine.calls} == {0.0}
    assert {turn.temperature for turn in trajectory.turns} == {0.0}
    assert {turn.temperature for turn in play(relay, replying("1", "2", "3"))[0].turns} == {0.7}


def test_a_late_trajectory_does_not_end_the_others():
    async def orchestra(task, team, env):
        await team.act("a", said=task.id)
        await env.step("1")

    engine = Slow(quick=0.0, late=60.0)
    tasks = [replace(TASK, id=name) for name in ("late", "quick")]
    late, quick = play(orchestra, engine, tasks=tasks, deadlines=Deadlines(trajectory_s=0.1))
    assert (late.status, late.outcome, late.metrics) == (
        Status.LATE,
        None,
        {"late/trajectory": 1.0},
    )
    assert late.error == "the trajectory's deadline of 0.1 s passed while it waited for a (turn 0)"
    assert (quick.status, quick.outcome) == (Status.COMPLETED, 1.0)
    assert engine.aborted == 1


@pytest.mark.parametrize("where", ["adder.step", "the orchestra"])
def test_the_error_of_a_deadline_names_the_awaited_call(where):
    class Stuck(Adder):
        async def step(self, action):
            await asyncio.sleep(60)

    async def orchestra(task, team, env):
        if where == "adder.step":
            await env.step("1")
        else:
            await asyncio.sleep(60)

    [trajectory] = play(
        orchestra, replying(), make_env=Stuck, deadlines=Deadlines(trajectory_s=0.05)
    )
    assert (
        trajectory.error
        == f"the trajectory's deadline of 0.05 s passed while it waited for {where}"
    )


def test_a_deadline_does_not_change_a_trajectory_in_time():
    assert play(relay, replying("9", "2", "3"), deadlines=Deadlines(trajectory_s=60)) == play(
        relay, replying("9", "2", "3")
    )


def test_a_failed_turn_cancels_concurrent_turns():
    async def orchestra(task, team, env):
        await asyncio.gather(team.act("a", said="gone"), strand(team))

    async def strand(team):
        await team.act("b", said="slow")
        await team.act("b", said="never asked")

    class Broken(Slow):
        async def generate(self, prompt_ids, sampling):
            if Bytes().decode(prompt_ids) == "gone":
                raise EngineError("the engine is gone")
            return await super().generate(prompt_ids, sampling)

    engine = Broken(slow=60.0)
    [trajectory] = play(orchestra, engine)
    assert trajectory.error == "EngineError: the engine is gone"
    assert engine.aborted == 1


def test_unusable_ends_the_collection_and_all_its_tasks():
    async def orchestra(task, team, env):
        if task.id == "bug":
            raise Unusable("the key is refused")
        await team.act("a", said="slow")

    engine = Slow(slow=60.0)

    async def run():
        tasks = [replace(TASK, id=name) for name in ("fine", "bug")]
        with pytest.raises(Unusable, match="the key is refused"):
            await collect(
                tasks, make_team(engine), Adder, orchestra, group_size=2, seed=SEED, step=STEP
            )
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert engine.aborted == 2


def test_a_broken_environment_fails_its_trajectory():
    [trajectory] = play(relay, replying("1", "boom"))
    assert (trajectory.status, trajectory.error) == (Status.FAILED, "EnvError: the adder broke")
    assert [turn.text for turn in trajectory.turns] == ["1", "boom"]


def test_an_orchestra_without_a_step_fails():
    async def orchestra(task, team, env):
        await team.act("a", said="x")

    assert (
        play(orchestra, replying("1"))[0].error
        == "the orchestra ended without a step in the environment"
    )


def test_seeds_follow_agent_and_turn():
    replies = {("a", 0, ""): "1", ("b", 1, ""): "2", ("a", 2, ""): "3"}
    engine, requested = seeded(replies)
    [trajectory] = play(relay, engine)
    assert requested() == list(replies)
    assert len({turn.seed for turn in trajectory.turns}) == 3


def test_all_turns_of_a_run_have_different_seeds():
    """Turns that differ in step, task, sample, agent or index have different seeds."""

    async def both(task, team, env):
        for _ in range(2):
            await asyncio.gather(team.act("a", said="x"), team.act("b", said="x"))
        await env.step("1")

    two = [replace(TASK, id=name) for name in ("t", "u")]
    engine = ScriptedEngine(lambda *_: (*b"1", 0))

    async def run(step):
        return await collect(
            two, make_team(engine), Adder, both, group_size=3, seed=SEED, step=step
        )

    for step in (0, 1):
        asyncio.run(run(step))
    seeds = [sampling.seed for _, sampling in engine.calls]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 3 * 4
    again = ScriptedEngine(lambda *_: (*b"1", 0))
    asyncio.run(collect(two, make_team(again), Adder, both, group_size=3, seed=SEED, step=1))
    assert sorted(sampling.seed for _, sampling in again.calls) == sorted(seeds[24:])


def test_an_endless_orchestra_ends_at_the_most_turns() -> None:
    async def endless(task, team, env):
        while True:
            await team.act("a", said="x")

    [trajectory] = play(endless, replying("1", "2", "3"), deadlines=Deadlines(max_turns=3))
    assert trajectory.status is Status.FAILED
    assert trajectory.error == (
        "Defect: orchestra: asked for more than collection.max_turns (3) turns; end its loop, or raise "
        "the key"
    )
    assert len(trajectory.turns) == 3
    assert trajectory.metrics == {"quarantined": 1.0}
