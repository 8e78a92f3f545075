"""Collection of trajectories (rollouts): each one is a coroutine over a team and an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from rollout.base.async_tasks import cancel_tasks, gather_or_cancel
from rollout.base.deadlines import LEFT_BEHIND, Late
from rollout.base.errors import Defect, PromptTooLong, Unasked, Undecided
from rollout.base.section import Section
from rollout.base.watchdog import Watchdog
from rollout.environments.protocol import Env
from rollout.records.call_record import CallRecord
from rollout.records.collection_log import CollectionLog
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.teams.episode import Episode, Orchestra
from rollout.teams.quarantine import write_quarantined
from rollout.teams.replays import ReplayedPlay, ReplayPlan
from rollout.teams.team import Team
from rollout.teams.tree import BranchedPlay, Branching, Tree


class Deadlines(Section):
    """Deadlines in seconds, and the most turns of a trajectory; None: no limit."""

    # Deadline of one reply of a policy's engine, from when its client asks the engine.
    call_s: float | None = Field(None, gt=0)
    # Deadline of one step or other call of the environment, and of one call of a tool.
    tool_s: float | None = Field(None, gt=0)
    # Deadline of one trajectory.
    trajectory_s: float | None = Field(None, gt=0)
    # Deadline of all trajectories that a step or a validation plays.
    batch_s: float | None = Field(None, gt=0)
    # Most turns of a trajectory, or of each branch of a tree; it fails at the next one. This ends an
    # orchestra that would ask agents forever.
    max_turns: int | None = Field(1000, ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """Options of a collection, in addition to the team, the tasks and the environment."""

    tree: Branching | None = None  # None: trajectories do not branch
    # Replays of each trajectory; None: trajectories are not replayed. Replays and a tree exclude each other.
    replays: ReplayPlan | None = None
    # Fields that replace those of every agent's `Sampling`
    sampling: Mapping[str, float] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    # Time at which the batch started, in seconds on the event loop's clock; None: the
    # start of each trajectory.
    started: float | None = None
    surplus: int = 0  # trajectories started beyond a group's size; the slowest are given up
    watchdog: Watchdog | None = None
    # Record of finished trajectories, which are not played again, and of calls that are not repeated.
    log: CollectionLog | None = None
    quarantine: Path | None = None  # folder for files of quarantined trajectories
    env: str = ""  # name of the environment in errors and `late/...` metrics; "": `Task.env`


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Collector of one step's trajectories, with a team, an environment and an orchestra.

    Attributes:
        policies_of: takes the id of a task, and returns policies by agent. In the task's trajectories,
            these replace the policies of those agents. None: no policy is replaced.
    """

    team: Team
    make_env: Callable[[Task], Env]
    orchestra: Orchestra
    seed: int
    step: int
    options: CollectOptions = field(default_factory=CollectOptions)
    policies_of: Callable[[str], Mapping[str, str]] | None = None

    async def collect(self, tasks: Sequence[Task], group_size: int) -> list[Group]:
        """Play each task `group_size` times, and `options.surplus` times more, all at once.

        With a surplus, once `group_size` trajectories of a task are completed, those of its
        trajectories that still run are given up.

        Returns:
            A group for each task, in the order of the tasks. It has all trajectories, also those
            that failed or were given up.

        Raises:
            Unusable: the run cannot go on.
        """
        plays_per_task = group_size + self.options.surplus
        plays = []
        for task in tasks:
            quota = _Quota(group_size) if self.options.surplus else None
            plays += [self.play(task, sample, quota) for sample in range(plays_per_task)]
        trajectories = await gather_or_cancel(plays)
        groups = []
        for index, task in enumerate(tasks):
            members = trajectories[index * plays_per_task : (index + 1) * plays_per_task]
            groups.append(Group(task=task, trajectories=tuple(members)))
        return groups

    async def play(self, task: Task, sample: int, quota: _Quota | None = None) -> Trajectory:
        """Play a task as member `sample` of its group; the same arguments give the same seeds.

        The trajectory has status FAILED if its engine, environment or orchestra fails, LATE if a call
        or the whole trajectory misses its deadline, and ABORTED if the batch's deadline passes or the
        group is full before it ends. One that fails by a `Defect` is written to the folder
        `options.quarantine`, if there is one.

        Args:
            task: task to play.
            sample: number of the trajectory in its group, from 0.
            quota: countdown of the group; None: the group has no surplus.
        """
        options = self.options
        trajectory_id = f"{self.step}/{task.id}/{sample}"
        # A step may play a task greedily too, with the same id, by replacing the temperature. The
        # names of the replaced parameters distinguish the two trajectories in the log.
        logged_name = " ".join([trajectory_id, *options.sampling])
        finished = options.log.trajectory(logged_name) if options.log else None
        if finished is not None:
            if quota:
                quota.count()
            return finished

        play = self._new_play(task, sample, CallRecord(options.log, logged_name))
        watched: AbstractContextManager[object] = nullcontext()
        if options.watchdog is not None:
            watched = options.watchdog.over(trajectory_id, play.waits)
        with watched:
            ending = await self._run(play, quota)
        episode = _episode(play)
        trajectory = Trajectory(
            id=trajectory_id,
            task_id=task.id,
            source=task.source,
            sample=sample,
            step=self.step,
            turns=play.turns,
            tools=tuple(play.tools),
            outcome=None if ending.error else episode.outcome,
            answer=None if ending.error else episode.answer,
            leaf=play.leaf,
            # `Trajectory.failure_reason` requires that the ending's metric is the first.
            metrics=dict.fromkeys(ending.metrics, 1.0) | play.metrics,
            status=ending.status,
            error=ending.error,
        )
        if ending.defect is not None and options.quarantine is not None:
            write_quarantined(
                options.quarantine,
                trajectory,
                task=task,
                seed=self.seed,
                replies=play.replies,
                error=ending.defect,
            )
        # A trajectory that was not completed is played again after a restart, since it may succeed then.
        if options.log and trajectory.status is Status.COMPLETED:
            options.log.add_trajectory(logged_name, trajectory)
        return trajectory

    def _new_play(self, task: Task, sample: int, call_record: CallRecord) -> _Play:
        """Return the play of a task: with replays, as a tree, or as a single episode."""
        options = self.options
        team = replace(
            self.team.with_sampling(**options.sampling), max_turns=options.deadlines.max_turns
        )
        if self.policies_of is not None:
            team = team.with_policies(self.policies_of(task.id))
        seed_path = (self.seed, self.step, task.id, sample)
        branched_settings: dict[str, Any] = {
            "task": task,
            "team": team,
            "seed_path": seed_path,
            "make_env": self.make_env,
            "orchestra": self.orchestra,
            "tool_s": options.deadlines.tool_s,
            "env_name": options.env,
            "call_record": call_record,
        }
        if options.replays is not None:
            return ReplayedPlay(plan=options.replays, **branched_settings)
        if options.tree is not None:
            return Tree(branching=options.tree, **branched_settings)
        return Episode(
            task,
            team.session(*seed_path, call_record=call_record),
            self.make_env,
            self.orchestra,
            tool_s=options.deadlines.tool_s,
            name=options.env,
        )

    async def _run(self, play: _Play, quota: _Quota | None) -> _Ending:
        """Play to the end, to a deadline, or until the group is full; cancel an unfinished play."""
        deadlines = self.options.deadlines
        if deadlines.trajectory_s is None and deadlines.batch_s is None and quota is None:
            await play.play()
            return _ending(play)

        batch_left_s = self._batch_left_s()
        limits = [limit for limit in (batch_left_s, deadlines.trajectory_s) if limit is not None]
        timeout_s = min(limits, default=None)
        batch_ends_first = batch_left_s is not None and timeout_s == batch_left_s
        playing = asyncio.create_task(play.play())
        try:
            awaited = {playing, quota.filled} if quota else {playing}
            await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            # A group that is full takes no further trajectory, even one that has ended meanwhile.
            if quota and quota.filled.done():
                error = f"its group was full while it waited for {play.waiting}"
                ending = _Ending(status=Status.ABORTED, error=error)
            elif playing.done():
                playing.result()
                if quota and not play.error:
                    quota.count()
                ending = _ending(play)
            elif batch_ends_first:
                ending = _late_ending("batch", Status.ABORTED, deadlines.batch_s, play)
            else:
                ending = _late_ending("trajectory", Status.LATE, deadlines.trajectory_s, play)
        finally:
            has_ended = await cancel_tasks([playing])
        return ending if has_ended else replace(ending, error=ending.error + LEFT_BEHIND)

    def _batch_left_s(self) -> float | None:
        """Return the seconds until the batch's deadline; None if the batch has none."""
        if self.options.deadlines.batch_s is None:
            return None
        now = asyncio.get_running_loop().time()
        started = now if self.options.started is None else self.options.started
        return started + self.options.deadlines.batch_s - now


