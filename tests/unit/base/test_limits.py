"""Deadlines, limits of calls, groups with a surplus of trajectories, and the watchdog, in virtual time."""

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


def test_a_late_call_fails_only_its_trajectory_and_names_the_agent(tmp_path):
    engine = Slow()
    groups, ended = play(ask, engine, tasks=tasks(1, 60, 9), settings={"deadline_s": 10})
    assert ended == 10
    assert statuses(groups) == [Status.COMPLETED, Status.LATE, Status.COMPLETED]
    late = groups[1].trajectories[0]
    assert late.error == "LateCall: a (turn 0): nothing came within 10 s"
    assert late.outcome is None
    assert late.metrics == {"late/agent/a": 1.0}
    metrics = rollout_metrics(groups)
    assert metrics["rollout/failed"] == 1.0
    assert metrics["agent/a/late"] == 1.0
    assert metrics["outcome/mean"] == 1.0  # of the two completed trajectories
    write_trajectories(tmp_path / "t.parquet", [late])
    assert read_trajectories(tmp_path / "t.parquet") == [late]


def test_a_late_tool_fails_only_its_trajectory_and_names_the_call():
    class SlowAdder(Adder):
        async def step(self, action):
            await asyncio.sleep(self.seconds)
            return await super().step(action)

        def reset(self, task):
            self.seconds = float(task.prompt)
            return "0"

    groups, ended = play(
        ask, Slow(), tasks=tasks(2, 60), make_env=SlowAdder, deadlines=Deadlines(tool_s=5)
    )
    assert statuses(groups) == [Status.COMPLETED, Status.LATE]
    assert ended == 5
    late = groups[1].trajectories[0]
    assert late.error == "LateTool: adder.step: nothing came within 5 s"
    assert [turn.text for turn in late.turns] == ["1"]  # the earlier turns are kept
    assert rollout_metrics(groups)["tool/adder.step/late"] == 1.0


def test_the_deadline_of_a_batch_aborts_the_trajectories_that_still_run():
    engine = Slow()
    groups, ended = play(
        ask, engine, tasks=tasks(1, 60, 3, 70), deadlines=Deadlines(batch_s=5, trajectory_s=50)
    )
    assert ended == 5
    assert statuses(groups) == [Status.COMPLETED, Status.ABORTED, Status.COMPLETED, Status.ABORTED]
    (aborted,) = groups[1].trajectories
    message = "the batch's deadline of 5 s passed while it waited for a (turn 0)"
    assert aborted.error == message
    metrics = rollout_metrics(groups)
    assert metrics["rollout/aborted"] == 2.0
    assert metrics["rollout/late_batch"] == 2.0
    assert metrics["rollout/failed"] == 2.0


def test_a_late_branch_is_dropped_and_counted():
    class SlowSecondReply(Slow):
        async def generate(self, prompt_ids, sampling):
            seconds = b"60" if len(self.began) == 1 else b"1"
            return await super().generate(tuple(seconds), sampling)

    engine = SlowSecondReply()
    groups, ended = play(
        ask, engine, tasks=tasks(0), settings={"deadline_s": 10}, tree=Branching(width=3)
    )
    assert ended == 10
    (trajectory,) = groups[0].trajectories
    assert trajectory.status is Status.COMPLETED
    assert trajectory.metrics["dropped_branches/LateCall"] == 1.0
    assert trajectory.metrics["late/agent/a"] == 1.0
    assert rollout_metrics(groups)["agent/a/late"] == 1.0


def test_waiting_for_a_slot_is_not_late():
    groups, ended = play(
        ask, Slow(), tasks=tasks(6, 6, 6), settings={"deadline_s": 10, "max_in_flight": 1}
    )
    assert statuses(groups) == [Status.COMPLETED] * 3
    assert ended == 18


def test_a_timeout_error_of_the_awaited_work_is_not_a_missed_deadline():
    async def fail():
        raise TimeoutError("a socket's")

    with pytest.raises(TimeoutError, match="a socket's"):
        asyncio.run(with_deadline(5, fail()))
    with pytest.raises(Late, match=r"nothing came within 0\.01 s"):
        asyncio.run(with_deadline(0.01, asyncio.sleep(5)))


def test_calls_in_flight_are_bounded_first_come_first_served():
    async def three_turns(task, team, env):
        for _ in range(3):
            await team.act("a", said=task.prompt)
        await env.step("1")

    engine = Slow()
    durations_s = (1, 1.5, 2, 2.5, 3)
    _, ended = play(three_turns, engine, tasks=tasks(*durations_s), settings={"max_in_flight": 2})
    assert engine.busiest == 2
    assert ended >= 3 * sum(durations_s) / 2
    # All first calls come before the second calls.
    prompts = [prompt for prompt, _ in engine.began]
    assert sorted(prompts[:5]) == ["1", "1.5", "2", "2.5", "3"]
    assert set(Counter(prompts).values()) == {3}


