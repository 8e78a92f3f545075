"""Deadlines by what they bound, groups that are filled by the fastest, and a watchdog; all in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from mcore_mas.training.metrics import rollout_metrics
from rollout.base.deadlines import Late, with_deadline
from rollout.base.errors import EngineError
from rollout.base.watchdog import Watchdog
from rollout.records.files import read_trajectories, write_trajectories
from rollout.records.trajectory import Status
from rollout.teams.collect import Deadlines
from rollout.teams.tree import Branching
from tests.support.play import Adder
from tests.support.slow import Slow, ask, play, statuses, tasks


def test_a_late_call_fails_its_trajectory_alone_and_names_the_agent(tmp_path):
    engine = Slow()
    groups, ended = play(ask, engine, tasks=tasks(1, 60, 9), settings={"deadline_s": 10})
    assert ended == 10
    assert statuses(groups) == [Status.COMPLETED, Status.LATE, Status.COMPLETED]
    late = groups[1].trajectories[0]
    assert late.error == "LateCall: a (turn 0): nothing came within 10 s"
    assert (late.outcome, late.metrics) == (None, {"late/agent/a": 1.0})
    metrics = rollout_metrics(groups)
    assert (metrics["rollout/failed"], metrics["agent/a/late"]) == (1.0, 1.0)
    assert metrics["outcome/mean"] == 1.0  # of the two that are known
    write_trajectories(tmp_path / "t.parquet", [late])
    assert read_trajectories(tmp_path / "t.parquet") == [late]


def test_a_late_tool_fails_its_trajectory_alone_and_names_the_call():
    class Thinking(Adder):
        async def step(self, action):
            await asyncio.sleep(self.seconds)
            return await super().step(action)

        def reset(self, task):
            self.seconds = float(task.prompt)
            return "0"

    groups, ended = play(
        ask, Slow(), tasks=tasks(2, 60), make_env=Thinking, deadlines=Deadlines(tool_s=5)
    )
    assert (statuses(groups), ended) == ([Status.COMPLETED, Status.LATE], 5)
    late = groups[1].trajectories[0]
    assert late.error == "LateTool: adder.step: nothing came within 5 s"
    assert [turn.text for turn in late.turns] == ["1"]  # what was said is kept
    assert rollout_metrics(groups)["tool/adder.step/late"] == 1.0


def test_a_batch_ends_with_what_is_done():
    engine = Slow()
    groups, ended = play(
        ask, engine, tasks=tasks(1, 60, 3, 70), deadlines=Deadlines(batch_s=5, trajectory_s=50)
    )
    assert ended == 5
    assert statuses(groups) == [Status.COMPLETED, Status.ABORTED, Status.COMPLETED, Status.ABORTED]
    assert (
        groups[1].trajectories[0].error
        == "the batch's deadline of 5 s passed while it waited for a (turn 0)"
    )
    metrics = rollout_metrics(groups)
    assert (
        metrics["rollout/aborted"],
        metrics["rollout/late_batch"],
        metrics["rollout/failed"],
    ) == (2.0, 2.0, 2.0)


def test_a_late_branch_is_dropped_and_counted():
    class Uneven(Slow):
        async def generate(self, prompt_ids, sampling):
            return await super().generate(tuple(b"60" if len(self.began) == 1 else b"1"), sampling)

    engine = Uneven()
    groups, ended = play(
        ask, engine, tasks=tasks(0), settings={"deadline_s": 10}, tree=Branching(width=3)
    )
    assert ended == 10
    [trajectory] = groups[0].trajectories
    assert trajectory.status is Status.COMPLETED
    assert (
        trajectory.metrics["dropped_branches/LateCall"] == trajectory.metrics["late/agent/a"] == 1.0
    )
    assert rollout_metrics(groups)["agent/a/late"] == 1.0


def test_waiting_for_a_slot_is_not_late():
    groups, ended = play(
        ask, Slow(), tasks=tasks(6, 6, 6), settings={"deadline_s": 10, "max_in_flight": 1}
    )
    assert (statuses(groups), ended) == ([Status.COMPLETED] * 3, 18)


def test_a_timeout_of_the_work_itself_is_not_ours():
    async def breaks():
        raise TimeoutError("a socket's")

    with pytest.raises(TimeoutError, match="a socket's"):
        asyncio.run(with_deadline(5, breaks()))
    with pytest.raises(Late, match=r"nothing came within 0\.01 s"):
        asyncio.run(with_deadline(0.01, asyncio.sleep(5)))


def test_calls_in_flight_are_bounded_first_come_first_served():
    async def thrice(task, team, env):
        for _ in range(3):
            await team.act("a", said=task.prompt)
        await env.step("1")

    engine = Slow()
    _, ended = play(thrice, engine, tasks=tasks(1, 1.5, 2, 2.5, 3), settings={"max_in_flight": 2})
    assert engine.busiest == 2
    assert ended >= 3 * (1 + 1.5 + 2 + 2.5 + 3) / 2
    # nobody's second call is before everybody's first
    assert sorted(text for text, _ in engine.began[:5]) == ["1", "1.5", "2", "2.5", "3"]
    assert Counter(text for text, _ in engine.began).most_common()[-1][1] == 3


def test_an_engine_that_fails_gives_its_slot_back():
    class Broken(Slow):
        async def generate(self, prompt_ids, sampling):
            raise EngineError("gone")

    groups, _ = play(ask, Broken(), tasks=tasks(1, 1, 1), settings={"max_in_flight": 1})
    assert statuses(groups) == [Status.FAILED] * 3


def test_a_surplus_fills_the_group_with_the_fastest():
    seconds = iter([5, 1, 60, 2, 4])

    async def own_pace(task, team, env):
        await team.act("a", said=str(next(seconds)))
        await env.step("1")

    groups, ended = play(own_pace, Slow(), group_size=3, surplus=2)
    assert ended == 4  # the third to be done
    assert statuses(groups) == [
        Status.ABORTED,
        Status.COMPLETED,
        Status.ABORTED,
        Status.COMPLETED,
        Status.COMPLETED,
    ]
    assert groups[0].trajectories[2].error == "its group was full while it waited for a (turn 0)"
    assert rollout_metrics(groups)["rollout/aborted"] == 2.0


def test_exactly_the_group_size_is_completed_when_all_end_at_once():
    groups, _ = play(ask, Slow(), tasks=tasks(1, 1), group_size=3, surplus=3)
    for group in groups:
        assert Counter(t.status for t in group.trajectories) == {
            Status.COMPLETED: 3,
            Status.ABORTED: 3,
        }


def test_failures_do_not_fill_a_group():
    calls = iter(range(5))

    class Breaking(Slow):
        async def generate(self, prompt_ids, sampling):
            if next(calls) < 2:
                raise EngineError("gone")
            return await super().generate(prompt_ids, sampling)

    groups, _ = play(ask, Breaking(), tasks=tasks(1), group_size=3, surplus=2)
    assert statuses(groups) == [Status.FAILED] * 2 + [Status.COMPLETED] * 3


class TestWatchdog:
    def said(self, orchestra, seconds, **options):
        lines: list[tuple[float, str]] = []

        def say(line):
            lines.append((asyncio.get_running_loop().time(), line))

        dog = Watchdog(8, say, shown=2)
        play(orchestra, Slow(), tasks=tasks(*seconds), watchdog=dog, **options)
        return lines

    def test_it_is_quiet_while_something_ends(self):
        assert self.said(ask, (1, 5, 9, 14, 20)) == []

    def test_it_says_who_waits_for_what_and_again_later_and_later(self):
        lines = self.said(ask, (1, 60, 61, 62))
        assert lines[:4] == [
            (10.0, "nothing has finished for 9 s; 3 wait, those that have waited longest:"),
            (10.0, "  3/1/0: a (turn 0) waits for policy p for 10 s"),
            (10.0, "  3/2/0: a (turn 0) waits for policy p for 10 s"),
            (10.0, "  and 1 more"),
        ]
        assert sorted({at for at, _ in lines}) == [
            10.0,
            20.0,
            40.0,
        ]  # after 9 s, and twice as long each time

    def test_after_progress_it_begins_anew(self):
        lines = self.said(ask, (20, 50))
        assert [at for at, line in lines if line.startswith("nothing")] == [8.0, 16.0, 28.0, 36.0]

    def test_it_names_tools_and_the_orchestra(self):
        class Stuck(Adder):
            async def step(self, action):
                await asyncio.sleep(12)
                return await super().step(action)

        async def idle(task, team, env):
            await (ask(task, team, env) if task.id == "0" else asyncio.sleep(11))

        lines = [line for _, line in self.said(idle, (1, 1), make_env=Stuck)]
        assert lines[1:] == [
            "  3/0/0: adder.step after turn 0 of a for 9 s",
            "  3/1/0: the orchestra itself",
        ]

    def test_branches_of_a_tree_are_one_waiter(self):
        lines = self.said(ask, (12,), tree=Branching(width=2))
        assert lines[1][1] == "  3/0/0: " + ", ".join(["a (turn 0) waits for policy p for 8 s"] * 2)