class _Quota:
    """Countdown of the completed trajectories that a group still lacks.

    Attributes:
        filled: future that is done when the group is full.
    """

    def __init__(self, group_size: int) -> None:
        self._lacking = group_size
        self.filled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def count(self) -> None:
        """Count a completed trajectory."""
        self._lacking -= 1
        if not self._lacking:
            self.filled.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """Status with which a trajectory ended.

    Attributes:
        error: reason if the status is not COMPLETED.
        metrics: names of the metrics that get the value 1: those of `_FAILURE_METRICS`, or
            `late/<part>` with the part that was late, such as `agent/solver` or `batch`.
        defect: defect for which the trajectory is quarantined.
    """

    status: Status
    error: str = ""
    metrics: tuple[str, ...] = ()
    defect: Defect | None = None


_Play = Episode | Tree | ReplayedPlay  # play of one trajectory


# Metrics that count failed trajectories, and the class of failure that each one counts.
_FAILURE_METRICS = {
    "undecided": Undecided,
    "overlong": PromptTooLong,
    "unasked": Unasked,
    "quarantined": Defect,
}


def _ending(play: _Play) -> _Ending:
    """Return the ending of a play that was not cut off."""
    if not play.error:
        return _Ending(status=Status.COMPLETED)
    failure = _episode(play).failure
    if isinstance(failure, Late):
        return _Ending(status=Status.LATE, error=play.error, metrics=(f"late/{failure.part}",))
    return _Ending(
        status=Status.FAILED,
        error=play.error,
        metrics=tuple(name for name, kind in _FAILURE_METRICS.items() if isinstance(failure, kind)),
        defect=failure if isinstance(failure, Defect) else None,
    )


def _late_ending(scope: str, status: Status, deadline_s: float | None, play: _Play) -> _Ending:
    """Return the ending of a play that a deadline cut off.

    Args:
        scope: "batch" or "trajectory".
        deadline_s: the scope's deadline, which is never None here, because it has passed.
    """
    error = f"the {scope}'s deadline of {deadline_s:g} s passed while it waited for {play.waiting}"
    return _Ending(status=status, error=error, metrics=(f"late/{scope}",))


def _episode(play: _Play) -> Episode:
    """Return the episode of a play; with branches, that of the branch that leads to the outcome."""
    return play.episode if isinstance(play, BranchedPlay) else play