def test_a_failed_call_frees_its_slot():
    class Broken(Slow):
        async def generate(self, prompt_ids, sampling):
            raise EngineError("gone")

    groups, _ = play(ask, Broken(), tasks=tasks(1, 1, 1), settings={"max_in_flight": 1})
    assert statuses(groups) == [Status.FAILED] * 3


def test_with_a_surplus_a_group_has_the_fastest_trajectories():
    durations_s = iter([5, 1, 60, 2, 4])

    async def ask_for_next_duration(task, team, env):
        await team.act("a", said=str(next(durations_s)))
        await env.step("1")

    groups, ended = play(ask_for_next_duration, Slow(), group_size=3, surplus=2)
    assert ended == 4  # the third trajectory ends
    assert statuses(groups) == [
        Status.ABORTED,
        Status.COMPLETED,
        Status.ABORTED,
        Status.COMPLETED,
        Status.COMPLETED,
    ]
    assert groups[0].trajectories[2].error == "its group was full while it waited for a (turn 0)"
    assert rollout_metrics(groups)["rollout/aborted"] == 2.0


def test_a_group_has_its_size_even_if_all_trajectories_end_at_once():
    groups, _ = play(ask, Slow(), tasks=tasks(1, 1), group_size=3, surplus=3)
    for group in groups:
        counts = Counter(trajectory.status for trajectory in group.trajectories)
        assert counts == {Status.COMPLETED: 3, Status.ABORTED: 3}


def test_failed_trajectories_do_not_fill_a_group():
    calls = iter(range(5))

    class FailingTwice(Slow):
        async def generate(self, prompt_ids, sampling):
            if next(calls) < 2:
                raise EngineError("gone")
            return await super().generate(prompt_ids, sampling)

    groups, _ = play(ask, FailingTwice(), tasks=tasks(1), group_size=3, surplus=2)
    assert statuses(groups) == [Status.FAILED] * 2 + [Status.COMPLETED] * 3


class TestWatchdog:
    def messages(self, orchestra, seconds, **options):
        """Return the times and lines of a watchdog that reports after 8 s without progress."""
        lines: list[tuple[float, str]] = []

        def record(line):
            lines.append((asyncio.get_running_loop().time(), line))

        watchdog = Watchdog(8, record, shown=2)
        play(orchestra, Slow(), tasks=tasks(*seconds), watchdog=watchdog, **options)
        return lines

    def test_it_reports_nothing_while_trajectories_end(self):
        assert self.messages(ask, (1, 5, 9, 14, 20)) == []

    def test_it_reports_the_waiting_calls_at_growing_intervals(self):
        lines = self.messages(ask, (1, 60, 61, 62))
        assert lines[:4] == [
            (10.0, "nothing has finished for 9 s; 3 wait, those that have waited longest:"),
            (10.0, "  3/1/0: a (turn 0) waits for policy p for 10 s"),
            (10.0, "  3/2/0: a (turn 0) waits for policy p for 10 s"),
            (10.0, "  and 1 more"),
        ]
        # The first report comes after 9 s, and each interval is twice the one before.
        assert sorted({time_s for time_s, _ in lines}) == [10.0, 20.0, 40.0]

    def test_after_progress_the_intervals_start_again(self):
        lines = self.messages(ask, (20, 50))
        times_s = [time_s for time_s, line in lines if line.startswith("nothing")]
        assert times_s == [8.0, 16.0, 28.0, 36.0]

    def test_it_names_tools_and_the_orchestra(self):
        class SlowAdder(Adder):
            async def step(self, action):
                await asyncio.sleep(12)
                return await super().step(action)

        async def sleep_in_second_task(task, team, env):
            if task.id == "0":
                await ask(task, team, env)
            else:
                await asyncio.sleep(11)

        messages = self.messages(sleep_in_second_task, (1, 1), make_env=SlowAdder)
        lines = [line for _, line in messages]
        assert lines[1:] == [
            "  3/0/0: adder.step after turn 0 of a for 9 s",
            "  3/1/0: the orchestra itself",
        ]

    def test_branches_of_a_tree_are_reported_in_one_line(self):
        _, (_, line), *_ = self.messages(ask, (12,), tree=Branching(width=2))
        branch = "a (turn 0) waits for policy p for 8 s"
        assert line == f"  3/0/0: {branch}, {branch}"
