"""Isolation of trajectories: failures of tools, engines and orchestras do not affect other trajectories."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

import pytest

from mcore_mas.training.metrics import describe_lost_trajectories, rollout_metrics
from rollout.base.async_tasks import CLEANUP_S, cancel_tasks
from rollout.base.deadlines import LEFT_BEHIND
from rollout.base.errors import EngineError, EnvError
from rollout.base.watchdog import Watchdog
from rollout.records.trajectory import Status
from rollout.teams.collect import Deadlines
from rollout.teams.tree import Branching
from tests.support.error_texts import without_location
from tests.support.play import SEED, STEP, TASK, Adder, collect, make_team
from tests.support.scripted_engine import ScriptedEngine
from tests.support.slow import Slow, ask, play, statuses, tasks, team_of
from tests.support.virtual_time import run_virtually


class Stubborn(Adder):
    """Environment whose step ignores its first cancellations, and waits for 1000 s more after each."""

    ignored_cancellations = 2
    cancelled_at: list[float]

    async def step(self, action):
        if action == "1" and type(self).ignored_cancellations:
            for _ in range(type(self).ignored_cancellations):
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    type(self).cancelled_at.append(asyncio.get_running_loop().time())
            await asyncio.sleep(1000)
        return await super().step(action)


@pytest.mark.parametrize("key", ["tool_s", "trajectory_s", "batch_s"])
def test_a_deadline_holds_against_a_tool_that_ignores_its_cancellation(key):
    Stubborn.cancelled_at = []
    loop_errors = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: loop_errors.append(context)
        )
        team = make_team(ScriptedEngine(lambda *_: (*b"1", 0)))
        groups = await collect(
            [TASK],
            team,
            Stubborn,
            ask,
            group_size=1,
            seed=SEED,
            step=STEP,
            deadlines=Deadlines(**{key: 5}),
        )
        ended_s = asyncio.get_running_loop().time()
        tasks_left = len(asyncio.all_tasks()) - 1
        await asyncio.sleep(2 * CLEANUP_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        gc.collect()
        return groups, ended_s, tasks_left

    groups, ended_s, tasks_left = run_virtually(run())
    [trajectory] = groups[0].trajectories
    assert ended_s == 5 + CLEANUP_S
    assert tasks_left
    assert loop_errors == []
    assert trajectory.error.endswith(LEFT_BEHIND)
    assert trajectory.outcome is None
    assert trajectory.status is (Status.ABORTED if key == "batch_s" else Status.LATE)
    assert Stubborn.cancelled_at == [5, 5 + CLEANUP_S]  # it is cancelled again until it ends


def test_a_cancelled_task_that_cleans_up_in_time_is_awaited():
    async def run():
        async def tidy():
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                await asyncio.sleep(CLEANUP_S / 2)  # cleans up
                raise

        task = asyncio.create_task(tidy())
        await asyncio.sleep(0)
        assert await cancel_tasks([task])
        assert task.cancelled()
        return asyncio.get_running_loop().time()

    assert run_virtually(run()) == CLEANUP_S / 2


def test_a_second_cancellation_is_passed_on_to_the_tasks():
    cancelled_at = []

    async def run():
        async def stubborn():
            for _ in range(2):
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    cancelled_at.append(asyncio.get_running_loop().time())

        inner = asyncio.create_task(stubborn())
        outer = asyncio.create_task(cancel_tasks([inner]))
        await asyncio.sleep(1)
        outer.cancel()
        await asyncio.wait({outer})
        assert outer.cancelled() and inner.done()

    run_virtually(run())
    assert cancelled_at == [0, 1]


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("step", "Defect: adder.step: KeyError: 'a bug of the environment'"),
        ("reset", "Defect: adder.reset: KeyError: 'a bug of the environment'"),
        ("open", "Defect: adder.open: KeyError: 'a bug of the environment'"),
        ("close", "Defect: adder.close: KeyError: 'a bug of the environment'"),
        ("slow close", "LateTool: adder.close: nothing came within 5 s"),
        ("exit", "Defect: adder.step: SystemExit: 2"),
        ("exit as it is made", "Defect: adder.open: SystemExit: 2"),
    ],
)
def test_a_bug_of_an_environment_fails_only_its_trajectory(where, error):
    class Buggy(Adder):
        def __init__(self, task):
            super().__init__(task)
            self.id = task.id
            if (where, self.id) == ("exit as it is made", "1"):
                sys.exit(2)

        def fail_at(self, method):
            if (method, self.id) == (where, "1"):
                raise KeyError("a bug of the environment")

        def reset(self, task):
            self.fail_at("reset")
            return super().reset(task)

        async def open(self, task):
            self.fail_at("open")

        async def step(self, action):
            self.fail_at("step")
            if (where, self.id) == ("exit", "1"):
                sys.exit(2)
            return await super().step(action)

        async def close(self):
            self.fail_at("close")
            if (where, self.id) == ("slow close", "1"):
                await asyncio.sleep(60)

    groups, _ = play(
        ask, Slow(), tasks=tasks(1, 1, 1), make_env=Buggy, deadlines=Deadlines(tool_s=5)
    )
    errors = [without_location(t.error) for group in groups for t in group.trajectories]
    assert errors == ["", error, ""]
    assert groups[1].trajectories[0].outcome is None
    assert rollout_metrics(groups)["outcome/mean"] == 1.0  # of the other two


def test_an_engine_that_fails_as_an_environment_closes_fails_only_that_trajectory():
    class AskingJudge(Adder):
        async def open(self, task):
            self.id = task.id

        async def close(self):
            if self.id == "1":
                raise EngineError("the judge does not answer")

    groups, _ = play(ask, Slow(), tasks=tasks(1, 1, 1), make_env=AskingJudge)
    errors = [t.error for group in groups for t in group.trajectories]
    assert errors == ["", "EngineError: the judge does not answer", ""]


def test_a_bug_in_making_tools_fails_only_its_trajectory():
    calls = []

    def make_tools():
        calls.append("made")
        if len(calls) == 1:
            raise OSError("the shop is closed")
        return nullcontext([])

    team = make_team(ScriptedEngine(lambda *_: (*b"1", 0)))
    agent = replace(team.agents["a"], tools={"shop": make_tools})
    team = replace(team, agents={**team.agents, "a": agent})
    groups = asyncio.run(collect([TASK], team, Adder, ask, group_size=2, seed=SEED, step=STEP))
    errors = [without_location(trajectory.error) for trajectory in groups[0].trajectories]
    assert errors == ["Defect: tools.shop: OSError: the shop is closed", ""]


def test_an_environment_is_closed_after_every_kind_of_end():
    closed = []

    class Closing(Adder):
        async def open(self, task):
            self.id = task.id

        async def close(self):
            await asyncio.sleep(0.5)
            closed.append(self.id)

        async def step(self, action):
            if self.id == "1":
                raise EnvError("broken")
            return await super().step(action)

    groups, _ = play(
        ask, Slow(), tasks=tasks(1, 2, 60), make_env=Closing, deadlines=Deadlines(trajectory_s=10)
    )
    assert statuses(groups) == [Status.COMPLETED, Status.FAILED, Status.LATE]
    assert closed == ["0", "1", "2"]


def collect_with_tools(make_tools, make_env=Adder):
    """Return a trajectory whose deadline is 5 s, and whose agent a has the tools `shop`."""
    team = make_team(ScriptedEngine(lambda *_: (*b"1", 0)))
    agent = replace(team.agents["a"], tools={"shop": make_tools})
    team = replace(team, agents={**team.agents, "a": agent})
    deadlines = Deadlines(trajectory_s=5)
    collection = collect(
        [TASK], team, make_env, ask, group_size=1, seed=SEED, step=STEP, deadlines=deadlines
    )
    [group] = run_virtually(collection)
    [trajectory] = group.trajectories
    return trajectory


def test_tools_that_do_not_open_are_named_as_awaited():
    @asynccontextmanager
    async def hanging():
        await asyncio.sleep(1000)
        yield []

    assert collect_with_tools(hanging).error == (
        "the trajectory's deadline of 5 s passed while it waited for tools.shop"
    )


def test_an_environment_is_closed_if_closing_the_tools_is_cancelled():
    closed = []

    class Closing(Adder):
        async def open(self, task):
            pass

        async def close(self):
            closed.append("env")

    @asynccontextmanager
    async def hanging():
        yield []
        await asyncio.sleep(1000)

    assert collect_with_tools(hanging, Closing).status is Status.LATE
    assert closed == ["env"]


def test_an_aborted_reply_is_a_failure_and_not_a_malformed_turn():
    class Aborting(ScriptedEngine):
        async def generate(self, prompt_ids, sampling):
            completion = await super().generate(prompt_ids, sampling)
            if len(self.calls) != 2:
                return completion
            spans = tuple(replace(span, end=1) for span in completion.versions)
            return replace(
                completion, token_ids=(49,), logprobs=(-0.5,), finish_reason="abort", versions=spans
            )

    engine = Aborting(lambda *_: (*b"1", 0))
    engine.busy = 0
    groups, _ = play(ask, engine, tasks=tasks(0, 0, 0))
    assert statuses(groups) == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    lost = groups[1].trajectories[0]
    assert (lost.turns, lost.error) == (
        (),
        "EngineError: the engine gave the reply up after 1 tokens",
    )
    assert rollout_metrics(groups)["agent/a/valid_ratio"] == 1.0
    assert describe_lost_trajectories(groups) == (
        "1 of 3 trajectories are lost (1 failed); the first, sample 0 of task 1: "
        "EngineError: the engine gave the reply up after 1 tokens"
    )


def test_slots_are_released_after_failures_deadlines_and_cancellations():
    class PartlyBroken(Slow):
        async def generate(self, prompt_ids, sampling):
            if bytes(prompt_ids) == b"7":
                raise EngineError("gone")
            return await super().generate(prompt_ids, sampling)

    engine = PartlyBroken()

    async def run():
        team = team_of(engine, max_in_flight=2, deadline_s=10)
        options = {"seed": SEED, "step": STEP, "deadlines": Deadlines(trajectory_s=12)}
        # late calls, failing ones, and some that are cancelled while they wait for a slot
        first = await collect(
            tasks(60, 60, 7, 60, 7, 60, 60), team, Adder, ask, group_size=1, **options
        )
        first_ended_s = asyncio.get_running_loop().time()
        # a full group ends those that have slots and those that wait for one
        await collect(tasks(1, 1), team, Adder, ask, group_size=1, surplus=3, **options)
        second_ended_s = asyncio.get_running_loop().time()
        last = await collect(tasks(1, 1, 1, 1), team, Adder, ask, group_size=1, **options)
        return first, first_ended_s, second_ended_s, last, asyncio.get_running_loop().time()

    first, first_ended_s, second_ended_s, last, ended_s = run_virtually(run())
    assert Counter(statuses(first)) == {Status.LATE: 5, Status.FAILED: 2}
    assert first_ended_s == 12
    assert statuses(last) == [Status.COMPLETED] * 4
    assert ended_s - second_ended_s == 2.0  # four calls of 1 s in two slots
    assert engine.busiest == 2 and engine.busy == 0


def test_simultaneous_ends_are_counted_once():
    """Deadlines, replies and full groups that coincide, in random combinations."""
    status_counts: Counter[Status] = Counter()
    for case in range(120):
        rng = random.Random(case)

        async def orchestra(task, team, env, rng=rng):
            for _ in range(rng.randint(1, 3)):
                await team.act("a", said=str(rng.randint(0, 4)))
            await env.step("1")

        engine = Slow()
        limits = Deadlines(
            tool_s=rng.choice([None, 2]),
            trajectory_s=rng.choice([None, 4, 6]),
            batch_s=rng.choice([None, 4, 7]),
        )
        surplus = rng.choice([0, 0, 2])
        size = 3
        groups, ended_s = play(
            orchestra,
            engine,
            tasks=tasks(0, 0),
            group_size=size,
            surplus=surplus,
            deadlines=limits,
            settings={
                "deadline_s": rng.choice([None, 2, 3]),
                "max_in_flight": rng.choice([None, 1, 4]),
            },
            tree=Branching(width=2) if case % 4 == 0 else None,
        )
        played = [t for group in groups for t in group.trajectories]
        assert len({t.id for t in played}) == 2 * (size + surplus)
        for t in played:
            assert (t.status is Status.COMPLETED) == (not t.error) == (t.outcome is not None)
        if surplus:
            assert max(statuses([group]).count(Status.COMPLETED) for group in groups) <= size
        else:
            assert all(t.status is not Status.ABORTED or "late/batch" in t.metrics for t in played)
        if limits.batch_s:
            assert ended_s <= limits.batch_s
        status_counts.update(t.status for t in played)
    assert (
        min(status_counts[status] for status in (Status.COMPLETED, Status.LATE, Status.ABORTED))
        > 20
    )


class TestBlockedLoop:
    def watchdog_lines(self, blocks_s, *, sleeps_s=0.0):
        class Blocking(Adder):
            async def step(self, action):
                await asyncio.sleep(sleeps_s)
                time.sleep(blocks_s)  # a tool must not block the event loop
                return await super().step(action)

        lines = []

        async def run():
            team = make_team(ScriptedEngine(lambda *_: (*b"1", 0)))
            await collect(
                [TASK],
                team,
                Blocking,
                ask,
                group_size=1,
                seed=SEED,
                step=STEP,
                watchdog=Watchdog(0.5, lines.append),
            )

        asyncio.run(run())
        return lines

    def test_the_watchdog_reports_where_the_loop_is_blocked(self):
        first, *more = self.watchdog_lines(1.0)
        assert re.match(r"the event loop has been blocked for \d s, so no deadline holds", first)
        assert "test_isolation.py:" in first and first.endswith(" step")
        assert len(more) <= 1  # after twice the time

    def test_a_loop_that_runs_is_not_reported_as_blocked(self):
        lines = self.watchdog_lines(0.05, sleeps_s=0.9)
        assert lines  # nothing finished
        assert not any("blocked" in line for line in lines)


def test_two_plays_of_one_name_are_watched_separately():
    lines = []
    watchdog = Watchdog(8, lines.append)

    async def run():
        team = team_of(Slow())
        options = {"group_size": 1, "seed": SEED, "step": STEP, "watchdog": watchdog}
        await asyncio.gather(*(collect(tasks(s), team, Adder, ask, **options) for s in (10, 9)))

    run_virtually(run())
    assert lines[0] == "nothing has finished for 8 s; 2 wait, those that have waited longest:"
