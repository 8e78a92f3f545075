"""The timeline of two trajectories whose times can be added up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_mas.reports.work_timeline import WAITING, work_timeline
from rollout.records.trajectory import ToolEvent, Trajectory, Turn
from tests.support.played import trajectory, turn


def timed(agent: str, start: float, seconds: float, index: int = 0) -> Turn:
    return turn(index, agent, started_s=start, took_s=seconds)


def played() -> list[Trajectory]:
    """Return a short trajectory, and one of a solver, a tool and a verifier without pauses."""
    short = trajectory(timed("solver", 100.0, 3.0), task_id="short")
    tool = ToolEvent(
        after_turn=0, tool="search", query="q", result="r", started_s=106.0, took_s=2.0
    )
    turns = (timed("solver", 100.0, 6.0), timed("verifier", 108.0, 4.0, index=1))
    return [short, trajectory(*turns, tools=(tool,), task_id="long")]


def test_trajectories_are_counted_by_agent_and_tool() -> None:
    timeline = work_timeline(played())
    assert timeline is not None
    assert timeline.seconds == 12.0
    assert (timeline.slowest, timeline.task) == (1, "long")
    assert timeline.behind == 4.5  # the ends are at 3 s and 12 s, their median at 7.5 s
    # 60 intervals of 0.2 s; the indices are those of 1.1, 4.1, 7.1 and 10.1 s.
    counts = {
        worker: [line[index][1] for index in (5, 20, 35, 50)]
        for worker, line in timeline.lines.items()
    }
    assert counts == {
        "solver": pytest.approx([2, 1, 0, 0]),
        "verifier": pytest.approx([0, 0, 0, 1]),
        "tool search": pytest.approx([0, 0, 1, 0]),
        WAITING: pytest.approx([0, 1, 1, 1]),
    }
    assert timeline.lines["solver"][5][0] == pytest.approx(1.1)


def test_without_recorded_times_there_is_no_timeline() -> None:
    assert work_timeline([trajectory(turn(0))]) is None
    assert work_timeline([]) is None
    some = work_timeline([trajectory(turn(0)), replace(played()[0], id="x")])
    assert some is not None
    assert some.slowest == 1
