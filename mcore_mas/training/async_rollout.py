"""Asynchronous rollouts: collect, reward and filter the trajectories of steps, ahead of training.

`AsyncRollouts.take` returns the `RolloutBatch` of a step. It also begins the collection of later steps,
as far as the staleness allows.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mcore_mas.config.run import RunConfig
from mcore_mas.credit.advantage_files import TurnAdvantages
from mcore_mas.credit.assign import filter_samples
from mcore_mas.credit.samples import Sample, to_samples
from mcore_mas.equations.advantages import REQUIRED_COLUMN
from mcore_mas.evaluation.measure import Scoreboard, measure
from mcore_mas.evaluation.replay import replay_remedy
from mcore_mas.evaluation.strategies import game_of, strategy_metrics
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.full_disk import retry_while_full
from mcore_mas.training.collected_steps import CollectedSteps
from mcore_mas.training.greedy_baseline import append_greedy, use_greedy_as_baseline
from mcore_mas.training.metrics import StepMetrics, all_trajectories
from mcore_mas.training.opponents import Opponents
from mcore_mas.training.task_schedule import TaskSchedule
from rollout.base.async_tasks import gather_or_cancel
from rollout.base.error_location import describe_with_location
from rollout.base.watchdog import Wait, Watchdog
from rollout.config.reward import build_allocator
from rollout.engines.remote.client import RemoteClient
from rollout.environments.protocol import Env
from rollout.records.collection_log import CollectionLog
from rollout.records.trajectory import (
    VALIDATION_STEP,
    Group,
    Status,
    Task,
    Trajectory,
    step_label,
)
from rollout.rewards.allocation import RewardError, judge_undecided
from rollout.rewards.coach import Coach
from rollout.teams.collect import CollectOptions, Collector
from rollout.teams.quarantine import quarantine_path
from rollout.teams.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Trajectories and samples of one step.

    There is no replay buffer: no other step trains on them.

    Attributes:
        groups: all groups that were collected, with rewards.
        samples: turns that pass the filter, of as many tasks as a step has.
        batches: number of task batches that were collected.
    """

    groups: tuple[Group, ...]
    samples: tuple[Sample, ...]
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRollouts:
    """Collector of a run's steps, ahead of training by as much as the staleness allows.

    With a staleness of 0, training is on-policy. With n, turns may be sampled by weights that are
    up to n versions older than those that are trained.

    Attributes:
        config: config of the run.
        team: plays the tasks.
        make_env: makes the environment of a task.
        schedule: training tasks by step.
        validation: validation tasks.
        collected: files of the steps that were collected so far.
        remotes: clients of policies without a model, by policy.
        opponents: opponents of the trained policy, if the run has some.
        coach: scores turns before rewards are allocated, if there is one.
        watchdog: reports collections that do not make progress.
        under_way: collections that have begun and were not taken, by step. The owner cancels them
            when the run ends.
    """

    config: RunConfig
    team: Team
    make_env: Callable[[Task], Env]
    schedule: TaskSchedule
    validation: tuple[Task, ...]
    collected: CollectedSteps
    remotes: Mapping[str, RemoteClient] = field(default_factory=dict)
    opponents: Opponents | None = None
    coach: Coach | None = None
    watchdog: Watchdog | None = None
    under_way: dict[int, asyncio.Task[RolloutBatch]] = field(default_factory=dict, init=False)

    async def take(self, step: int) -> RolloutBatch:
        """Return the batch of a step that is about to be trained.

        Begin its collection, if it is not under way, and those of later steps that the staleness allows.

        Raises:
            TrainingError, CreditError: raised by `collect_batch`, for this step only.
        """
        for number in range(step, self.config.trainer.steps):
            if not self.config.may_collect(number, step):
                break
            if number not in self.under_way:
                self.under_way[number] = asyncio.create_task(self.collect_batch(number))
        batch = await self.under_way[step]
        del self.under_way[step]
        return batch

    async def validate(self) -> Scoreboard:
        """Play the validation tasks, with the rules and the sampling of an evaluation."""
        config = self.config
        board = Scoreboard(self.validation, config.trainer.validation_samples)
        options = CollectOptions(
            started=asyncio.get_running_loop().time(), sampling=config.evaluation.sampling
        )
        servers = len(config.models) * config.engine.servers
        await measure(
            board,
            # All validations have the same seeds, so that each samples in the same way.
            self._collector(VALIDATION_STEP, options),
            in_flight=config.trajectories_in_flight(servers),
            retries=config.evaluation.retries,
        )
        return board

    async def measure_strategy(self) -> StepMetrics:
        """Return the metrics of the team's strategy, if it plays a zero-sum game; see `strategy_metrics`."""
        game = game_of(self.config)
        return {} if game is None else await strategy_metrics(self.team, game)

    def metrics(self) -> StepMetrics:
        """Return the call counts and the spending of the coach and the remote models."""
        metrics: StepMetrics = {}
        if self.coach is not None:
            metrics |= self.coach.metrics()
        for policy, remote in self.remotes.items():
            for name, value in remote.metrics().items():
                metrics[f"policy/{policy}/{name}"] = value
        return metrics

    async def collect_batch(self, step: int) -> RolloutBatch:
        """Collect and reward the tasks of a step, and write their trajectories to its file.

        With a filter that resamples, collect extra batches of tasks until enough tasks have samples
        left. Batches that an earlier start of the run has recorded in the file are not collected
        again.

        Raises:
            TrainingError: the reward failed, too many trajectories are quarantined, all failed, or
                none has a token that can be trained on.
            CreditError: a turn has no finite reward.
        """
        started = asyncio.get_running_loop().time()
        if self.opponents is not None:
            await self.opponents.prepare(step)
        recorded = self.collected.read(step)
        log = self.collected.log(step)

        groups: list[Group] = []
        samples: list[Sample] = []
        batches = 0
        task_batches = self._task_batches(step, started)
        tasks: list[Task] | None = next(task_batches)
        while tasks is not None:
            if batches < recorded.count:
                new_groups = recorded.groups(tasks)
            else:
                played = await self._collect(step, tasks, started, log)
                new_groups = await self._allocate_rewards(
                    step, played, earlier_groups=groups, earlier_batches=batches
                )
            groups += new_groups
            await self._check_batch(step, groups, earlier_batches=batches)
            samples += self._trainable_samples(new_groups)
            batches += 1

            # The next tasks are drawn before this batch is written, because the file says whether the
            # step has further batches.
            is_enough = recorded.ends_with(batches) or self._has_enough_tasks(samples)
            tasks = None if is_enough else next(task_batches, None)
            is_complete = tasks is None
            if not recorded.covers(batches, complete=is_complete):
                trajectories = all_trajectories(groups)
                await self._write(step, trajectories, batches=batches, complete=is_complete)
        log.remove()
        return RolloutBatch(
            groups=tuple(groups),
            samples=tuple(self._samples_of_first_tasks(samples)),
            batches=batches,
        )

    def _task_batches(self, step: int, started: float) -> Iterator[list[Task]]:
        """Yield the tasks of a step, then extra batches while filter and deadline allow them."""
        yield self.schedule.batch(step)
        if self.config.filter is None:
            return
        batch_s = self.config.collection.batch_s or math.inf
        for number in range(self.config.filter.resample):
            tasks = self.schedule.extra_batch(step, number)
            if tasks and asyncio.get_running_loop().time() < started + batch_s:
                yield tasks

    def _trainable_samples(self, groups: Sequence[Group]) -> list[Sample]:
        """Return the samples of a batch's groups that pass the filter."""
        samples = to_samples(groups)
        if self.config.filter is None:
            return samples
        return filter_samples(samples, self.config.filter)

    def _has_enough_tasks(self, samples: Sequence[Sample]) -> bool:
        """Return True if the samples are of as many tasks as a step has."""
        return len({sample.task for sample in samples}) >= self.config.trainer.tasks_per_step

    def _samples_of_first_tasks(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of as many tasks as a step has; those of further tasks are left out."""
        tasks = list(dict.fromkeys(sample.task for sample in samples))
        trained_tasks = set(tasks[: self.config.trainer.tasks_per_step])
        return [sample for sample in samples if sample.task in trained_tasks]

    async def record_advantages(self, step: int, advantages: TurnAdvantages) -> None:
        """Write the advantages that a step gave its turns, for `mcore-mas show`."""
        write = partial(self.collected.write_advantages, step, advantages)
        await retry_while_full(partial(asyncio.to_thread, write), self.collected.path(step))

    async def _write(
        self, step: int, trajectories: Sequence[Trajectory], *, batches: int, complete: bool
    ) -> None:
        """Write a step's file in a thread.

        This takes seconds for a large step, and the event loop collects other steps meanwhile.
        """
        write = partial(
            self.collected.write, step, trajectories, batches=batches, complete=complete
        )
        await retry_while_full(partial(asyncio.to_thread, write), self.collected.path(step))

    async def _collect(
        self, step: int, tasks: Sequence[Task], started: float, log: CollectionLog
    ) -> list[Group]:
        """Play a batch of tasks, with a greedy trajectory each if an estimator needs it.

        Then judge undecided answers, and let the coach, if there is one, score the turns.

        Args:
            step: number of the step.
            tasks: tasks of the batch.
            started: time at which the step's collection began, on the event loop's clock.
            log: log of the step's finished trajectories.
        """
        if self._needs_greedy():
            groups, greedy_groups = await gather_or_cancel(
                [
                    self._play(step, tasks, started, log),
                    self._play_greedily(step, tasks, started, log),
                ]
            )
            groups = append_greedy(groups, greedy_groups)
        else:
            groups = await self._play(step, tasks, started, log)

        groups = judge_undecided(groups, self.config.collection.max_undecided)
        if self.coach is not None:
            groups = await self._score_by_coach(self.coach, step, groups)
        return groups

    async def _allocate_rewards(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        earlier_groups: Sequence[Group],
        earlier_batches: int,
    ) -> list[Group]:
        """Give every turn a reward.

        Args:
            step: number of the step.
            groups: groups of the batch.
            earlier_groups: groups of the step's earlier batches, which have rewards.
            earlier_batches: number of the step's earlier batches.

        Raises:
            TrainingError: the reward failed. The step's file then also has the trajectories of this
                batch, without rewards, so that the user can look into them.
        """
        allocate = build_allocator(self.config.reward, self.config.agents)
        try:
            rewarded = [allocate(group) for group in groups]
        except (Exception, SystemExit) as error:  # asyncio would end the event loop at sys.exit
            trajectories = all_trajectories([*earlier_groups, *groups])
            # This batch is not counted, so that a restart does not take it for rewarded.
            await self._write(step, trajectories, batches=earlier_batches, complete=False)
            message = str(error) if isinstance(error, RewardError) else self._reward_failure(error)
            raise TrainingError(
                f"{step_label(step)}: {message}; its trajectories are in {self.collected.path(step)} "
                "(`mcore-mas show` prints them)"
            ) from error
        if self._needs_greedy():
            rewarded = [use_greedy_as_baseline(group) for group in rewarded]
        return rewarded

    def _reward_failure(self, error: BaseException) -> str:
        return f"reward '{self.config.reward.name}' raised {describe_with_location(error)}"

    def _needs_greedy(self) -> bool:
        """Return True if an agent's estimator compares with a greedy trajectory."""
        estimators = map(self.config.advantage_of, self.config.agents)
        return any(
            REQUIRED_COLUMN.get(estimator.name) == "greedy_rewards" for estimator in estimators
        )

    async def _play(
        self, step: int, tasks: Sequence[Task], started: float, log: CollectionLog
    ) -> list[Group]:
        """Play each task as a group of `trainer.group_size` trajectories."""
        trainer = self.config.trainer
        options = CollectOptions(
            started=started,
            log=log,
            tree=trainer.branching,
            replays=self.config.replay_plan(step),
            surplus=trainer.surplus,
        )
        return await self._collector(step, options).collect(tasks, trainer.group_size)

    async def _play_greedily(
        self, step: int, tasks: Sequence[Task], started: float, log: CollectionLog
    ) -> list[Group]:
        """Play each task once at temperature 0."""
        options = CollectOptions(
            started=started,
            log=log,
            sampling={"temperature": 0.0},
            quarantine=self.collected.greedy_quarantine,
        )
        return await self._collector(step, options).collect(tasks, 1)

    async def _score_by_coach(
        self, coach: Coach, step: int, groups: Sequence[Group]
    ) -> list[Group]:
        """Let the coach score the turns, watched like a collection."""
        if self.watchdog is None:
            return await coach.score(groups)
        waits = [Wait(description="the coach's scores", since=asyncio.get_running_loop().time())]
        with self.watchdog.over(step_label(step), lambda: waits):
            return await coach.score(groups)

    def _collector(self, step: int, options: CollectOptions) -> Collector:
        """Return a collector for a step, with the options of a collection and those of the run."""
        config = self.config
        options = replace(
            options,
            deadlines=config.collection,
            watchdog=self.watchdog,
            quarantine=options.quarantine or self.collected.quarantine,
            env=config.env.name,
        )
        policies_of = None
        if self.opponents is not None and step != VALIDATION_STEP:
            policies_of = partial(self.opponents.policies_of, step)
        return Collector(
            team=self.team,
            make_env=self.make_env,
            orchestra=config.orchestra.call,
            seed=config.seed,
            step=step,
            options=options,
            policies_of=policies_of,
        )

    async def _check_batch(
        self, step: int, groups: Sequence[Group], *, earlier_batches: int
    ) -> None:
        """Refuse trajectories that the run cannot train on.

        Args:
            step: number of the step.
            groups: groups of the step's batches so far.
            earlier_batches: number of the batches before the latest.

        Raises:
            TrainingError: there is a problem, see `_batch_problem`. The step's file then also has the
                trajectories of the latest batch, so that the user can look into them. A restart
                collects this batch again.
        """
        trajectories = all_trajectories(groups)
        problem = self._batch_problem(step, trajectories)
        if problem:
            await self._write(step, trajectories, batches=earlier_batches, complete=False)
            raise TrainingError(problem)

    def _batch_problem(self, step: int, trajectories: Sequence[Trajectory]) -> str:
        """Return the reason why the run cannot train on a step's trajectories so far, or ""."""
        quarantined = [
            trajectory for trajectory in trajectories if "quarantined" in trajectory.metrics
        ]
        if len(quarantined) > self.config.collection.max_quarantined * len(trajectories):
            first = quarantined[0]
            file = quarantine_path(self.collected.quarantine, step, first.task_id, first.sample)
            return (
                f"{step_label(step)}: {len(quarantined)} of {len(trajectories)} trajectories are "
                "quarantined, more than collection.max_quarantined allows, because your code "
                f"raised an error; the first, {first.title}: {first.error}; mend the code; "
                f"{replay_remedy(self.config, file, 'plays this trajectory again')}"
            )
        if all(trajectory.status is not Status.COMPLETED for trajectory in trajectories):
            first_error = trajectories[0].error
            return (
                f"{step_label(step)}: all {len(trajectories)} trajectories failed; "
                f"the first: {first_error}"
            )
        trained = self.config.trained
        if trained and not any(map(self._has_trained_token, trajectories)):
            return (
                f"{step_label(step)}: no completed trajectory has a sampled token of {', '.join(trained)} that "
                "can be trained on, so the step would change nothing; their turns are missing or masked; see "
                "`mcore-mas show`, which prints the trajectories and marks masked turns"
            )
        return ""

    def _has_trained_token(self, trajectory: Trajectory) -> bool:
        """Return True if a completed trajectory has a token that the loss of a trained policy uses."""
        return trajectory.status is Status.COMPLETED and any(
            turn.policy in self.config.trained and turn.completion_ids and not turn.masked
            for turn in trajectory.turns
        )
