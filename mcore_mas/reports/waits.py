"""Who waits for whom in a step: who works for how many of its trajectories, at each moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from mcore_mas.rollout.records.trajectory import Trajectory

_MOMENTS = 60
_WAITING = "done, waiting for the slowest"


def who_works(played: Sequence[Trajectory]) -> dict[str, Any]:
    """For how many trajectories each agent and tool is at work, and how many are done while others are not.

    Returns:
        {} where no times are recorded; else `seconds` of all, `lines` (by who: a list of [second, number]), and of the
        `slowest` trajectory its index, its `task` and by how many seconds it was `behind` half of them.
    """
    spans: list[tuple[str, float, float]] = []
    ends: dict[int, float] = {}
    for index, one in enumerate(played):
        calls = [(turn.agent, turn.started_s, turn.took_s) for turn in one.turns]
        calls += [(f"tool {event.tool}", event.started_s, event.took_s) for event in one.tools]
        own = [(who, started, started + took) for who, started, took in calls if started]
        spans += own
        ends |= {index: max(end for *_, end in own)} if own else {}
    if not spans:
        return {}
    began, ended = min(start for _, start, _ in spans), max(ends.values())
    spans += [(_WAITING, end, ended) for end in ends.values()]
    width = max((ended - began) / _MOMENTS, 1e-6)
    lines: dict[str, list[float]] = defaultdict(lambda: [0.0] * _MOMENTS)
    for who, *times in spans:
        first, last = ((at - began) / width for at in times)
        for moment in range(int(first), min(_MOMENTS - 1, int(last)) + 1):
            lines[who][moment] += max(0.0, min(last, moment + 1) - max(first, moment))
    slowest = max(ends, key=ends.__getitem__)
    return {
        "seconds": ended - began,
        "lines": {who: [[(n + 0.5) * width, number] for n, number in enumerate(own)] for who, own in lines.items()},
        "slowest": slowest,
        "task": played[slowest].task_id,
        "behind": ended - median(ends.values()),
    }
