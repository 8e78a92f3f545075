"""Training step, written like the algorithm's pseudocode, and the components that it uses."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_mas.config.run import RunConfig
from mcore_mas.credit.assign import add_advantages, add_teacher_advantages, mean_advantages
from mcore_mas.credit.samples import Sample, TurnId
from mcore_mas.credit.watch import CreditWatch
from mcore_mas.equations.advantages import AGENT_LOCAL_ESTIMATORS
from mcore_mas.runtime.checkpoint import Checkpoints
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.stop_signal import Abandoned, StopSignal
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.tracking.logbook import Logbook
from mcore_mas.training.async_rollout import AsyncRollouts, RolloutBatch
from mcore_mas.training.colocation import Colocation
from mcore_mas.training.metrics import (
    StepMetrics,
    all_trajectories,
    credit_metrics,
    describe_crashed_programs,
    describe_lost_trajectories,
    describe_unheeded,
    rollout_metrics,
    speed_metrics,
    staleness_metrics,
    valid_turn_share,
)
from mcore_mas.training.policy_trainer import PolicyTrainer
from mcore_mas.training.teachers import Teachers
from mcore_mas.training.weight_sync import WeightSync
from rollout.base.async_tasks import gather_or_cancel
from rollout.base.restarts import restart_metrics
from rollout.records.trajectory import step_label

# Callback with the number and the metrics of each step; training stops if it returns False.
AfterStep = Callable[[int, StepMetrics], Awaitable[bool]]


class UpdateBrokenOff(Exception):
    """An update was broken off by an urgent request to stop; the trainers' state is not whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSession:
    """Components of a run that a training step uses; `train` starts them.

    Attributes:
        config: config of the run.
        rollouts: collects trajectories and gives every turn a reward.
        trainers: trainer of each trained policy.
        weight_sync: sends the weights of each trained policy to its engine.
        teachers: score the sampled tokens of their students.
        memory: decides which of trainers and engines hold GPU memory.
        checkpoints: saves and finds checkpoints.
        logbook: reports metrics and traces.
        stop: set by signals that end the run.
        after_step: called after every step, if the caller follows the run.
        credit_watch: checks the advantages of every step.
        unheeded_fields: fields of agent programs' calls that the gateway ignores and that the log
            has named already.
    """

    config: RunConfig
    rollouts: AsyncRollouts
    trainers: Mapping[str, PolicyTrainer]
    weight_sync: Mapping[str, WeightSync]
    teachers: Teachers
    memory: Colocation
    checkpoints: Checkpoints
    logbook: Logbook
    stop: StopSignal = field(default_factory=StopSignal)
    after_step: AfterStep | None = None
    credit_watch: CreditWatch = field(default_factory=CreditWatch)
    unheeded_fields: set[str] = field(default_factory=set)

    @property
    def groups(self) -> dict[str, TrainerGroup]:
        """All trainers and critics, by the name of their folder in a checkpoint."""
        groups: dict[str, TrainerGroup] = {}
        for trainer in self.trainers.values():
            groups |= trainer.groups
        return groups

    def validates_after(self, step: int) -> bool:
        """Return True if the run validates, and traces trajectories, after this step."""
        trainer = self.config.trainer
        return step + 1 == trainer.steps or (step + 1) % trainer.validate_every == 0


