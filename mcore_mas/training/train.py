"""Training of one run from its config: trainers and engines come up, steps are taken, models are written, exported."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_mas.config.credit import cut_off
from mcore_mas.config.models import check_layouts
from mcore_mas.config.run import ConfigError, RunConfig, for_policy
from mcore_mas.equations.divergence import AdaptiveKL
from mcore_mas.megatron.step.trainer_group import TrainerGroup, TrainerTurns
from mcore_mas.planning.tenants import GroupKey
from mcore_mas.training.async_rollout import AsyncRollouts, Schedule
from mcore_mas.training.checkpoint import Checkpoints, Saved, newest
from mcore_mas.training.engine_factory import (
    close_engines,
    make_engines,
    make_players,
    make_renderers,
    open_remotes,
    world,
)
from mcore_mas.training.logbook import open_logbook
from mcore_mas.training.loop import train_steps
from mcore_mas.training.placement import Options, room_for
from mcore_mas.training.policy_trainer import PolicyTrainer, critic_spec, policy_spec
from mcore_mas.training.ray_cleanup import running_ray
from mcore_mas.training.recipe import identity_of
from mcore_mas.training.step import TrainingSession
from mcore_mas.training.weight_sync import Memory, WeightSync, watched
from rollout.base.files import owned, writable, write_json
from rollout.base.task_group import Watchdog
from rollout.config.data import prepared_tasks
from rollout.config.sections import build_team
from rollout.records.trajectory import Task
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
    make_renderers(config, config.models)
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
        stack.enter_context(running_ray(room.cpus, config.cluster.object_store_mb, keep_pages=room.kind == "CPU"))
        places = room.place()
        engine_places = {policy: options for (policy, part), options in places.items() if part == "engine"}
        engines = make_engines(config, config.models, folder / "engines", trained=True, places=engine_places)
        stack.callback(close_engines, engines)
        trainers = _trainers(config, places, saved.get("kl", {}))
        log = stack.enter_context(open_logbook(config, config_path, first, saved.get("mlflow_run")))
        for line in (*warnings, *cut_off(config.agents), *([f"continuing from {found.folder}"] if found else ())):
            log.note(line)
        session = TrainingSession(
            config=config,
            rollouts=AsyncRollouts(
                config=config,
                team=build_team(config.agents, {**make_players(config, engines, config.models), **remotes}),
                orchestra=config.orchestra.call,
                make_env=make_env,
                schedule=Schedule(tasks["train"], config.trainer.tasks_per_step, config.seed),
                validation=tuple(tasks["validation"]),
                folder=folder / "trajectories",
                remotes=remotes,
                coach=coach,
                watchdog=Watchdog(config.collection.stall_s, log.note) if config.collection.stall_s else None,
            ),
            trainers=trainers,
            weight_sync={
                name: WeightSync(trainer.groups[name], engines[name], first=first, sleeps=config.engine.sleep)
                for name, trainer in trainers.items()
            },
            memory=_memory(config, engines, trainers),
            checkpoints=checkpoints,
            logbook=log,
        )
        written = asyncio.run(_train(session, found))
        write_json(folder / "done.json", _done(session, written) | {"devices": room.told})


def _tasks(config: RunConfig) -> dict[str, list[Task]]:
    tasks = {split: prepared_tasks(config.folder / "tasks", split) for split in ("train", "validation")}
    if config.trainer.keep_best and not tasks["validation"]:
        raise ConfigError("trainer.keep_best goes by validation accuracy, but there are no validation tasks; add some")
    return tasks


def _checkpoints(config: RunConfig, folder: Path) -> Checkpoints:
    keep, best = config.trainer.keep_checkpoints, config.trainer.keep_best
    return Checkpoints(folder / "checkpoints", identity_of(config), keep=keep, best=best)


def _trainers(
    config: RunConfig, places: Mapping[GroupKey, Sequence[Options]], kl: Mapping[str, Mapping[str, float]]
) -> dict[str, PolicyTrainer]:
    """A trainer for each policy that trains; `kl` are adaptive coefficients that a checkpoint has."""
    shared: Any = {"threads": config.cluster.threads_per_process}
    shared["turns"] = TrainerTurns() if config.cluster.one_by_one else None
    trainers = {}
    for name in config.trained:
        critic = None
        if (name, "critic") in places:
            spec = critic_spec(name, config)
            critic = TrainerGroup(f"{name}-critic", spec, **shared, places=places[name, "critic"])
        group = TrainerGroup(name, policy_spec(name, config), **shared, places=places[name, "trainer"])
        trainers[name] = PolicyTrainer(
            name, config, group, critic=critic, kl=_adaptive_kl(for_policy(config, name), kl.get(name))
        )
    return trainers


def _adaptive_kl(config: RunConfig, saved: Mapping[str, float] | None) -> AdaptiveKL | None:
    """The coefficient of a policy's KL term if it adapts, as a checkpoint has it or from the start."""
    kl = config.loss.kl
    if kl.target is None:
        return None
    return AdaptiveKL(**saved) if saved else AdaptiveKL(coefficient=kl.coef, target=kl.target, horizon=kl.horizon)


