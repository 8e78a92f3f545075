"""The timeline of a step: which agents and tools work for how many trajectories at each moment."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rollout.records.trajectory import Trajectory

_INTERVALS = 60
WAITING = "done, waiting for the slowest"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTimeline:
    """Number of trajectories that each agent and tool works for, over the time of a step."""

    seconds: float  # from the start of the first call to the end of the last one
    # By agent or tool, or `WAITING`: the middle of each interval, in seconds since the start, and the
    # mean number of trajectories in it.
    lines: Mapping[str, Sequence[tuple[float, float]]]
    slowest: int  # index of the trajectory that ended last
    task: str  # id of the slowest trajectory's task
    behind: float  # seconds from the median end to the end of the slowest trajectory


@dataclass(frozen=True, slots=True)
class _Span:
    """Time in which an agent or a tool works for one trajectory; `start` and `end` are in Unix time."""

    worker: str
    start: float
    end: float


def work_timeline(trajectories: Sequence[Trajectory]) -> WorkTimeline | None:
    """Count the trajectories that each agent and tool works for, in 60 intervals of equal length.

    If an agent or a tool works on several calls of a trajectory at the same time, each call counts. A
    trajectory that has ended counts as waiting until the last one ends.

    Returns:
        None if no times are recorded.
    """
    spans: list[_Span] = []
    ends: dict[int, float] = {}
    for index, trajectory in enumerate(trajectories):
        trajectory_spans = _spans(trajectory)
        if trajectory_spans:
            spans += trajectory_spans
            ends[index] = max(span.end for span in trajectory_spans)
    if not spans:
        return None

    start = min(span.start for span in spans)
    end = max(ends.values())
    spans += [_Span(WAITING, trajectory_end, end) for trajectory_end in ends.values()]
    interval = max((end - start) / _INTERVALS, 1e-6)  # in seconds, not 0
    counts: dict[str, list[float]] = defaultdict(lambda: [0.0] * _INTERVALS)
    for span in spans:
        # In units of intervals since the start. A span adds to an interval the share of it that it covers.
        first = (span.start - start) / interval
        last = (span.end - start) / interval
        for i in range(int(first), min(_INTERVALS - 1, int(last)) + 1):
            counts[span.worker][i] += max(0.0, min(last, i + 1) - max(first, i))

    slowest = max(ends, key=ends.__getitem__)
    return WorkTimeline(
        seconds=end - start,
        lines={
            worker: [((i + 0.5) * interval, count) for i, count in enumerate(worker_counts)]
            for worker, worker_counts in counts.items()
        },
        slowest=slowest,
        task=trajectories[slowest].task_id,
        behind=end - median(ends.values()),
    )


def _spans(trajectory: Trajectory) -> list[_Span]:
    """Return the times of a trajectory's calls of agents and tools, without calls whose time was not recorded."""
    spans = [
        _Span(turn.agent, turn.started_s, turn.started_s + turn.took_s) for turn in trajectory.turns
    ]
    spans += [
        _Span(f"tool {event.tool}", event.started_s, event.started_s + event.took_s)
        for event in trajectory.tools
    ]
    return [span for span in spans if span.start]  # 0: not recorded; others are Unix times