async def step(session: TrainingSession, number: int) -> StepMetrics:
    """Take one training step: roll out, score, assign credit, update policies, sync their weights.

    With `trainer.alternate`, one policy is updated; otherwise all trained policies are.

    Raises:
        Abandoned: the run was told to stop during the rollout.
        UpdateBrokenOff: the run was told to stop urgently, and the update took too long.
        Stopped: the run was told to stop while new weights waited (see `_wait_for_collections`).
        TrainingError, CreditError: raised by a part of the step.
    """
    started = time.perf_counter()
    config = session.config
    trained_policies = config.in_turn(number)

    # 1. Roll out, and let teachers score: engines are awake, colocated trainers are offloaded.
    async with session.memory.rollout(trained_policies):
        rollouts = await session.stop.run_until_stopped(session.rollouts.take(number))
        samples = _samples_to_compare(config, rollouts, trained_policies)
        tasks = {group.task.id: group.task for group in rollouts.groups}
        scoring = session.teachers.score(samples, trained_policies, tasks)
        samples = await session.stop.run_until_stopped(scoring)
    collected = time.perf_counter()

    try:
        metrics = await session.stop.run_until_urgent(
            _learn(session, number, rollouts, samples, trained_policies)
        )
    except Abandoned:
        raise UpdateBrokenOff from None

    finished = time.perf_counter()
    metrics["time/collect_s"] = collected - started
    metrics["time/update_s"] = finished - collected
    metrics["time/tokens_per_s"] = metrics.get("rollout/tokens", 0.0) / (finished - started)
    return metrics


async def _learn(
    session: TrainingSession,
    number: int,
    rollouts: RolloutBatch,
    samples: Sequence[Sample],
    trained_policies: Sequence[str],
) -> StepMetrics:
    """Take the rest of a step: score, assign credit, update policies, sync their weights.

    Args:
        session: parts of the run.
        number: number of the step.
        rollouts: all trajectories of the step.
        samples: samples of the trained policies, and those of other policies that their advantages
            are compared with.
        trained_policies: policies that the step trains.
    """
    config = session.config
    trainers = session.trainers

    # 2. Score: split each policy's samples into batches, then compute their reference log-probabilities and values.
    samples = _with_ages(session, samples)
    batches = {
        policy: trainers[policy].make_batches(samples, number) for policy in trained_policies
    }
    await gather_or_cancel(
        trainers[policy].score(batches[policy], session.weight_sync[policy].versions[-1])
        for policy in trained_policies
    )
    # `score` has replaced the samples of the batches. Samples that are only compared with stay as they are.
    scored: dict[TurnId, Sample] = {}
    for policy_batches in batches.values():
        for batch in policy_batches:
            scored |= {sample.id: sample for sample in batch.samples}
    samples = [scored.get(sample.id, sample) for sample in samples]

    # 3. Assign credit.
    estimators = {agent: config.advantage_of(agent) for agent in config.agents}
    credited = add_advantages(samples, estimators)
    credited = add_teacher_advantages(credited, config.teachers)
    valid_share = valid_turn_share(rollouts.groups)
    session.credit_watch.check(config.trainer, number, credited, valid_share)
    _note_warnings(session, number, rollouts, credited)
    await session.rollouts.record_advantages(number, mean_advantages(credited))
    if session.validates_after(number):
        session.logbook.trace(rollouts.groups, credited)

    # 4. Update the policies and sync their weights, side by side.
    async def learn(policy: str) -> StepMetrics:
        async with session.memory.learning():
            metrics = await trainers[policy].update(batches[policy], credited, number)
            await _wait_for_collections(session)
            was_updated = "grad_norm" in metrics
            sync_metrics = await session.weight_sync[policy].push(number + 1, changed=was_updated)
            return metrics | sync_metrics

    results = await gather_or_cancel(map(learn, trained_policies))
    updates = dict(zip(trained_policies, results, strict=True))

    metrics = _step_metrics(session, rollouts, credited, updates)
    if session.rollouts.opponents is not None:
        metrics |= session.rollouts.opponents.record(number, rollouts.groups)
    _note_large_shares(session, number, metrics)
    return metrics | speed_metrics(updates)


def _samples_to_compare(
    config: RunConfig, rollouts: RolloutBatch, trained_policies: Sequence[str]
) -> list[Sample]:
    """Return the samples of the trained policies, and those that they may be compared with."""
    return [
        sample
        for sample in rollouts.samples
        if sample.policy in trained_policies
        or config.advantage_of(sample.agent).name not in AGENT_LOCAL_ESTIMATORS
    ]


