"""Training loop around `step`: validation, reports, checkpoints, and a clean stop on a signal."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from mcore_mas.runtime.checkpoint import CheckpointError, WaitWritten, Write
from mcore_mas.runtime.stop_signal import Abandoned, Stopped
from mcore_mas.training.metrics import StepMetrics
from mcore_mas.training.step import TrainingSession, UpdateBrokenOff, step
from rollout.base.async_tasks import cancel_tasks
from rollout.base.digests import Digest
from rollout.base.restarts import ProcessLost
from rollout.records.trajectory import step_label

# The metric that the best checkpoints are chosen by.
_BEST_BY = "validation/accuracy"


async def train_steps(
    session: TrainingSession, first: int, unreported: Mapping[str, float] | None = None
) -> None:
    """Take all steps from `first`, and save checkpoints.

    A checkpoint is saved every `trainer.checkpoint_every` steps, after a validation that is among
    the best, and after the last step.

    A request to stop cancels a rollout or a validation, because both can be done again, but waits
    for an update. The state after the last finished update is then saved. An urgent request breaks
    off an update that takes too long; then nothing more is saved.

    Args:
        session: parts of the run.
        first: number of the first step to take.
        unreported: metrics of step `first` - 1, if its validation was cancelled by a request to
            stop. The validation is done now.

    Raises:
        TrainingError: raised by a step, or a checkpoint cannot be written.
        ProcessLost: a rank of a trainer has died, or hangs.
        Stopped: the run was told to stop.
    """
    session.stop.listen()
    try:
        await _start(session, first, unreported)
        try:
            for number in range(first, session.config.trainer.steps):
                await _take_step(session, number)
            warning = session.credit_watch.collapse_warning()
            if warning:
                session.logbook.note(warning)
        finally:
            await cancel_tasks(session.rollouts.under_way.values(), session.stop.patience_s)
    except ProcessLost:
        # The checkpoint that is being written may wait for the lost process forever.
        await session.checkpoints.abandon()
        raise
    except BaseException:
        with suppress(CheckpointError, ProcessLost):
            await session.checkpoints.finish()
        raise
    await session.checkpoints.finish()


async def _start(
    session: TrainingSession, first: int, unreported: Mapping[str, float] | None
) -> None:
    """Validate before the first step of a run, or repeat a validation that was cancelled."""
    if unreported is not None:
        metrics = dict(unreported)
        await _validate_and_report(session, first - 1, metrics)
        if _BEST_BY in metrics:
            session.checkpoints.rate(first, metrics[_BEST_BY])
        return

    if first == 0 and session.rollouts.validation:
        try:
            start_metrics = await session.stop.run_until_stopped(_validate(session))
        except Abandoned:
            await _save_and_stop(session, 0)
        session.logbook.report(-1, start_metrics)


async def _take_step(session: TrainingSession, number: int) -> None:
    """Take a step, then validate, report and save a checkpoint if they are due."""
    try:
        metrics = await step(session, number)
    except Abandoned:
        await _save_and_stop(session, number)
    except UpdateBrokenOff:
        await session.checkpoints.finish()
        raise Stopped(
            f"stopped by {session.stop.sender} in the update of {step_label(number)}, which is not "
            f"saved; the same command continues after step {session.checkpoints.newest_step}, and "
            "repeats updates without sampling again"
        ) from None
    await _keep_for_opponents(session, number + 1)
    await _validate_and_report(session, number, metrics)

    if session.after_step is not None:
        goes_on = await session.after_step(number, metrics)
        if not goes_on:
            session.stop.request()

    trainer = session.config.trainer
    steps = number + 1
    accuracy = metrics.get(_BEST_BY)
    is_last = steps == trainer.steps
    if session.stop.requested and not is_last:
        await _save_and_stop(session, steps, accuracy=accuracy)
    is_best = accuracy is not None and session.checkpoints.is_best(accuracy)
    if is_last or is_best or steps % trainer.checkpoint_every == 0:
        await _save(session, steps, accuracy=accuracy)

    if trainer.keep_trajectories is not None:
        # A restart reads the trajectories of all steps since its checkpoint.
        oldest = min(steps - trainer.keep_trajectories, session.checkpoints.newest_step)
        session.rollouts.collected.prune(oldest)


async def _keep_for_opponents(session: TrainingSession, steps: int) -> None:
    """Keep the weights after `steps` steps, if later opponents play with them.

    This comes before the step's checkpoint, so that a restart finds the weights of all steps before it.
    """
    opponents = session.rollouts.opponents
    if opponents is not None:
        await opponents.keep(
            steps, session.groups, oldest_restart=session.checkpoints.oldest_restart
        )


async def _validate_and_report(session: TrainingSession, number: int, metrics: StepMetrics) -> None:
    """Add validation metrics to `metrics` if the step validates, and report them.

    This comes before the step's checkpoint. A step that is taken again replaces its reported row,
    but a row that was never reported would be missing for good.
    """
    if session.rollouts.validation and session.validates_after(number):
        try:
            metrics |= await session.stop.run_until_stopped(_validate(session))
        except Abandoned:
            await _save_and_stop(session, number + 1, unreported=metrics)
    session.logbook.report(number, metrics)


async def _validate(session: TrainingSession) -> StepMetrics:
    """Play the validation tasks; return their metrics, and those of a game's strategy, as validation/NAME."""
    async with session.memory.rollout():
        board = await session.rollouts.validate()
        strategy = await session.rollouts.measure_strategy()
    losses = board.describe_losses()
    if losses:
        session.logbook.note(f"validation: {losses}")
    metrics = board.metrics() | strategy
    return {f"validation/{name}": value for name, value in metrics.items()}


