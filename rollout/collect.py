"""Collection: every trajectory is its own coroutine over a team and an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollout.engines.protocol import EngineError
from rollout.envs.protocol import Env, EnvError, Step
from rollout.records import Group, Status, Task, ToolEvent, Trajectory
from rollout.team import Seat, Team

Orchestra = Callable[[Task, Seat, Env], Awaitable[None]]


class _Recorder:
    """An environment that writes down what its steps returned."""

    def __init__(self, env: Env, seat: Seat) -> None:
        self._env = env
        self._seat = seat
        self.outcome: float | None = None
        self.tools: list[ToolEvent] = []
        self.metrics: dict[str, float] = {}

    def reset(self, task: Task) -> str:
        return self._env.reset(task)

    async def step(self, action: str) -> Step:
        step = await self._env.step(action)
        self.outcome = (self.outcome or 0.0) + step.reward
        self.metrics.update(step.metrics)
        last = len(self._seat.turns) - 1
        self.tools += [ToolEvent(after_turn=last, tool=t.tool, query=t.query, result=t.result) for t in step.tools]
        return step


async def collect(
    tasks: Sequence[Task],
    team: Team,
    make_env: Callable[[Task], Env],
    orchestra: Orchestra,
    *,
    group_size: int,
    seed: int,
    step: int,
    done: Callable[[Trajectory], None] = lambda _: None,
) -> list[Group]:
    """Play each task `group_size` times and return one group per task, in the order of `tasks`.

    A trajectory whose engine or environment fails is kept with status FAILED and its error; the others go on.
    `done` is called with each trajectory as it ends.
    """

    async def play(task: Task, sample: int) -> Trajectory:
        seat = team.seat(seed, step, task.id, sample)
        recorder = _Recorder(make_env(task), seat)
        error = ""
        try:
            await orchestra(task, seat, recorder)
            if recorder.outcome is None:
                error = "the orchestra ended without a step in the environment"
        except (EngineError, EnvError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        trajectory = Trajectory(
            id=f"{step}/{task.id}/{sample}",
            task_id=task.id,
            source=task.source,
            sample=sample,
            step=step,
            turns=tuple(seat.turns),
            tools=tuple(recorder.tools),
            outcome=None if error else recorder.outcome,
            metrics=recorder.metrics,
            status=Status.FAILED if error else Status.COMPLETED,
            error=error,
        )
        done(trajectory)
        return trajectory

    played = await asyncio.gather(*(play(task, sample) for task in tasks for sample in range(group_size)))
    return [
        Group(task=task, trajectories=tuple(played[i * group_size : (i + 1) * group_size]))
        for i, task in enumerate(tasks)
    ]