def _memory(config: RunConfig, engines: Mapping[str, Any], trainers: Mapping[str, PolicyTrainer]) -> Memory:
    """Who gives memory away while the team acts, and who while policies are trained."""
    offloaded = [g for name, own in trainers.items() if config.policies[name].offload for g in own.groups.values()]
    return Memory(engines, offloaded, sleeps=config.engine.sleep, one_by_one=config.cluster.one_by_one)


def _done(session: TrainingSession, written: Saved | None) -> dict[str, Any]:
    """What evaluation and export need to know of a finished run: its model folders, and which step's they are."""
    config = session.config
    return {
        "policies": {**config.models, **{name: str(_model(config, name)) for name in session.trainers}},
        "steps": config.trainer.steps,
        "policies_of_step": written.step if written else config.trainer.steps,
        "mlflow_run": session.logbook.tracking_run,
    }


def _model(config: RunConfig, policy: str) -> Path:
    """The folder of a finished policy."""
    return config.folder / "train" / "models" / policy


async def _train(session: TrainingSession, found: Saved | None) -> Saved | None:
    """Train and write the models; the checkpoint they are of, if it is not the last step's."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(session.rollouts.coach or nullcontext())
        for remote in session.rollouts.remotes.values():
            stack.push_async_callback(remote.aclose)
        await asyncio.gather(*(group.ready() for group in session.groups.values()))
        if found:
            await _restore(session, found)
        else:
            await _sync_adapters(session)
        async with watched(session.weight_sync.values()):
            await train_steps(session, found.step if found else 0, found.state["unreported"] if found else None)
        best = session.checkpoints.best(session.logbook.note) if session.config.trainer.final == "best" else None
        if best:
            await _restore(session, best)
        for policy, trainer in session.trainers.items():
            await trainer.groups[policy].write_model(_model(session.config, policy))
        return best


async def _sync_adapters(session: TrainingSession) -> None:
    """Push what starts with a trained adapter, of which its engine has only the base so far."""
    for policy, sync in session.weight_sync.items():
        lora = session.config.policies[policy].lora
        if lora is not None and lora.adapter is not None:
            await sync.push(0)


async def _restore(session: TrainingSession, saved: Saved) -> None:
    for name, group in session.groups.items():
        await group.restore(saved.folder / name)
    for sync in session.weight_sync.values():
        await sync.push(saved.step)


class ExportError(ValueError):
    """Nothing can be exported as asked: one line that says what, where, what to do."""


def export(run: Path, policy: str, to: Path, note: Callable[[str], None], *, adapter: bool = False) -> None:
    """Write `policy` of the run in folder `run` to the folder `to`, which must be empty or not there.

    Args:
        note: told where the weights come from, and of checkpoints that cannot be trusted.
        adapter: write the adapter alone, in PEFT's format, instead of the whole model.

    Raises:
        ExportError: there is no such policy or adapter, `to` holds something, or nothing has been trained yet.
        ConfigError, ModelError: the run's config or model is not there.
    """
    config = RunConfig.load(run / "config.yaml")
    _check(config, run, policy, adapter=adapter)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ExportError(f"{to}: something is there already; name a folder that is empty or not there")
    finished = run / "train" / "models" / policy
    if (run / "train" / "done.json").is_file():
        source = finished / "adapter" if adapter else finished
        note(f"{policy} from {source}")
        shutil.copytree(source, to, dirs_exist_ok=True)
        return
    checkpoints = run / "train" / "checkpoints"
    found = newest(checkpoints, identity_of(config), note) if checkpoints.is_dir() else None
    if found is None:
        raise ExportError(f"{run}: no finished model and no valid checkpoint; train it first")
    note(f"{policy} from {found.folder}")
    _write(config, policy, found.folder / policy, to, adapter=adapter)


def _check(config: RunConfig, run: Path, policy: str, *, adapter: bool) -> None:
    if policy not in config.policies:
        raise ExportError(f"{run}: no policy '{policy}'; policies: {', '.join(config.policies)}")
    if policy not in config.trained:
        raise ExportError(f"{run}: policy '{policy}' is frozen; it is {config.policies[policy].model}")
    if adapter and config.policies[policy].lora is None:
        raise ExportError(f"{run}: policy '{policy}' trains all weights and has no adapter; leave out --adapter")


def _write(config: RunConfig, policy: str, checkpoint: Path, to: Path, *, adapter: bool) -> None:
    from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups
    from mcore_mas.megatron.step.trainer import MegatronTrainer
    from mcore_mas.training.policy_trainer import policy_spec

    spec = policy_spec(policy, config)
    spec = replace(spec, tp=1, pp=1, vpp=1, cp=1, dp=1, sp=False, distributed_optimizer=False, overlap=False)
    to.parent.mkdir(parents=True, exist_ok=True)
    init_process_groups(rank=0, threads=config.cluster.threads_per_process)
    try:
        trainer = MegatronTrainer(spec)
        trainer.restore(checkpoint)
        (trainer.model.write_adapter if adapter else trainer.model.write)(to)
    finally:
        destroy_process_groups()
