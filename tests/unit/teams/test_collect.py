"""Lines of play: what is written down, what a failure or a deadline leaves, and what nobody may leave behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mcore_mas.credit.samples import to_samples
from rollout.base.errors import EngineError, Unusable
from rollout.environments import ENVS
from rollout.records.trajectory import Group, Status, Trajectory
from rollout.teams.collect import Deadlines
from tests.support.play import SEED, STEP, TASK, Adder, Bytes, collect, make_team, seeded
from tests.support.scripted_engine import ScriptedEngine


def play(
    orchestra, engine, *, tasks=(TASK,), group_size=1, make_env=Adder, **options
) -> list[Trajectory]:
    """The trajectories of one collection, which must leave no task behind."""

    async def run():
        team = make_team(engine)
        groups = await collect(
            tasks, team, make_env, orchestra, group_size=group_size, seed=SEED, step=STEP, **options
        )
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return groups

    return [trajectory for group in asyncio.run(run()) for trajectory in group.trajectories]


def says(*replies):
    """An engine with these replies, in the order of its calls."""
    return ScriptedEngine(lambda _, call: (*replies[call].encode(), 0))


class Slow:
    """An engine that answers `1`, each prompt after its own number of seconds."""

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
    """a, b, step; a, step."""
    said = env.reset(task)
    first = await team.act("a", said=said)
    second = await team.act("b", said=first.text)
    step = await env.step(second.text)
    last = await team.act("a", said=step.observation)
    await env.step(last.text)


def test_a_step_scores_every_turn_since_the_step_before():
    [trajectory] = play(relay, says("9", "2", "3"))
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

    [trajectory] = play(orchestra, says("0", "0"))
    assert [turn.scores for turn in trajectory.turns] == [
        {"team": 5.0, "total": 5.0},
        {"team": 2.0, "total": 7.0},
    ]


def test_a_turn_that_no_step_followed_was_not_measured():
    async def orchestra(task, team, env):
        await team.act("a", said="x")
        await env.step("1")
        await team.act("b", said="y")

    [trajectory] = play(orchestra, says("0", "0"))
    assert [turn.scores for turn in trajectory.turns] == [{"team": 1.0, "total": 1.0}, {}]


def test_an_orchestra_reports_local_scores():
    async def orchestra(task, team, env):
        first = await team.act("a", said="x")
        second = await team.act("b", said="y")
        await env.step(second.text)
        team.score(first.turn, local=0.5, format=1.0)

    [trajectory] = play(orchestra, says("0", "3"))
    assert trajectory.turns[0].scores == {"team": 3.0, "total": 3.0, "local": 0.5, "format": 1.0}
    assert trajectory.turns[1].scores == {"team": 3.0, "total": 3.0}


def test_a_score_of_no_turn_is_refused():
    async def orchestra(task, team, env):
        await team.act("a", said="x")
        team.score(1, local=0.5)

    [trajectory] = play(orchestra, says("0"))
    assert trajectory.error == "Defect: orchestra: KeyError: 'no turn 1 to score; turns: 0'"


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


def test_state_is_what_was_seen_and_nothing_else():
    async def orchestra(task, team, env):
        for said in ("x", "y", "x"):
            await team.act("a", said=said)
        await team.act("b", said="x")
        await env.step("1")

    [trajectory] = play(orchestra, says("0", "1", "2", "3"))
    x, y, again, other = (turn.state_key for turn in trajectory.turns)
    assert x == again == other != y


def test_d5_a_state_that_the_environment_names_is_anchored_without_history():
    """A walk right and left again: the prompts, with their history, differ; the first and the last state do not."""
    maze = replace(TASK, prompt="S 1 1 G 3 3\nS . .\n# . #\n. . G", env="plan_path")

    async def walk(task, team, env):
        seen = env.reset(task)
        for move in ("R", "L", "R, D"):
            await team.act("a", said=seen)
            seen += (await env.step(move)).observation

    [trajectory] = play(walk, says("0", "1", "2"), tasks=(maze,), make_env=ENVS["plan_path"])
    start, right, again = (turn.anchor for turn in trajectory.turns)
    assert start == again != right and start
    assert len({turn.state_key for turn in trajectory.turns}) == 3
    rewarded = replace(
        trajectory, turns=tuple(replace(turn, reward=0.0) for turn in trajectory.turns)
    )
    samples = to_samples([Group(task=maze, trajectories=(rewarded,))])
    assert [sample.state for sample in samples] == [start, right, start]
    # an environment that names none leaves the prompt's digest
    [plain] = play(relay, says("1", "2", "3"))
    assert {turn.anchor for turn in plain.turns} == {""}


def test_temperature_of_all_agents():
    engine = says("1", "2", "3")
    [trajectory] = play(relay, engine, sampling={"temperature": 0.0})
    assert {sampling.temperature for _, sampling in engine.calls} == {0.0}
    assert {turn.temperature for turn in trajectory.turns} == {0.0}
    assert {turn.temperature for turn in play(relay, says("1", "2", "3"))[0].turns} == {0.7}


def test_a_late_trajectory_is_failed_and_the_others_go_on():
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
def test_a_deadline_names_what_was_waited_for(where):
    class Stuck(Adder):
        async def step(self, action):
            await asyncio.sleep(60)

    async def orchestra(task, team, env):
        await (env.step("1") if where == "adder.step" else asyncio.sleep(60))

    [trajectory] = play(orchestra, says(), make_env=Stuck, deadlines=Deadlines(trajectory_s=0.05))
    assert (
        trajectory.error
        == f"the trajectory's deadline of 0.05 s passed while it waited for {where}"
    )


def test_in_time_is_as_without_a_deadline():
    assert play(relay, says("9", "2", "3"), deadlines=Deadlines(trajectory_s=60)) == play(
        relay, says("9", "2", "3")
    )


def test_a_failed_turn_ends_those_beside_it():
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


def test_what_nobody_can_do_without_ends_the_collection_and_all_that_runs():
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
    [trajectory] = play(relay, says("1", "boom"))
    assert (trajectory.status, trajectory.error) == (Status.FAILED, "EnvError: the adder broke")
    assert [turn.text for turn in trajectory.turns] == ["1", "boom"]


def test_an_orchestra_that_takes_no_step_fails():
    async def orchestra(task, team, env):
        await team.act("a", said="x")

    assert (
        play(orchestra, says("1"))[0].error
        == "the orchestra ended without a step in the environment"
    )


def test_seeds_are_mean_advantages():
    replies = {("a", 0, ""): "1", ("b", 1, ""): "2", ("a", 2, ""): "3"}
    engine, asked = seeded(replies)
    [trajectory] = play(relay, engine)
    assert asked() == list(replies)
    assert len({turn.seed for turn in trajectory.turns}) == 3


def test_no_two_turns_of_a_run_have_one_seed():
    """Whatever tells them apart: step, task, sample, agent or turn."""

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