async def _save_and_stop(
    session: TrainingSession,
    steps: int,
    *,
    accuracy: float | None = None,
    unreported: Mapping[str, float] | None = None,
) -> NoReturn:
    """Save the state after `steps` steps, if it is not saved yet, and raise Stopped."""
    if steps == 0:
        raise Stopped(
            f"stopped by {session.stop.sender} before the end of the first step; the same command "
            "starts again"
        )
    await session.checkpoints.finish()
    if not session.checkpoints.has(steps):
        await _save(session, steps, accuracy=accuracy, unreported=unreported)
        await session.checkpoints.finish()
    raise Stopped(
        f"stopped by {session.stop.sender} after step {steps}; the same command continues from its "
        "checkpoint"
    )


async def _save(
    session: TrainingSession,
    steps: int,
    *,
    accuracy: float | None = None,
    unreported: Mapping[str, float] | None = None,
) -> None:
    """Begin a checkpoint of the state after `steps` steps; it is written in the background.

    Args:
        session: parts of the run.
        steps: number of steps taken.
        accuracy: validation accuracy of this state, if known.
        unreported: metrics of the last step, if it was not validated and reported.
    """
    for policy, sync in session.weight_sync.items():
        sync.forget_versions(session.config.staleness_of(policy))
    opponents = session.rollouts.opponents
    state = {
        "kl": {
            policy: asdict(trainer.kl)
            for policy, trainer in session.trainers.items()
            if trainer.kl is not None
        },
        "unreported": unreported,
        "opponents": opponents.ratings if opponents is not None else None,
        "versions": {policy: list(sync.versions) for policy, sync in session.weight_sync.items()},
    }
    await session.checkpoints.save(steps, state, _checkpoint_writer(session), accuracy)


def _checkpoint_writer(session: TrainingSession) -> Write:
    """Return a function that lets all ranks write their part of a checkpoint."""
    groups = session.groups

    async def write(folder: Path) -> WaitWritten:
        await asyncio.gather(*(group.save(folder / name) for name, group in groups.items()))
        return wait_written

    async def wait_written() -> dict[str, Digest]:
        digests: dict[str, Digest] = {}
        results = await asyncio.gather(*(group.wait_written() for group in groups.values()))
        for name, group_digests in zip(groups, results, strict=True):
            for file, digest in group_digests.items():
                digests[f"{name}/{file}"] = digest
        return digests

    return write
