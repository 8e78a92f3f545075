"""The training step, as the paper's algorithm box reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_mas.checkpoint import Checkpoints
from mcore_mas.config import RunConfig
from mcore_mas.metrics import credit_metrics, rollout_metrics, success
from mcore_mas.packing import pack
from mcore_mas.samples import Sample, estimate, to_samples, weigh
from mcore_mas.schedule import Schedule
from rollout.collect import Orchestra, collect
from rollout.envs.protocol import Env
from rollout.records import Group, Status, Task, write_trajectories
from rollout.registry import lookup
from rollout.rewards import ALLOCATORS
from rollout.team import Team

if TYPE_CHECKING:
    from mcore_mas.megatron.gang import Gang
    from rollout.engines.hosted import HostedEngine

_VALIDATION = -1  # the step in the seeds of validation trajectories: the same draws every time


class TrainingError(RuntimeError):
    """Training cannot go on: one line that says what, where, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything a training step touches."""

    config: RunConfig
    team: Team
    orchestra: Orchestra
    make_env: Callable[[Task], Env]
    schedule: Schedule
    validation: tuple[Task, ...]
    trainers: Mapping[str, Gang]  # by policy
    engines: Mapping[str, HostedEngine]  # by policy
    checkpoints: Checkpoints
    trajectories: Path  # folder of what was collected, a file per step
    models: Path  # folder of the finished policies
    report: Callable[[int, Mapping[str, float]], None]  # told of every finished step
    state: Mapping[str, Any]  # saved with every checkpoint


async def train_steps(run: Run, first: int) -> None:
    """Take steps `first` up to the configured number, with a checkpoint after every few and after the last.

    Raises:
        TrainingError: the trainer does not see the log-probabilities that the engine sampled with.
    """
    trainer = run.config.trainer
    if first == 0 and run.validation:
        run.report(-1, await _validate(run))
    for step in range(first, trainer.steps):
        metrics = await _step(run, step)
        last = step + 1 == trainer.steps
        if run.validation and (last or (step + 1) % trainer.validate_every == 0):
            metrics |= await _validate(run)
        run.report(step, metrics)  # before the checkpoint: a step that is taken again drops its row, a lost row is lost
        if last or (step + 1) % trainer.checkpoint_every == 0:
            await run.checkpoints.save(step + 1, {**run.state, "step": step + 1}, partial(_save, run))


async def _step(run: Run, step: int) -> dict[str, float]:
    config = run.config
    started = time.perf_counter()
    groups = await collect(  # act
        run.schedule.batch(step),
        run.team,
        run.make_env,
        run.orchestra,
        group_size=config.trainer.group_size,
        seed=config.seed,
        step=step,
    )
    groups = [allocate(group, config) for group in groups]  # reward per turn
    write_trajectories(run.trajectories / f"step_{step:06d}.parquet", (t for g in groups for t in g.trajectories))
    _check_progress(step, groups)
    collected = time.perf_counter()
    samples = estimate(  # advantages
        to_samples(groups), config.advantage.name, eps=config.advantage.eps, lone=config.advantage.lone
    )
    samples = weigh(samples, {name: agent.loss_weight for name, agent in config.agents.items()})
    updates = await asyncio.gather(  # one per policy, side by side
        *(_update(run, policy, [s for s in samples if s.policy == policy], step + 1) for policy in run.trainers)
    )
    metrics = rollout_metrics(groups) | credit_metrics(samples)
    for update in updates:
        metrics |= update
    done = time.perf_counter()
    return metrics | {
        "time/collect_s": collected - started,
        "time/update_s": done - collected,
        "time/tokens_per_s": metrics.get("rollout/tokens", 0.0) / (done - started),
    }


def allocate(group: Group, config: RunConfig) -> Group:
    """The group with a reward on every turn, by the configured allocator."""
    return lookup("reward", config.reward.name, ALLOCATORS)(group, **config.reward.options)


async def _update(run: Run, policy: str, samples: list[Sample], version: int) -> dict[str, float]:
    """Train one policy on its samples, and hand its new weights to its engine."""
    trainer, engine = run.trainers[policy], run.engines[policy]
    # a zero advantage has a zero gradient: leaving it out changes nothing but the time, as its tokens are in the
    # denominator already
    samples = [sample for sample in samples if sample.advantage]
    if not samples:
        return {f"policy/{policy}/skipped_updates": 1.0}
    metrics = await trainer.update(pack(samples, run.config.trainer.microbatch_tokens))
    _check_agreement(run, policy, metrics)
    started = time.perf_counter()
    await engine.load_weights_from(await trainer.export(), version)
    metrics["hand_over_s"] = time.perf_counter() - started
    return {name if name.startswith("agent/") else f"policy/{policy}/{name}": value for name, value in metrics.items()}


def _check_progress(step: int, groups: Sequence[Group]) -> None:
    trajectories = [t for group in groups for t in group.trajectories]
    if all(t.status is Status.FAILED for t in trajectories):
        raise TrainingError(
            f"step {step}: all {len(trajectories)} trajectories failed; the first: {trajectories[0].error}"
        )


def _check_agreement(run: Run, policy: str, metrics: Mapping[str, float]) -> None:
    tolerance = run.config.trainer.logprob_tolerance
    for name, gap in metrics.items():
        if name.endswith("/logprob_gap_max") and gap > tolerance:
            raise TrainingError(
                f"policy {policy}, {name.removesuffix('/logprob_gap_max')}: the trainer's log-probabilities differ "
                f"from the engine's by {gap:.2e}, more than trainer.logprob_tolerance {tolerance:.0e}; engine and "
                "trainer do not hold the same weights"
            )


async def _validate(run: Run) -> dict[str, float]:
    groups = await collect(
        run.validation,
        run.team,
        run.make_env,
        run.orchestra,
        group_size=run.config.trainer.validation_samples,
        seed=run.config.seed,
        step=_VALIDATION,
    )
    accuracy, legal = success(groups)
    return {"validation/accuracy": accuracy, "validation/valid_ratio": legal}


async def _save(run: Run, folder: Path) -> None:
    for policy, trainer in run.trainers.items():
        await trainer.save(folder / policy)
