"""The training step, written as an algorithm box, and the session of parts that it works with."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_mas.config.run import RunConfig
from mcore_mas.credit.assign import estimate
from mcore_mas.credit.samples import Sample
from mcore_mas.credit.watch import CreditWatch
from mcore_mas.equations.advantages import OWN_TURNS_ONLY
from mcore_mas.runtime.checkpoint import Checkpoints
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.stop_signal import StopSignal
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.tracking.logbook import Logbook
from mcore_mas.training.async_rollout import AsyncRollouts, RolloutBatch
from mcore_mas.training.metrics import (
    StepMetrics,
    credit_metrics,
    describe_lost_trajectories,
    rollout_metrics,
    speed_metrics,
    staleness_metrics,
)
from mcore_mas.training.policy_trainer import PolicyTrainer
from mcore_mas.training.weight_sync import Memory, WeightSync
from rollout.base.async_tasks import gather_or_cancel
from rollout.base.processes import restart_metrics

AfterStep = Callable[
    [int, StepMetrics], Awaitable[bool]
]  # told of each step's metrics; whether to take the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSession:
    """One run's parts, as `train` brings them up."""

    config: RunConfig
    rollouts: AsyncRollouts
    trainers: Mapping[
        str, PolicyTrainer
    ]  # by policy that trains, as are its weights' ways to its engine:
    weight_sync: Mapping[str, WeightSync]
    memory: Memory
    checkpoints: Checkpoints
    logbook: Logbook
    stop: StopSignal = field(default_factory=StopSignal)
    after_step: AfterStep | None = None  # of a run that somebody watches
    credit_watch: CreditWatch = field(default_factory=CreditWatch)

    @property
    def groups(self) -> dict[str, TrainerGroup]:
        """All trainers and critics, by the folder that they have in a checkpoint."""
        return {
            name: group
            for trainer in self.trainers.values()
            for name, group in trainer.groups.items()
        }

    def validates_after(self, step: int) -> bool:
        """Whether the run validates after a step, and traces some of what it played."""
        trainer = self.config.trainer
        return step + 1 == trainer.steps or (step + 1) % trainer.validate_every == 0


async def step(session: TrainingSession, number: int) -> StepMetrics:
    """One training step: roll out, score, assign credit, update every policy, sync its weights.

    Raises:
        Abandoned: the run was told to stop while the team acted.
        TrainingError, CreditError: as its parts.
    """
    began = time.perf_counter()
    config, trainers = session.config, session.trainers
    trained = config.in_turn(number)
    async with session.memory.rollout(trained):  # engines awake, trainers offloaded
        rollouts = await session.stop.run_until_stopped(session.rollouts.take(number))
    collected = time.perf_counter()

    # of other policies, what theirs may be compared with
    seen = [
        s
        for s in rollouts.samples
        if s.policy in trained or config.advantage_of(s.agent).name not in OWN_TURNS_ONLY
    ]
    samples = _with_ages(session, seen)
    batches = {
        policy: trainers[policy].pack(samples, number) for policy in trained
    }  # once per policy
    await gather_or_cancel(
        trainers[policy].score(batches[policy]) for policy in trained
    )  # columns: reference, values
    known = {
        sample.id: sample for own in batches.values() for batch in own for sample in batch.samples
    }
    rules = {name: config.advantage_of(name) for name in config.agents}
    credited = estimate([known.get(sample.id, sample) for sample in samples], rules)
    session.credit_watch.check(config.trainer, number, credited)
    if apart := session.credit_watch.scale_warning(credited, rules):
        session.logbook.note(f"step {number}: {apart}")
    if lost := describe_lost_trajectories(rollouts.groups):
        session.logbook.note(f"step {number}: {lost}")
    if session.validates_after(number):
        session.logbook.trace(rollouts.groups, credited)

    async def learn(policy: str) -> StepMetrics:
        async with session.memory.learning():
            metrics = await trainers[policy].update(batches[policy], credited, number)
            await _settled(session)
            return metrics | await session.weight_sync[policy].push(
                number + 1, changed="grad_norm" in metrics
            )

    updates = dict(zip(trained, await gather_or_cancel(map(learn, trained)), strict=True))
    metrics = _metrics(session, rollouts, credited, updates)
    now = time.perf_counter()
    metrics |= {
        "time/collect_s": collected - began,
        "time/update_s": now - collected,
    } | speed_metrics(updates)
    return metrics | {"time/tokens_per_s": metrics.get("rollout/tokens", 0.0) / (now - began)}


async def _settled(session: TrainingSession) -> None:
    """With `engine.deterministic`, wait until what is collected beside training has been sampled by one version.

    Raises:
        Stopped: the run was told to stop meanwhile. Saved now, the rest would be sampled by the next version.
    """
    if session.config.engine.deterministic and (under_way := session.rollouts.under_way.values()):
        goes_on = "; the same command goes on from the newest checkpoint and from its files"
        await session.stop.run_until_stopped(asyncio.wait(under_way), goes_on)


def _with_ages(session: TrainingSession, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the number of weight updates since they were begun."""
    aged = []
    for sample in samples:
        sync = session.weight_sync.get(sample.policy)
        age = sync.age(sample.version) if sync else 0
        if age > (allowed := session.config.staleness_of(sample.policy)):
            raise TrainingError(
                f"trajectory {sample.trajectory}, turn {sample.turn} ({sample.agent}): sampled by version "
                f"{sample.version} of policy {sample.policy}, which is {age} hand-overs behind; "
                f"its staleness allows {allowed}, and no collection may begin earlier than that"
            )
        aged.append(replace(sample, age=age))
    return aged


def _metrics(
    session: TrainingSession,
    rollouts: RolloutBatch,
    credited: Sequence[Sample],
    updates: Mapping[str, StepMetrics],
) -> StepMetrics:
    metrics = rollout_metrics(rollouts.groups) | credit_metrics(credited)
    metrics |= {f"policy/{policy}/updates": 0.0 for policy in session.trainers}
    if session.config.ahead:
        metrics |= staleness_metrics([sample for sample in credited if sample.policy in updates])
    for policy, own in updates.items():
        metrics |= {
            n if n.startswith("agent/") else f"policy/{policy}/{n}": value
            for n, value in own.items()
        }
    return (
        metrics
        | session.rollouts.metrics()
        | restart_metrics()
        | {"rollout/batches": float(rollouts.batches)}
    )
