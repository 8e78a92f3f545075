"""Rollout buffer: rewarded and filtered groups, collected ahead of training by a bounded staleness."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import TYPE_CHECKING

from mcore_mas.credit.assign import keep
from mcore_mas.credit.samples import Sample, to_samples
from mcore_mas.equations.advantages import NEEDS
from mcore_mas.training.session import Run, TrainingError
from rollout.base.task_group import cancel_tasks, together
from rollout.base.watchdog import Wait, Waiting
from rollout.config.build import build_allocator
from rollout.records.trajectory import Group, Status, Task, write_trajectories
from rollout.teams.collect import CollectOptions, collect
from rollout.teams.tree import Branching

if TYPE_CHECKING:
    from collections.abc import Iterator


class AsyncRollouts:
    """Collections under way, ended with the block that they are for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._under_way: dict[int, asyncio.Task[RolloutBatch]] = {}  # by step

    async def take(self, step: int) -> RolloutBatch:
        """The experience of `step`, which is about to be trained. Later steps' begins as far as staleness allows.

        Raises:
            TrainingError, CreditError: as `collect_batch`, when the step it happened in is taken.
        """
        config = self._run.config
        for later in takewhile(lambda later: config.may_collect(later, step), range(step, config.trainer.steps)):
            if later not in self._under_way:
                self._under_way[later] = asyncio.create_task(collect_batch(self._run, later))
        experience = await self._under_way[step]
        del self._under_way[step]
        return experience

    async def __aenter__(self) -> AsyncRollouts:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancel_tasks(self._under_way.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """What a step has to learn from."""

    groups: tuple[Group, ...]  # all that were collected, rewarded
    samples: tuple[Sample, ...]  # the turns that train or are peers of those that do
    batches: int  # of tasks that were collected


async def collect_batch(run: Run, step: int) -> RolloutBatch:
    """Collect the step's tasks, and with a filter further ones until enough tasks have turns left.

    Raises:
        TrainingError: every trajectory of a batch failed.
        CreditError: a turn has no finite reward.
    """
    wanted = run.config.filter
    groups: list[Group] = []
    samples: list[Sample] = []
    tasks: list[str] = []
    batches = 0
    began = asyncio.get_running_loop().time()
    for batch in _batches(run, step, began):
        batches += 1
        played = await _play(run, step, batch, began)
        groups += played
        write_trajectories(run.trajectories / f"step_{step:06d}.parquet", (t for g in groups for t in g.trajectories))
        _check_progress(step, groups)
        fresh = to_samples(played)
        samples += keep(fresh, wanted) if wanted else fresh
        tasks = list(dict.fromkeys(sample.task for sample in samples))
        if len(tasks) >= run.config.trainer.tasks_per_step:
            break
    trained = set(tasks[: run.config.trainer.tasks_per_step])
    return RolloutBatch(
        groups=tuple(groups), samples=tuple(sample for sample in samples if sample.task in trained), batches=batches
    )


def _batches(run: Run, step: int, began: float) -> Iterator[list[Task]]:
    """The step's tasks, and with a filter further ones for as long as its deadline leaves time."""
    yield run.schedule.batch(step)
    batch_s = run.config.collection.batch_s or math.inf
    for number in range(run.config.filter.resample if run.config.filter else 0):
        more = run.schedule.more(step, number)
        if more and asyncio.get_running_loop().time() < began + batch_s:
            yield more


async def _play(run: Run, step: int, tasks: Sequence[Task], began: float) -> list[Group]:
    config = run.config
    branching = config.trainer.branching
    options = CollectOptions(limits=config.collection.limits, began=began, watchdog=run.watchdog)
    play = partial(collect, tasks, run.team, run.make_env, run.orchestra, seed=config.seed, step=step)
    sampled = replace(
        options,
        tree=Branching(**branching.model_dump()) if branching else None,
        # of 10 at 1.1 one more, whatever binary fractions say
        surplus=math.ceil(config.trainer.group_size * (config.trainer.oversample - 1.0) - 1e-9),
    )
    collections = [play(group_size=config.trainer.group_size, options=sampled)]
    if any(NEEDS.get(config.advantage_of(agent).name) == "greedy" for agent in config.agents):
        collections.append(play(group_size=1, options=replace(options, temperature=0.0)))
    groups, *greedy = await together(collections)
    if run.coach is not None:
        waiting = Waiting(Wait(what="the coach's scores", since=asyncio.get_running_loop().time()))
        with run.watchdog.over(f"step {step}", waiting) if run.watchdog else nullcontext():
            groups = await run.coach.score(groups)
    allocate = build_allocator(config.reward, config.agents)
    groups = [allocate(group) for group in groups]  # reward per turn
    return _beside(greedy[0], groups) if greedy else groups


def _beside(greedy: Sequence[Group], groups: Sequence[Group]) -> list[Group]:
    """The groups with the outcome of the greedy trajectory of their task among every turn's scores.

    Where the greedy one failed the task's trajectories count as failed: without a baseline they cannot train.
    """
    done = []
    for group, (baseline,) in zip(groups, (g.trajectories for g in greedy), strict=True):
        if baseline.status is not Status.COMPLETED:
            lost = {"status": baseline.status, "error": f"no greedy baseline: {baseline.error}"}
            trajectories = [t if t.error else replace(t, **lost) for t in group.trajectories]
        else:
            score = {"greedy": baseline.outcome or 0.0}
            trajectories = [
                replace(t, turns=tuple(replace(turn, scores={**turn.scores, **score}) for turn in t.turns))
                for t in group.trajectories
            ]
        done.append(replace(group, trajectories=tuple(trajectories)))
    return done


def _check_progress(step: int, groups: Sequence[Group]) -> None:
    trajectories = [t for group in groups for t in group.trajectories]
    if all(t.status is not Status.COMPLETED for t in trajectories):
        raise TrainingError(
            f"step {step}: all {len(trajectories)} trajectories failed; the first: {trajectories[0].error}"
        )