def _note_warnings(
    session: TrainingSession, number: int, rollouts: RolloutBatch, credited: Sequence[Sample]
) -> None:
    """Write warnings to the log, for example about idle agents, or steps without an advantage."""
    estimators = {agent: session.config.advantage_of(agent) for agent in session.config.agents}
    watch = session.credit_watch
    agents_of_turns = {
        turn.agent for trajectory in all_trajectories(rollouts.groups) for turn in trajectory.turns
    }
    idle_warning = watch.idle_warning(
        _asked_agents(session.config),
        agents_of_turns,
        is_last=number + 1 == session.config.trainer.steps,
    )
    warnings = [
        idle_warning,
        watch.collapse_warning() if watch.has_just_collapsed else "",
        watch.scale_warning(credited, estimators),
        describe_lost_trajectories(rollouts.groups),
        describe_crashed_programs(rollouts.groups),
        describe_unheeded(rollouts.groups, session.unheeded_fields),
    ]
    for warning in filter(None, warnings):
        session.logbook.note(f"{step_label(number)}: {warning}")


def _asked_agents(config: RunConfig) -> list[str]:
    """Return the agents that the orchestra asks.

    Summarisers are left out: they are idle if no chat becomes full.
    """
    summarisers = {agent.chats.summariser for agent in config.agents.values()}
    return [name for name in config.agents if name not in summarisers]


def _note_large_shares(session: TrainingSession, number: int, metrics: StepMetrics) -> None:
    """Write a warning to the log if one agent has nearly the whole gradient of a shared policy."""
    names = {agent: f"agent/{agent}/gradient_share" for agent in session.config.agents}
    shares = {agent: metrics[name] for agent, name in names.items() if name in metrics}
    warning = session.credit_watch.share_warning(session.config.trainer.watch, shares)
    if warning:
        session.logbook.note(f"{step_label(number)}: {warning}")


async def _wait_for_collections(session: TrainingSession) -> None:
    """With `engine.deterministic`, let collections under way end before the engines get new weights.

    Each of their trajectories is then sampled by one version of the weights.

    Raises:
        Stopped: the run was told to stop meanwhile. No checkpoint of the new weights is saved,
            because a run that continued from it would sample the rest of the collections with them.
    """
    under_way = session.rollouts.under_way.values()
    if session.config.engine.deterministic and under_way:
        message = "; the same command continues from the newest checkpoint and from its files"
        await session.stop.run_until_stopped(asyncio.wait(under_way), message)


def _with_ages(session: TrainingSession, samples: Sequence[Sample]) -> list[Sample]:
    """Set the age of every sample: the number of weight updates since its first token.

    Raises:
        TrainingError: a sample is older than the staleness of its policy allows.
    """
    result = []
    for sample in samples:
        sync = session.weight_sync.get(sample.policy)
        age = sync.age(sample.version) if sync else 0
        allowed = session.config.staleness_of(sample.policy)
        if age > allowed:
            raise TrainingError(
                f"trajectory {sample.trajectory}, turn {sample.turn} ({sample.agent}): sampled by version "
                f"{sample.version} of policy {sample.policy}, which is {age} weight updates old; "
                f"its staleness allows {allowed}, and no collection may begin earlier than that"
            )
        result.append(replace(sample, age=age))
    return result


def _step_metrics(
    session: TrainingSession,
    rollouts: RolloutBatch,
    credited: Sequence[Sample],
    updates: Mapping[str, StepMetrics],
) -> StepMetrics:
    """Merge the metrics of the rollout, the credit and the updates."""
    metrics = rollout_metrics(rollouts.groups) | credit_metrics(credited)
    metrics |= {f"policy/{policy}/updates": 0.0 for policy in session.trainers}
    if session.config.collects_ahead:
        metrics |= staleness_metrics([sample for sample in credited if sample.policy in updates])
    for policy, update_metrics in updates.items():
        for name, value in update_metrics.items():
            key = name if name.startswith("agent/") else f"policy/{policy}/{name}"
            metrics[key] = value
    metrics |= session.rollouts.metrics()
    metrics |= restart_metrics()
    metrics["rollout/batches"] = float(rollouts.batches)
    return metrics
