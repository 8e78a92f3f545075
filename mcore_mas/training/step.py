"""The training step, as the paper's algorithm box reads."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mcore_mas.credit.assign import estimate
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.advantages import NEEDS
from mcore_mas.training.async_rollout import AsyncRollouts, RolloutBatch
from mcore_mas.training.checkpoint import CheckpointError
from mcore_mas.training.metrics import credit_metrics, losses, rollout_metrics, staleness_metrics, validation_metrics
from mcore_mas.training.session import Run, Stopped, TrainingError
from mcore_mas.training.update import score_samples, update
from rollout.base.errors import EngineError
from rollout.base.files import Digest
from rollout.base.task_group import cancel_tasks, together
from rollout.engines.protocol import Tag
from rollout.teams.collect import CollectOptions, collect

T = TypeVar("T")

_BEST_BY = "validation/accuracy"
_VALIDATION = -1  # the step in the seeds of validation trajectories: the same draws every time


async def train_steps(run: Run, first: int, unreported: Mapping[str, float] | None = None) -> None:
    """Take steps `first` up to the configured number, with a checkpoint after every few and after the last.

    SIGTERM or SIGURG ends training with the state after the last finished update saved: a collection or a validation
    under way is abandoned, an update is not.

    Args:
        unreported: metrics of step `first` - 1, whose validation was abandoned.

    Raises:
        TrainingError: the trainer does not see the log-probabilities that the engine sampled with, or a checkpoint
            cannot be written.
        Stopped: one of the signals came.
    """
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGURG):  # the latter can be sent to all processes of a job: others ignore it
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    try:
        if unreported is not None:
            metrics = dict(unreported)
            await _finish(run, told, first - 1, metrics)
            if _BEST_BY in metrics:
                run.checkpoints.rate(first, metrics[_BEST_BY])
        elif first == 0 and run.validation:
            start = await _unless(told, _validate(run))
            if start is None:
                await _leave(run, 0)
            run.report(-1, start)
        async with AsyncRollouts(run) as ahead:
            for step in range(first, run.config.trainer.steps):
                await _step(run, told, step, ahead)
    except BaseException:
        with suppress(CheckpointError):
            await run.checkpoints.finish()
        raise
    await run.checkpoints.finish()


async def _step(run: Run, told: asyncio.Event, step: int, ahead: AsyncRollouts) -> None:
    trainer = run.config.trainer
    began = time.perf_counter()
    acted = await _unless(told, _act(run, step, ahead))
    if acted is None:
        await _leave(run, step)
    metrics = await _learn(run, step, *acted, began)
    await _finish(run, told, step, metrics)
    last = step + 1 == trainer.steps
    if told.is_set() and not last:
        await _leave(run, step + 1, metrics.get(_BEST_BY))
    best = _BEST_BY in metrics and run.checkpoints.is_best(metrics[_BEST_BY])
    if last or best or (step + 1) % trainer.checkpoint_every == 0:
        await _save(run, step + 1, metrics.get(_BEST_BY))


async def _finish(run: Run, told: asyncio.Event, step: int, metrics: dict[str, float]) -> None:
    """Validate, if it is time, and report the step."""
    if run.validation and _looked_at(run, step):
        found = await _unless(told, _validate(run))
        if found is None:
            await _leave(run, step + 1, unreported=metrics)
        metrics |= found
    run.report(step, metrics)  # before the checkpoint: a step that is taken again drops its row, a lost row is lost


async def _unless(told: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` comes to; None if the run was told to stop first, and `work` is abandoned."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await cancel_tasks([working, waiting])


async def _leave(
    run: Run, steps: int, metric: float | None = None, unreported: Mapping[str, float] | None = None
) -> NoReturn:
    """Save the state after `steps` steps, if it is not yet, and stop."""
    if not steps:
        raise Stopped("stopped by a signal before the end of the first step; the same command starts again")
    await run.checkpoints.finish()
    if not run.checkpoints.has(steps):
        await _save(run, steps, metric, unreported)
        await run.checkpoints.finish()
    raise Stopped(f"stopped by a signal after step {steps}; the same command goes on from its checkpoint")


async def _act(run: Run, step: int, ahead: AsyncRollouts) -> tuple[RolloutBatch, list[Sample], float]:
    """Act, reward and filter; let reference and critics score_samples; also the seconds of the former."""
    began = time.perf_counter()
    trained = run.config.in_turn(step)
    async with _acting(run, trained):
        experience = await ahead.take(step)
    collected = time.perf_counter() - began
    samples = _aged(run, _compared(run, experience.samples, trained))
    return experience, await score_samples(run, samples, trained), collected


async def _learn(
    run: Run, step: int, experience: RolloutBatch, samples: Sequence[Sample], collected: float, began: float
) -> dict[str, float]:
    """Estimate advantages and update every policy, side by side; the step's metrics."""
    config = run.config
    trained = config.in_turn(step)
    if lost := losses(experience.groups):
        run.note(f"step {step}: {lost}")
    samples = estimate(samples, {name: config.advantage_of(name) for name in config.agents})
    if _looked_at(run, step):
        run.trace(experience.groups, samples)
    updates = await together(
        update(run, policy, [s for s in samples if s.policy == policy], step) for policy in trained
    )
    metrics = rollout_metrics(experience.groups) | credit_metrics(samples)
    metrics |= {f"policy/{policy}/updates": 0.0 for policy in run.trainers}
    if config.ahead:
        metrics |= staleness_metrics([sample for sample in samples if sample.policy in trained])
    for own in updates:
        metrics |= own
    if run.coach is not None:
        metrics |= run.coach.metrics()
    for policy, remote in run.remotes.items():
        metrics |= {f"policy/{policy}/{name}": value for name, value in remote.metrics().items()}
    elapsed = time.perf_counter() - began
    return metrics | {
        "rollout/batches": float(experience.batches),
        "time/collect_s": collected,
        "time/update_s": elapsed - collected,
        "time/tokens_per_s": metrics.get("rollout/tokens", 0.0) / elapsed,
    }


