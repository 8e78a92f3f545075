"""Training loop around the step: validation, checkpoints, reports, and a clean stop on a signal."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from mcore_mas.runtime.checkpoint import CheckpointError, Write, Written
from mcore_mas.runtime.stop_signal import Abandoned, Stopped
from mcore_mas.training.metrics import StepMetrics
from mcore_mas.training.step import TrainingSession, step
from rollout.base.async_tasks import cancel_tasks
from rollout.base.digests import Digest
from rollout.base.processes import ProcessLost

_BEST_BY = "validation/accuracy"


async def train_steps(
    session: TrainingSession, first: int, unreported: Mapping[str, float] | None = None
) -> None:
    """Take steps `first` up to the configured number, with a checkpoint after every few and after the last.

    A signal to stop ends training with the state after the last finished update saved: a collection or a validation
    under way is abandoned, an update is not.

    Args:
        unreported: metrics of step `first` - 1, whose validation was abandoned.

    Raises:
        TrainingError: the trainer does not see the log-probabilities that the engine sampled with, or a checkpoint
            cannot be written.
        Stopped: one of the signals came.
    """
    session.stop.listen()
    try:
        await _begin(session, first, unreported)
        try:
            for number in range(first, session.config.trainer.steps):
                await _take(session, number)
        finally:
            await cancel_tasks(session.rollouts.under_way.values())
    except ProcessLost:
        await session.checkpoints.abandon()  # who was to write it may hang
        raise
    except BaseException:
        with suppress(CheckpointError, ProcessLost):
            await session.checkpoints.finish()
        raise
    await session.checkpoints.finish()


async def _begin(
    session: TrainingSession, first: int, unreported: Mapping[str, float] | None
) -> None:
    """Make up a validation that was abandoned, or validate what training starts from."""
    if unreported is not None:
        metrics = dict(unreported)
        await _report(session, first - 1, metrics)
        if _BEST_BY in metrics:
            session.checkpoints.rate(first, metrics[_BEST_BY])
    elif first == 0 and session.rollouts.validation:
        try:
            start = await session.stop.run_until_stopped(_validate(session))
        except Abandoned:
            await _leave(session, 0)
        session.logbook.report(-1, start)


async def _take(session: TrainingSession, number: int) -> None:
    """One step, and all that is due after it."""
    trainer, checkpoints = session.config.trainer, session.checkpoints
    try:
        metrics = await step(session, number)
    except Abandoned:
        await _leave(session, number)
    await _report(session, number, metrics)
    if session.after_step and not await session.after_step(number, metrics):
        session.stop.request()
    last = number + 1 == trainer.steps
    if session.stop.requested and not last:
        await _leave(session, number + 1, metrics.get(_BEST_BY))
    best = _BEST_BY in metrics and checkpoints.is_best(metrics[_BEST_BY])
    if last or best or (number + 1) % trainer.checkpoint_every == 0:
        await _save(session, number + 1, metrics.get(_BEST_BY))
    if trainer.keep_trajectories is not None:  # a run that goes on reads those since its checkpoint
        session.rollouts.collected.prune(
            min(number + 1 - trainer.keep_trajectories, checkpoints.newest_step)
        )


async def _report(session: TrainingSession, number: int, metrics: StepMetrics) -> None:
    """Validate, if it is time, and report the step."""
    if session.rollouts.validation and session.validates_after(number):
        try:
            metrics |= await session.stop.run_until_stopped(_validate(session))
        except Abandoned:
            await _leave(session, number + 1, unreported=metrics)
    # before the checkpoint: a step that is taken again drops its row, a lost row is lost
    session.logbook.report(number, metrics)


async def _validate(session: TrainingSession) -> StepMetrics:
    async with session.memory.rollout():
        board = await session.rollouts.validate()
    if lost := board.losses():
        session.logbook.note(f"validation: {lost}")
    return {f"validation/{name}": value for name, value in board.metrics().items()}


async def _leave(
    session: TrainingSession,
    steps: int,
    metric: float | None = None,
    unreported: Mapping[str, float] | None = None,
) -> NoReturn:
    """Save the state after `steps` steps, if it is not yet, and stop."""
    if not steps:
        raise Stopped(
            f"stopped by {session.stop.sender} before the end of the first step; the same command starts again"
        )
    await session.checkpoints.finish()
    if not session.checkpoints.has(steps):
        await _save(session, steps, metric, unreported)
        await session.checkpoints.finish()
    raise Stopped(
        f"stopped by {session.stop.sender} after step {steps}; the same command goes on from its checkpoint"
    )


async def _save(
    session: TrainingSession,
    steps: int,
    metric: float | None,
    unreported: Mapping[str, float] | None = None,
) -> None:
    """Begin the checkpoint of the state after `steps` steps; training goes on while it is written."""
    await session.checkpoints.save(
        steps, _state(session, steps, unreported), _writer(session), metric
    )


def _state(
    session: TrainingSession, steps: int, unreported: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """What a run goes on with after `steps` steps, besides what its ranks write."""
    # which hand-overs turns may be behind that are trained after this
    versions = {
        name: s.versions[-1 - session.config.staleness_of(name) :]
        for name, s in session.weight_sync.items()
    }
    for name, own in versions.items():
        session.weight_sync[name].versions[:] = own
    return {
        "kl": {
            policy: asdict(trainer.kl) for policy, trainer in session.trainers.items() if trainer.kl
        },
        "unreported": unreported,
        "versions": versions,
    }


def _writer(session: TrainingSession) -> Write:
    """What has the ranks write their part of a checkpoint."""
    groups = session.groups

    async def write(folder: Path) -> Written:
        await asyncio.gather(*(group.save(folder / name) for name, group in groups.items()))
        return written

    async def written() -> dict[str, Digest]:
        done = await asyncio.gather(*(group.written() for group in groups.values()))
        return {
            f"{name}/{file}": own[file]
            for name, own in zip(groups, done, strict=True)
            for file in own
        }

    return write
