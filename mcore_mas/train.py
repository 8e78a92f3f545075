"""One training run from its config: ranks and engines come up, steps are taken, models are written."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ray

from mcore_mas.checkpoint import Checkpoints, Saved
from mcore_mas.config import ConfigError, RunConfig
from mcore_mas.core.kl import AdaptiveKL
from mcore_mas.credit import by_place
from mcore_mas.files import owned, writable, write_json
from mcore_mas.handover import hand_over
from mcore_mas.identity import identity_of
from mcore_mas.layouts import check_layouts
from mcore_mas.loop import train_steps
from mcore_mas.megatron.gang import Gang
from mcore_mas.placement import Options, check_fits, devices_here, kind_here, needed, place, tenants_of
from mcore_mas.progress import Reporter
from mcore_mas.reaper import reaped
from mcore_mas.run import Run, Stopped
from mcore_mas.samples import Sample
from mcore_mas.schedule import Schedule
from mcore_mas.specs import critic_spec, policy_spec
from mcore_mas.traces import Traces, chosen
from mcore_mas.tracking import Journal, Tracker
from mcore_mas.voices import close_engines, make_engines, make_players, open_remotes
from mcore_mas.world import world
from rollout.build import build_orchestra, build_team
from rollout.coach import Coach
from rollout.engines.protocol import TrainedEngine
from rollout.records import Group, read_tasks
from rollout.watchdog import Watchdog

_SHOWN = {"reward": "reward/mean", "accuracy": "validation/accuracy", "tokens/s": "time/tokens_per_s"}


def train(config_path: Path) -> None:
    """Train the run that `config_path` describes, from its newest valid checkpoint if it has one.

    Writes trajectories, metrics.jsonl, checkpoints, one Hugging Face folder per policy and, last, done.json under
    results/{run}/train.

    Raises:
        ConfigError, FolderError, ModelError, PlacementError, RecordError, TrainingError (also a CheckpointError): one
            line each.
    """
    config = RunConfig.load(config_path)
    folder = writable(config.folder / "train")
    check_layouts(config)  # before any process starts
    kind, pool = kind_here(), config.cluster.pool
    tenants = tenants_of(config, kind)
    devices = devices_here(kind, config.cluster.cpus or needed(tenants, pool))
    check_fits(tenants, pool, kind, devices)
    tasks = {split: read_tasks(config.folder / "tasks" / f"{split}.parquet") for split in ("train", "validation")}
    if config.trainer.keep_best and not tasks["validation"]:
        raise ConfigError("trainer.keep_best goes by validation accuracy, but there are no validation tasks; add some")
    schedule = Schedule(tasks["train"], config.trainer.tasks_per_step, config.seed)
    with ExitStack() as stack:
        stack.enter_context(owned(folder))
        checkpoints = Checkpoints(
            folder / "checkpoints",
            identity_of(config),
            keep=config.trainer.keep_checkpoints,
            best=config.trainer.keep_best,
        )
        warnings: list[str] = []
        found = checkpoints.newest(warnings.append)  # before any process starts: this may refuse to go on
        make_env = stack.enter_context(world(config, "train/retriever"))
        # before any child process: its key leaves the environment
        coach = Coach.open(config.coach, folder / "coach") if config.coach else None
        remotes = open_remotes(config, folder / "remotes")
        stack.enter_context(_ray(config, devices if kind == "CPU" else 1))
        places = place(tenants, pool, kind)
        trainers = {name: _gang(name, config, places[name, "trainer"]) for name in config.trained}
        critics = {
            name: _critic(name, config, places[name, "critic"])
            for name in config.trained
            if config.policies[name].critic
        }
        engine_places = {name: places[name, "engine"] for name in config.models if (name, "engine") in places}
        engines = make_engines(config, config.models, folder / "engines", trained=True, places=engine_places)
        stack.callback(close_engines, engines)
        first = found.step if found else 0
        reporter = stack.enter_context(Reporter(f"{config.run} train", config.trainer.steps, first))
        for warning in warnings:
            reporter.note(warning)
        if found:
            reporter.note(f"continuing from {found.folder}")
        tracker = stack.enter_context(_tracker(config, config_path, found.state["mlflow_run"] if found else None))
        journal = Journal(folder / "metrics.jsonl", first)

        traces = stack.enter_context(
            closing(Traces(config.tracking.uri, tracker.experiment_id, tracker.run_id, reporter.note))
        )

        def trace(groups: Sequence[Group], samples: Sequence[Sample]) -> None:
            traces.send(chosen(groups, config.tracking.traces), by_place(samples))

        def report(step: int, metrics: Mapping[str, float]) -> None:
            journal.log(step, metrics)
            tracker.log(step + 1, metrics)
            reporter.step(step + 1, {label: metrics[name] for label, name in _SHOWN.items() if name in metrics})

        run = Run(
            config=config,
            team=build_team(config.agents, {**make_players(config, engines, config.models), **remotes}),
            orchestra=build_orchestra(config.orchestra),
            make_env=make_env,
            schedule=schedule,
            validation=tuple(tasks["validation"]),
            trainers=trainers,
            critics=critics,
            engines=engines,
            remotes=remotes,
            coach=coach,
            checkpoints=checkpoints,
            trajectories=folder / "trajectories",
            models=folder / "models",
            report=report,
            trace=trace,
            kl=_controllers(config, found.state["kl"] if found else {}),
            tracking_run=tracker.run_id,
            handed={name: [first] for name in trainers},
            watchdog=Watchdog(config.collection.stall_s, reporter.note) if config.collection.stall_s else None,
        )
        written = asyncio.run(_coached(run, found, reporter.note))
        policies = {
            name: str(run.models / name) if name in trainers else model for name, model in config.models.items()
        }
        done = {
            "policies": policies,
            "steps": config.trainer.steps,
            "policies_of_step": written.step if written else config.trainer.steps,
            "mlflow_run": tracker.run_id,
        }
        write_json(folder / "done.json", done)


async def _coached(run: Run, found: Saved | None, told: Callable[[str], None]) -> Saved | None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(run.coach or nullcontext())
        for remote in run.remotes.values():
            stack.push_async_callback(remote.aclose)
        return await _train(run, found, told)


async def _train(run: Run, found: Saved | None, told: Callable[[str], None]) -> Saved | None:
    """Train and write the models; the checkpoint they are of, if it is not the last step's."""
    await asyncio.gather(*(gang.ready() for gang in (*run.trainers.values(), *run.critics.values())))
    if found:
        await _restore(run, found)
    else:
        for policy, trainer in run.trainers.items():
            lora = run.config.policies[policy].lora
            if lora is not None and lora.adapter is not None:  # its engine has only the base so far
                await hand_over(trainer, run.engines[policy], 0)
    for policy, trainer in run.trainers.items():
        run.engines[policy].resend = partial(_resend, trainer, run.engines[policy])
    await train_steps(run, found.step if found else 0, found.state["unreported"] if found else None)
    best = run.checkpoints.best(told) if run.config.trainer.final == "best" else None
    if best:
        await _restore(run, best)
    for policy, trainer in run.trainers.items():
        await trainer.write_model(run.models / policy)
    return best


