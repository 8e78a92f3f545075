"""Collection of trajectories (rollouts): every one is its own coroutine over a team and an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import Field

from rollout.base.async_tasks import cancel_tasks, gather_or_cancel
from rollout.base.deadlines import LEFT_BEHIND, Late
from rollout.base.errors import Defect, PromptTooLong, Undecided
from rollout.base.section import Section
from rollout.base.watchdog import Watchdog
from rollout.environments.protocol import Env
from rollout.records.call_record import CallRecord
from rollout.records.collection_log import CollectionLog
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.teams.episode import Episode, Orchestra
from rollout.teams.quarantine import write_quarantined
from rollout.teams.team import Team
from rollout.teams.tree import Branching, Tree


class Deadlines(Section):
    """Seconds that one of each may take; None is any time."""

    call_s: float | None = Field(
        None, gt=0
    )  # one reply of a policy's engine, from when its client asks the engine
    tool_s: float | None = Field(None, gt=0)  # one step or other call of the environment
    trajectory_s: float | None = Field(None, gt=0)
    batch_s: float | None = Field(None, gt=0)  # all trajectories that a step or a validation plays


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """How a batch is collected, beyond what is played."""

    tree: Branching | None = None  # every trajectory is grown as a tree; None: as one line
    sampling: Mapping[str, float] = field(
        default_factory=dict
    )  # of every agent, in place of its own
    limits: Deadlines = field(
        default_factory=Deadlines
    )  # of tools, a trajectory, all of them; late ones are cancelled
    began: float | None = (
        None  # when the batch of the tasks began, on the event loop's clock; None: now
    )
    surplus: int = 0  # trajectories of each task that are started beyond the group's size; the slowest are given up
    watchdog: Watchdog | None = None  # sees what is being played
    log: CollectionLog | None = (
        None  # finished trajectories, which are not played again; None: nothing is kept
    )
    quarantine: Path | None = (
        None  # folder of what is needed to play a quarantined trajectory again
    )
    env: str = ""  # name of the environment that is played; "": that of the tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Plays trajectories, with what they have in common."""

    team: Team
    make_env: Callable[[Task], Env]
    orchestra: Orchestra
    seed: int
    step: int
    options: CollectOptions = field(default_factory=CollectOptions)

    async def collect(self, tasks: Sequence[Task], group_size: int) -> list[Group]:
        """Play each task until `group_size` trajectories are completed and return one group per task, in their order.

        Raises:
            Unusable: the run cannot go on.
        """
        quotas = [_Quota(group_size) if self.options.surplus else None for _ in tasks]
        size = group_size + self.options.surplus
        played = await gather_or_cancel(
            self.play(task, sample, quota)
            for task, quota in zip(tasks, quotas, strict=True)
            for sample in range(size)
        )
        return [
            Group(task=task, trajectories=tuple(played[i * size : (i + 1) * size]))
            for i, task in enumerate(tasks)
        ]

    async def play(self, task: Task, sample: int, quota: _Quota | None = None) -> Trajectory:
        """Play a task as its group's member `sample`; the same again draws the same.

        A trajectory whose engine, environment or orchestra fails has status FAILED and its error, one of which
        something is late LATE, one that is given up ABORTED. One that failed by a `Defect` is quarantined.
        """
        options, limits = self.options, self.options.limits
        name = f"{self.step}/{task.id}/{sample}"
        logged_name = " ".join([name, *options.sampling])  # apart from those of other sampling
        finished = options.log.trajectory(logged_name) if options.log else None
        if finished is not None:
            if quota:
                quota.count()
            return finished

        calls = CallRecord(options.log, logged_name)
        team = self.team.resampled(**options.sampling)
        began = asyncio.get_running_loop().time() if options.began is None else options.began
        ends = None if limits.batch_s is None else began + limits.batch_s
        place = (self.seed, self.step, task.id, sample)
        played: Episode | Tree
        if options.tree is None:
            seat = team.seat(*place, calls=calls)
            played = Episode(
                task, seat, self.make_env, self.orchestra, tool_s=limits.tool_s, name=options.env
            )
        else:
            played = Tree(
                options.tree,
                task,
                team,
                place,
                self.make_env,
                self.orchestra,
                limits.tool_s,
                options.env,
                calls,
            )
        with options.watchdog.over(name, played.waits) if options.watchdog else nullcontext():
            ending = await _play(played, limits, ends, quota)
        trajectory = Trajectory(
            id=name,
            task_id=task.id,
            source=task.source,
            sample=sample,
            step=self.step,
            turns=played.turns,
            tools=tuple(played.tools),
            outcome=None if ending.error else _episode(played).outcome,
            answer=None if ending.error else _episode(played).answer,
            leaf=played.leaf,
            metrics=dict.fromkeys(ending.counted, 1.0) | played.metrics,
            status=ending.status,
            error=ending.error,
        )
        if ending.defect is not None and options.quarantine is not None:
            write_quarantined(
                options.quarantine,
                trajectory,
                task=task,
                seed=self.seed,
                replies=played.replies,
                error=ending.defect,
            )
        # one that failed is played again after a restart: it may do better
        if options.log and trajectory.status is Status.COMPLETED:
            options.log.add_trajectory(logged_name, trajectory)
        return trajectory


