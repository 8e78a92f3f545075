"""Rollout buffer: the schedule of tasks; rewarded and filtered groups, collected ahead by a bounded staleness."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import takewhile
from statistics import fmean
from typing import Any

from mcore_mas.config.run import RunConfig
from mcore_mas.credit.assign import filter_samples
from mcore_mas.credit.samples import Sample, to_samples
from mcore_mas.equations.advantages import REQUIRED_COLUMN
from mcore_mas.evaluation.measure import Scoreboard, measure
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.full_disk import retry_while_full
from mcore_mas.training.collected_steps import CollectedSteps
from mcore_mas.training.metrics import StepMetrics
from rollout.base.async_tasks import gather_or_cancel
from rollout.base.watchdog import Wait, Watchdog
from rollout.config.reward import build_allocator
from rollout.engines.remote.caller import RemoteClient
from rollout.environments.protocol import Env
from rollout.records.collection_log import CollectionLog
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Group, Status, Task, Trajectory, Turn
from rollout.rewards.allocation import judge_undecided
from rollout.rewards.coach import Coach
from rollout.teams.collect import CollectOptions, Collector
from rollout.teams.team import Team

_VALIDATION = -1  # the step in the seeds of validation trajectories: the same draws every time


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """What a step has to learn from: there is no replay buffer, no later step trains on it again."""

    groups: tuple[Group, ...]  # all that were collected, rewarded
    samples: tuple[Sample, ...]  # the turns that train or are peers of those that do
    batches: int  # of tasks that were collected


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRollouts:
    """A run's team at its tasks. Collections begin as early as staleness allows; what is under way its owner ends.

    With a staleness of 0 training is on-policy, with n off-policy by at most n versions of the weights.
    """

    config: RunConfig
    team: Team
    make_env: Callable[[Task], Env]
    schedule: Schedule
    validation: tuple[Task, ...]
    collected: CollectedSteps  # files of the steps collected so far
    remotes: Mapping[str, RemoteClient] = field(default_factory=dict)  # by policy without a model
    coach: Coach | None = None  # who scores turns before rewards are allocated
    watchdog: Watchdog | None = None  # sees everything that is played
    under_way: dict[int, asyncio.Task[RolloutBatch]] = field(
        default_factory=dict, init=False
    )  # collections, by step

    async def take(self, step: int) -> RolloutBatch:
        """The experience of `step`, which is about to be trained. Later steps' begins as far as staleness allows.

        Raises:
            TrainingError, CreditError: as `collect_batch`, when the step it happened in is taken.
        """
        steps = range(step, self.config.trainer.steps)
        for later in takewhile(lambda later: self.config.may_collect(later, step), steps):
            if later not in self.under_way:
                self.under_way[later] = asyncio.create_task(self.collect_batch(later))
        batch = await self.under_way[step]
        del self.under_way[step]
        return batch

    async def validate(self) -> Scoreboard:
        """The validation tasks, measured as an evaluation measures the test tasks."""
        config, board = (
            self.config,
            Scoreboard(self.validation, self.config.trainer.validation_samples),
        )
        began = asyncio.get_running_loop().time()
        collector = self._collector(_VALIDATION, started=began, sampling=config.evaluation.sampling)
        in_flight = config.trajectories_in_flight(len(config.models) * config.engine.servers)
        await measure(board, collector, in_flight=in_flight, retries=config.evaluation.retries)
        return board

    def metrics(self) -> StepMetrics:
        """What coach and remote models have said and spent."""
        metrics = dict(self.coach.metrics()) if self.coach is not None else {}
        for policy, remote in self.remotes.items():
            metrics |= {
                f"policy/{policy}/{name}": value for name, value in remote.metrics().items()
            }
        return metrics

    async def collect_batch(self, step: int) -> RolloutBatch:
        """Collect the step's tasks, and with a filter further ones until enough tasks have turns left.

        Raises:
            TrainingError: every trajectory of a batch failed, or too many are quarantined.
            CreditError: a turn has no finite reward.
        """
        wanted, per_step = self.config.filter, self.config.trainer.tasks_per_step
        groups: list[Group] = []
        samples: list[Sample] = []
        tasks: list[str] = []
        number = 0
        began = asyncio.get_running_loop().time()
        resumed = self.collected.read(step)
        log = self.collected.log(step)
        batches = self._batches(step, began)
        batch: list[Task] | None = next(batches)
        while batch is not None:
            number += 1
            if number <= resumed.count:
                collected = resumed.groups(batch)
            else:
                collected = await self._rewarded(step, batch, began, log)
            groups += collected
            trajectories = [t for group in groups for t in group.trajectories]
            problem = self._problem(step, trajectories)
            if problem:  # the file is for whoever looks into it; a restart does not go on from it
                await self._write(step, trajectories, batches=number - 1, complete=False)
                raise TrainingError(problem)

            collected_samples = to_samples(collected)
            samples += filter_samples(collected_samples, wanted) if wanted else collected_samples
            tasks = list(dict.fromkeys(sample.task for sample in samples))
            last = len(tasks) >= per_step or (resumed.complete and number == resumed.count)
            batch = None if last else next(batches, None)
            if number > resumed.count or (batch is None and not resumed.complete):
                await self._write(step, trajectories, batches=number, complete=batch is None)
        log.remove()
        trained = set(tasks[:per_step])
        return RolloutBatch(
            groups=tuple(groups),
            samples=tuple(s for s in samples if s.task in trained),
            batches=number,
        )

    async def _write(
        self, step: int, trajectories: Sequence[Trajectory], *, batches: int, complete: bool
    ) -> None:
        """Write a step's file in a thread: for a large step it takes seconds, and other trajectories go on."""
        write = partial(
            self.collected.write, step, trajectories, batches=batches, complete=complete
        )
        await retry_while_full(partial(asyncio.to_thread, write), self.collected.path(step))

    def _batches(self, step: int, began: float) -> Iterator[list[Task]]:
        """The step's tasks, and with a filter further ones for as long as its deadline leaves time."""
        yield self.schedule.batch(step)
        batch_s = self.config.collection.batch_s or math.inf
        for number in range(self.config.filter.resample if self.config.filter else 0):
            more = self.schedule.more(step, number)
            if more and asyncio.get_running_loop().time() < began + batch_s:
                yield more

    async def _rewarded(
        self, step: int, tasks: Sequence[Task], began: float, log: CollectionLog
    ) -> list[Group]:
        """Some tasks, played and with a reward for every turn; with their greedy trajectory where that is compared."""
        config, trainer, size = self.config, self.config.trainer, self.config.trainer.group_size
        surplus = math.ceil(
            size * (trainer.oversample - 1.0) - 1e-9
        )  # of 10 at 1.1 one, whatever binary fractions say
        collector = self._collector(
            step, started=began, log=log, tree=trainer.branching, surplus=surplus
        )
        collections = [collector.collect(tasks, size)]
        if any(
            REQUIRED_COLUMN.get(config.advantage_of(agent).name) == "greedy"
            for agent in config.agents
        ):
            baseline = self._collector(step, started=began, log=log, sampling={"temperature": 0.0})
            collections.append(baseline.collect(tasks, 1))
        groups, *greedy = await gather_or_cancel(collections)
        if greedy:  # of the same group, so that it is rewarded as the others are
            groups = [
                replace(g, trajectories=g.trajectories + b.trajectories)
                for g, b in zip(groups, *greedy, strict=True)
            ]
        groups = judge_undecided(groups, config.collection.max_undecided)
        if self.coach is not None:
            waits = [Wait(what="the coach's scores", since=asyncio.get_running_loop().time())]
            with (
                self.watchdog.over(f"step {step}", lambda: waits)
                if self.watchdog
                else nullcontext()
            ):
                groups = await self.coach.score(groups)
        allocate = build_allocator(config.reward, config.agents)
        try:
            groups = [allocate(group) for group in groups]
        except SystemExit as error:  # asyncio would end the event loop without a word
            raise TrainingError(
                f"step {step}: the reward called sys.exit({error.code!r})"
            ) from error
        return list(map(_beside, groups)) if greedy else groups

    def _collector(self, step: int, **options: Any) -> Collector:
        """Return a collector for a step; `options` are those of `CollectOptions` beside the run's own."""
        config = self.config
        options |= {
            "deadlines": config.collection,
            "watchdog": self.watchdog,
            "quarantine": self.collected.quarantine,
        }
        return Collector(
            team=self.team,
            make_env=self.make_env,
            orchestra=config.orchestra.call,
            seed=config.seed,
            step=step,
            options=CollectOptions(env=config.env.name, **options),
        )

    def _problem(self, step: int, trajectories: Sequence[Trajectory]) -> str:
        """Return why the run cannot train on the trajectories of a step, or ""."""
        quarantined = [t for t in trajectories if "quarantined" in t.metrics]
        if len(quarantined) > self.config.collection.max_quarantined * len(trajectories):
            return (
                f"step {step}: {len(quarantined)} of {len(trajectories)} trajectories are quarantined, more than "
                f"collection.max_quarantined allows; the first: {quarantined[0].error}; see to it with "
                f"`mcore-mas replay` and a file of {self.collected.quarantine}"
            )
        if all(t.status is not Status.COMPLETED for t in trajectories):
            first = trajectories[0].error
            return f"step {step}: all {len(trajectories)} trajectories failed; the first: {first}"
        return ""


