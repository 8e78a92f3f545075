"""Training of one run from its config: trainers and engines come up, steps are taken, models are written."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.equations.kl import AdaptiveKL
from mcore_mas.megatron.step.trainer_group import TrainerGroup
from mcore_mas.training.checkpoint import Checkpoints, Saved, identity_of
from mcore_mas.training.engine_factory import close_engines, make_engines, make_players, open_remotes, world
from mcore_mas.training.logbook import open_logbook
from mcore_mas.training.placement import Options, Part, Place, room_for
from mcore_mas.training.ray_cleanup import reaped
from mcore_mas.training.schedule import Schedule
from mcore_mas.training.session import Run
from mcore_mas.training.step import train_steps
from mcore_mas.training.trainer_specs import check_layouts, critic_spec, policy_spec
from mcore_mas.training.weight_sync import WeightSync, watched
from rollout.base.files import owned, writable, write_json
from rollout.base.watchdog import Watchdog
from rollout.config.build import build_orchestra, build_team
from rollout.records.trajectory import Task, read_tasks
from rollout.rewards.coach import Coach


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
    room = room_for(config)
    tasks = _tasks(config)
    with ExitStack() as stack:
        stack.enter_context(owned(folder))
        checkpoints = _checkpoints(config, folder)
        warnings: list[str] = []
        found = checkpoints.newest(warnings.append)  # before any process starts: this may refuse to go on
        first, saved = (found.step, found.state) if found else (0, {})
        # before any child process: their keys leave the environment
        coach = Coach.open(config.coach, folder / "coach") if config.coach else None
        remotes = open_remotes(config, folder / "remotes")
        make_env = stack.enter_context(world(config, "train/retriever"))
        stack.enter_context(_ray(config, room.cpus))
        places = room.place()
        trainers = _gangs("trainer", config, places)
        critics = _gangs("critic", config, places)
        engine_places = {policy: options for (policy, part), options in places.items() if part == "engine"}
        engines = make_engines(config, config.models, folder / "engines", trained=True, places=engine_places)
        stack.callback(close_engines, engines)
        log = stack.enter_context(open_logbook(config, config_path, first, saved.get("mlflow_run")))
        for line in (*warnings, *([f"continuing from {found.folder}"] if found else ())):
            log.note(line)
        run = Run(
            config=config,
            team=build_team(config.agents, {**make_players(config, engines, config.models), **remotes}),
            orchestra=build_orchestra(config.orchestra),
            make_env=make_env,
            schedule=Schedule(tasks["train"], config.trainer.tasks_per_step, config.seed),
            validation=tuple(tasks["validation"]),
            trainers=trainers,
            critics=critics,
            engines=engines,
            remotes=remotes,
            coach=coach,
            checkpoints=checkpoints,
            trajectories=folder / "trajectories",
            models=folder / "models",
            report=log.report,
            trace=log.trace,
            kl=_controllers(config, saved.get("kl", {})),
            tracking_run=log.tracking_run,
            weight_sync={name: WeightSync(group, engines[name], first=first) for name, group in trainers.items()},
            note=log.note,
            watchdog=Watchdog(config.collection.stall_s, log.note) if config.collection.stall_s else None,
        )
        written = asyncio.run(_coached(run, found, log.note))
        write_json(folder / "done.json", _done(run, written))


def _tasks(config: RunConfig) -> dict[str, list[Task]]:
    tasks = {split: read_tasks(config.folder / "tasks" / f"{split}.parquet") for split in ("train", "validation")}
    if config.trainer.keep_best and not tasks["validation"]:
        raise ConfigError("trainer.keep_best goes by validation accuracy, but there are no validation tasks; add some")
    return tasks


def _checkpoints(config: RunConfig, folder: Path) -> Checkpoints:
    keep, best = config.trainer.keep_checkpoints, config.trainer.keep_best
    return Checkpoints(folder / "checkpoints", identity_of(config), keep=keep, best=best)


def _gangs(part: Part, config: RunConfig, places: Mapping[Place, Sequence[Options]]) -> dict[str, TrainerGroup]:
    """By policy, the ranks of those that have this part."""
    spec_of, suffix = {"trainer": (policy_spec, ""), "critic": (critic_spec, "-critic")}[part]
    threads = config.cluster.threads_per_process
    return {
        name: TrainerGroup(f"{name}{suffix}", spec_of(name, config), threads=threads, places=places[name, part])
        for name in config.trained
        if (name, part) in places
    }


def _done(run: Run, written: Saved | None) -> dict[str, Any]:
    """What evaluation and export need to know of a finished run: its model folders, and which step's they are."""
    config = run.config
    trained = {name: str(run.models / name) for name in run.trainers}
    return {
        "policies": {**config.models, **trained},
        "steps": config.trainer.steps,
        "policies_of_step": written.step if written else config.trainer.steps,
        "mlflow_run": run.tracking_run,
    }


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
        for policy in run.trainers:
            lora = run.config.policies[policy].lora
            if lora is not None and lora.adapter is not None:  # its engine has only the base so far
                await run.weight_sync[policy].push(0)
    async with watched(run.weight_sync.values()):
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
        await run.weight_sync[policy].push(saved.step)
    for policy, critic in run.critics.items():
        await critic.restore(saved.folder / f"{policy}.critic")


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