def _compared(run: Run, samples: Sequence[Sample], trained: Sequence[str]) -> list[Sample]:
    """The samples of the `trained` policies, and those of the others that theirs may be compared with."""
    return [s for s in samples if s.policy in trained or run.config.advantage_of(s.agent).name not in NEEDS]


def _looked_at(run: Run, step: int) -> bool:
    """Whether a step is one of those after which the run validates."""
    trainer = run.config.trainer
    return step + 1 == trainer.steps or (step + 1) % trainer.validate_every == 0


def _aged(run: Run, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the number of weight updates since."""
    aged = []
    for sample in samples:
        sync = run.weight_sync.get(sample.policy)
        age = sync.age(sample.version) if sync else 0
        if age > (allowed := run.config.staleness_of(sample.policy)):
            raise TrainingError(
                f"trajectory {sample.trajectory}, turn {sample.turn} ({sample.agent}): sampled by version "
                f"{sample.version} of policy {sample.policy}, which is {age} hand-overs behind; "
                f"its staleness allows {allowed}, and no collection may begin earlier than that"
            )
        aged.append(replace(sample, age=age))
    return aged


async def _doze(run: Run, trained: Sequence[str]) -> None:
    """With `engine.sleep` engines give memory away while policies are trained; weights only if new ones will come."""
    if run.config.engine.sleep:
        tags: dict[bool, tuple[Tag, ...]] = {True: ("weights", "kv_cache"), False: ("kv_cache",)}
        await asyncio.gather(*(engine.sleep(tags[name in trained]) for name, engine in run.engines.items()))


@asynccontextmanager
async def _acting(run: Run, trained: Sequence[str] = ()) -> AsyncIterator[None]:
    """Inside the block engines have all their memory, and after it, with `engine.sleep`, no more than they must.

    The trainers of policies with `offload` have theirs the other way round. Who takes memory waits until the others
    have given it away: on the same GPUs there is room for one of them. Policies `trained` after the block are handed
    over new weights.
    """
    gangs = [gang for name, gang in (*run.trainers.items(), *run.critics.items()) if run.config.policies[name].offload]
    try:
        await asyncio.gather(*(gang.sleep() for gang in gangs))
        if run.config.engine.sleep:
            await asyncio.gather(*(engine.wake(("kv_cache",)) for engine in run.engines.values()))
        yield
    except BaseException:
        with suppress(EngineError):  # what was abandoned may still be running
            await _doze(run, ())
        raise
    else:
        await _doze(run, trained)
    finally:
        await asyncio.gather(*(gang.wake() for gang in gangs))


async def _validate(run: Run) -> dict[str, float]:
    async with _acting(run):
        groups = await collect(
            run.validation,
            run.team,
            run.make_env,
            run.orchestra,
            group_size=run.config.trainer.validation_samples,
            seed=run.config.seed,
            step=_VALIDATION,
            options=CollectOptions(limits=run.config.collection.limits, watchdog=run.watchdog),
        )
    if lost := losses(groups):
        run.note(f"validation: {lost}")
    return validation_metrics(groups)


async def _save(run: Run, steps: int, metric: float | None, unreported: Mapping[str, float] | None = None) -> None:
    """Begin the checkpoint of the state after `steps` steps; training goes on while it is written."""
    kl = {policy: controller.to_dict() for policy, controller in run.kl.items()}
    state = {"mlflow_run": run.tracking_run, "kl": kl, "unreported": unreported}
    await run.checkpoints.save(steps, state, partial(_write, run), metric)


async def _write(run: Run, folder: Path) -> Awaitable[dict[str, Digest]]:
    gangs = {**run.trainers, **{f"{policy}.critic": critic for policy, critic in run.critics.items()}}
    await asyncio.gather(*(gang.save(folder / name) for name, gang in gangs.items()))

    async def written() -> dict[str, Digest]:
        done = await asyncio.gather(*(gang.written() for gang in gangs.values()))
        return {f"{name}/{file}": digest for name, own in zip(gangs, done, strict=True) for file, digest in own.items()}

    return written()