def _beside(group: Group) -> Group:
    """The group without its last trajectory, the greedy one, whose reward is the score `greedy` of every turn.

    An agent's turns get the mean reward of its own turns there, or of all where it did not speak. Where the greedy one
    failed the others count as failed: without a baseline they cannot train.
    """
    *others, baseline = group.trajectories
    if baseline.status is not Status.COMPLETED:
        error = f"no greedy baseline: {baseline.error}"
        failed = [t if t.error else replace(t, status=baseline.status, error=error) for t in others]
        return replace(group, trajectories=tuple(failed))
    rewards: dict[str, list[float]] = {"": []}
    for turn in baseline.turns:
        if turn.reward is not None:
            rewards.setdefault(turn.agent, []).append(turn.reward)
            rewards[""].append(turn.reward)
    means = {
        agent: fmean(own) if own else baseline.outcome or 0.0 for agent, own in rewards.items()
    }

    def scored(turn: Turn) -> Turn:
        return replace(turn, scores={**turn.scores, "greedy": means.get(turn.agent, means[""])})

    return replace(
        group, trajectories=tuple(replace(t, turns=tuple(map(scored, t.turns))) for t in others)
    )


class Schedule:
    """Tasks by step, the same after every restart."""

    def __init__(self, tasks: Sequence[Task], per_step: int, seed: int) -> None:
        """`per_step` of `tasks` a step, without repeats inside an epoch.

        Raises:
            ValueError: there are fewer tasks than a step needs.
        """
        if len(tasks) < per_step:
            raise ValueError(
                f"{len(tasks)} training tasks, but trainer.tasks_per_step is {per_step}; add tasks"
            )
        self._tasks = tasks
        self._per_step = per_step
        self._seed = seed
        self._order = lru_cache(maxsize=2)(
            lambda epoch: sorted(tasks, key=lambda task: derive_seed(seed, "order", epoch, task.id))
        )

    def batch(self, step: int) -> list[Task]:
        """The tasks of `step`, from 0. An epoch's last few tasks that do not fill a step are left out of it."""
        steps = len(self._tasks) // self._per_step
        epoch, place = divmod(step, steps)
        return self._order(epoch)[place * self._per_step : (place + 1) * self._per_step]

    def more(self, step: int, number: int) -> list[Task]:
        """The step's further batch `number`, from 0, of tasks that no other batch of the step has; [] at their end."""
        used = {task.id for task in self.batch(step)}
        others = [task for task in self._tasks if task.id not in used]
        others.sort(key=lambda task: derive_seed(self._seed, "more", step, task.id))
        return others[number * self._per_step : (number + 1) * self._per_step]