class _Quota:
    """How many trajectories a group still lacks."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.met: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def count(self) -> None:
        self._wanted -= 1
        if not self._wanted:
            self.met.set_result(None)


@dataclass(frozen=True, slots=True)
class _Ending:
    status: Status
    error: str  # why not well
    counted: tuple[
        str, ...
    ] = ()  # a name of `_COUNTED`, or `late/` and an agent, a tool, `trajectory` or `batch`
    defect: Defect | None = None  # why it is quarantined


async def _play(
    played: Episode | Tree, limits: Deadlines, ends: float | None, quota: _Quota | None
) -> _Ending:
    """Play to the end, to a deadline, or until the group is full; what is not done then is cancelled."""
    if limits.trajectory_s is None and ends is None and quota is None:
        await played.play()
        return _ending(played)
    left = None if ends is None else ends - asyncio.get_running_loop().time()
    patience = min((s for s in (left, limits.trajectory_s) if s is not None), default=None)
    task = asyncio.create_task(played.play())
    try:
        first = {task, quota.met} if quota else {task}
        await asyncio.wait(first, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if quota and quota.met.done():
            ending = _Ending(
                Status.ABORTED, f"its group was full while it waited for {played.waiting}"
            )
        elif task.done():
            task.result()
            if quota and not played.error:
                quota.count()
            return _ending(played)
        else:
            late, status, seconds = (
                ("batch", Status.ABORTED, limits.batch_s)
                if patience == left
                else ("trajectory", Status.LATE, limits.trajectory_s)
            )
            why = f"the {late}'s deadline of {seconds:g} s passed while it waited for {played.waiting}"
            ending = _Ending(status, why, (f"late/{late}",))
    finally:
        ended = await cancel_tasks([task])
    return ending if ended else replace(ending, error=ending.error + LEFT_BEHIND)


_COUNTED = {"undecided": Undecided, "overlong": PromptTooLong, "quarantined": Defect}


def _ending(played: Episode | Tree) -> _Ending:
    if not played.error:
        return _Ending(Status.COMPLETED, "")
    failure = _episode(played).failure
    if isinstance(failure, Late):
        return _Ending(Status.LATE, played.error, (f"late/{failure.what}",))
    counted = [name for name, kind in _COUNTED.items() if isinstance(failure, kind)]
    return _Ending(
        Status.FAILED,
        played.error,
        tuple(counted),
        failure if isinstance(failure, Defect) else None,
    )


def _episode(played: Episode | Tree) -> Episode:
    """Itself, or of a tree the one that went on."""
    return played.episode if isinstance(played, Tree) else played