async def _restore(run: Run, saved: Saved) -> None:
    for policy, trainer in run.trainers.items():
        await trainer.restore(saved.folder / policy)
        await hand_over(trainer, run.engines[policy], saved.step)
    for policy, critic in run.critics.items():
        await critic.restore(saved.folder / f"{policy}.critic")


async def _resend(trainer: Gang, engine: TrainedEngine) -> None:
    await hand_over(trainer, engine, engine.version)


def _gang(name: str, config: RunConfig, places: Sequence[Options]) -> Gang:
    return Gang(name, policy_spec(name, config), threads=config.cluster.threads_per_process, places=places)


def _critic(name: str, config: RunConfig, places: Sequence[Options]) -> Gang:
    return Gang(f"{name}-critic", critic_spec(name, config), threads=config.cluster.threads_per_process, places=places)


def _controllers(config: RunConfig, saved: Mapping[str, Mapping[str, float]]) -> dict[str, AdaptiveKL]:
    """The adaptive KL coefficient of each trained policy, as a checkpoint has it or from the start."""
    kl = config.loss.kl
    if kl.target is None:
        return {}
    start = AdaptiveKL(coefficient=kl.coef, target=kl.target, horizon=kl.horizon)
    return {name: AdaptiveKL.from_dict(saved[name]) if name in saved else start for name in config.trained}


@contextmanager
def _ray(config: RunConfig, cpus: int) -> Iterator[None]:
    """A Ray of this run's own, without a dashboard, for the block."""
    # read by Ray when it starts: a run neither joins another's cluster nor reports its use
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (by default Ray's workers give way to all else)
    context = _started(config, cpus)
    with reaped(Path(context.address_info["session_dir"])):
        try:
            yield
        finally:
            ray.shutdown()


def _started(config: RunConfig, cpus: int) -> Any:
    for last in (False, False, True):
        try:
            return ray.init(
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=config.cluster.object_store_mb << 20,
                logging_level="error",
                log_to_driver=False,
            )
        except Exception as error:  # Ray has no type for a machine too busy to start it within its fixed 30 s
            ray.shutdown()
            if last or "timed out during startup" not in str(error):
                raise
    raise AssertionError


@contextmanager
def _tracker(config: RunConfig, config_path: Path, run_id: str | None) -> Iterator[Tracker]:
    tracker = Tracker(
        config.tracking.uri,
        config.tracking.experiment,
        run=config.run,
        params=config.model_dump(mode="json"),
        tags={"config_sha256": hashlib.sha256(config_path.read_bytes()).hexdigest()},
        run_id=run_id,
    )
    try:
        yield tracker
    except (KeyboardInterrupt, Stopped):
        tracker.finish("KILLED")
        raise
    except BaseException:
        tracker.finish("FAILED")
        raise
    tracker.finish("FINISHED")
