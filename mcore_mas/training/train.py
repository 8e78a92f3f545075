"""Training of one run from its config: trainers and engines come up, steps are taken, models are written."""

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_mas import code_commit
from mcore_mas.config.cluster import address_problem
from mcore_mas.config.credit import truncated_sampling_warning
from mcore_mas.config.models import check_layout
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.planning.jobs import object_store_mb
from mcore_mas.planning.machine import hide_gpus_from_cpu_run
from mcore_mas.runtime.checkpoint import Checkpoint, CheckpointError, Checkpoints
from mcore_mas.runtime.cluster import joined_ray
from mcore_mas.runtime.devices import find_devices
from mcore_mas.runtime.engine_factory import make_players, make_renderers, open_remotes, world
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.full_disk import retry_while_full
from mcore_mas.runtime.local_ray import running_ray
from mcore_mas.runtime.recipe import identity_digest, identity_of, input_digests
from mcore_mas.runtime.stop_signal import StopSignal
from mcore_mas.tracking.logbook import Logbook, open_logbook
from mcore_mas.training.async_rollout import AsyncRollouts
from mcore_mas.training.collected_steps import CollectedSteps
from mcore_mas.training.loop import train_steps
from mcore_mas.training.step import AfterStep, TrainingSession
from mcore_mas.training.task_schedule import TaskSchedule
from mcore_mas.training.weight_sync import Memory, WeightSync, watched
from mcore_mas.training.workers import RunWorkers
from rollout.base.digests import tree_sha256
from rollout.base.files import atomic_folder, ensure_writable
from rollout.base.json_files import write_json
from rollout.base.ownership import epoch_of, owned
from rollout.base.processes import ProcessLost, Restarts, forget_restarts
from rollout.base.watchdog import Watchdog
from rollout.config.agents import build_team
from rollout.config.tasks import prepared_tasks
from rollout.engines.remote.caller import RemoteClient
from rollout.environments.protocol import Env
from rollout.records.trajectory import Task
from rollout.rewards.coach import Coach

_NEVER_APPENDED = frozenset(
    {".safetensors", ".parquet"}
)  # written once, so that one copy on the disk is enough
_OF_THE_PROCESS = ("lock.json", "ray", "ranks")


def train(
    config_path: Path,
    address: str | None = None,
    *,
    adopt: bool = False,
    after_step: AfterStep | None = None,
) -> None:
    """Train the run that `config_path` describes, from its newest valid checkpoint if it has one.

    Writes trajectories, metrics.jsonl, checkpoints, one Hugging Face folder per policy and, last, done.json under
    results/{run}/train.

    Args:
        address: of a Ray that runs already; None: as `cluster.address` says.
        adopt: fork a run of another recipe, other inputs or code (see `fork_run`), as with `trainer.resume: changed`.
        after_step: told of each step; stops the run, with a checkpoint, where it says no. Without it signals do.

    Raises:
        Stopped: it was told to stop.
        ClusterError, ConfigError, FolderError, ModelError, PlacementError, RecordError, TrainingError (also a
            CheckpointError): one line each.
    """
    forget_restarts()
    config = RunConfig.load(config_path)
    if adopt:
        config = config.model_copy(
            update={"trainer": config.trainer.model_copy(update={"resume": "changed"})}
        )
    address = address or config.cluster.address
    problem = address_problem(address)
    if problem:
        raise ConfigError(f"--address: {problem}")
    folder, commit = ensure_writable(config.folder / "train"), code_commit()
    tasks = _tasks(config)  # before any process starts, as all that may refuse
    make_renderers(config, config.models)
    devices = find_devices(config) if address == "local" else None
    if not (folder / "lock.json").exists():  # the first start; who lets others in later has his way
        with suppress(PermissionError):  # it is somebody else's
            folder.chmod(0o700)
    with hide_gpus_from_cpu_run(config), ExitStack() as stack:
        stack.enter_context(owned(folder))
        warnings: list[str] = []
        found = (checkpoints := _checkpoints(config)).newest(
            warnings.append
        )  # before any process starts: may refuse
        if found is not None:
            found, line = fork_run(folder, checkpoints, found, config.trainer.steps)
            warnings += [line] if line else []
        # before any child process: their keys leave the environment
        coach = Coach(config.coach, folder / "coach") if config.coach else None
        remotes = open_remotes(config, folder / "remotes")
        make_env = stack.enter_context(world(config, "train/retriever"))
        if devices is None:
            nodes = stack.enter_context(joined_ray(address, folder / "lock.json"))
            devices = find_devices(config, nodes)
        else:
            store, pages = object_store_mb(config), devices.device_type == "CPU"
            own_ray = running_ray(
                devices.ray_cpus,
                store,
                gpus=devices.ray_gpus,
                keep_pages=pages,
                logs=folder / "ray",
            )
            stack.enter_context(own_ray)
        workers = stack.enter_context(closing(RunWorkers(config, devices)))
        stop = StopSignal(signals=after_step is None)
        run = _Run(config, config_path, workers, tasks, coach, remotes, make_env, after_step, stop)
        done = asyncio.run(run.train(found, warnings)) | {"commit": commit}
        write_json(
            folder / "done.json",
            done | {"devices": workers.devices.describe(), "epoch": epoch_of(folder)},
        )


@dataclass(frozen=True)
class _Run:
    """What a training has from its start to its end, however often its trainers start."""

    config: RunConfig
    config_path: Path
    workers: RunWorkers
    tasks: dict[str, list[Task]]
    coach: Coach | None
    remotes: Mapping[str, RemoteClient]
    make_env: Callable[[Task], Env]
    after_step: AfterStep | None
    stop: StopSignal

    async def train(self, found: Checkpoint | None, warnings: Sequence[str]) -> dict[str, Any]:
        """Train from `found`, and again from the newest checkpoint after trainers are lost.

        Returns:
            Content of done.json.
        """
        self.stop.listen()
        restarts, again = Restarts("trainers", self.config.cluster.restarts), False
        async with AsyncExitStack() as stack:
            if self.coach:
                stack.push_async_callback(self.coach.aclose)
            for remote in self.remotes.values():
                stack.push_async_callback(remote.aclose)
            while True:
                self.workers.start(found.state.get("kl", {}) if found else {})
                first_step = found.step if found else 0
                with open_logbook(self.config, self.config_path, first_step) as log:
                    for line in (
                        *warnings,
                        *([f"continuing from {found.folder}"] if found else ()),
                    ):
                        log.note(line)
                    session = self._session(log, found)
                    try:
                        written = await self.workers.run(_train(session, found, again=again))
                        return _done(session, written)
                    except ProcessLost as lost:
                        if not restarts.take():
                            raise TrainingError(
                                f"{lost}; no cluster.restarts left; the same command goes on"
                            ) from lost
                        again, left = True, restarts.left
                        log.note(
                            f"{lost}; trainers start again from the newest checkpoint, {left} restarts left"
                        )
                        await self.workers.recover(lost, log.note)
                warnings = []
                found = _checkpoints(self.config).newest(warnings.append)

    def _session(self, log: Logbook, found: Checkpoint | None) -> TrainingSession:
        config, engines, trainers = self.config, self.workers.engines, self.workers.trainers
        warning = truncated_sampling_warning(config.agents)
        if warning:
            log.note(warning)
        sleeps, state, first = (
            config.engine.sleep,
            found.state if found else {},
            [found.step if found else 0],
        )
        checkpoints = _checkpoints(config)
        versions = state.get("versions", {})
        return TrainingSession(
            config=config,
            rollouts=AsyncRollouts(
                config=config,
                team=build_team(config.agents, {**make_players(config, engines), **self.remotes}),
                make_env=self.make_env,
                schedule=TaskSchedule(
                    self.tasks["train"], config.trainer.tasks_per_step, config.seed
                ),
                validation=tuple(self.tasks["validation"]),
                collected=CollectedSteps(
                    config.folder / "train",
                    recipe=identity_digest(checkpoints.identity),
                    first_step=found.step if found else 0,
                ),
                remotes=self.remotes,
                coach=self.coach,
                watchdog=Watchdog(config.collection.stall_s, log.note)
                if config.collection.stall_s
                else None,
            ),
            trainers=trainers,
            weight_sync={
                name: WeightSync(
                    trainer.groups[name],
                    engines[name],
                    versions=versions.get(name, first),
                    sleeps=sleeps,
                )
                for name, trainer in trainers.items()
            },
            memory=Memory(
                engines, self.workers.offloaded, sleeps=sleeps, one_by_one=config.cluster.one_by_one
            ),
            checkpoints=checkpoints,
            logbook=log,
            stop=self.stop,
            after_step=self.after_step,
        )


def _tasks(config: RunConfig) -> dict[str, list[Task]]:
    """Tasks by split, of a run whose models can be trained as its config says."""
    for name, model in config.models.items():
        check_layout(config, name, Path(model))
    tasks = {
        split: prepared_tasks(config.folder / "tasks", split) for split in ("train", "validation")
    }
    if config.trainer.keep_best and not tasks["validation"]:
        raise ConfigError(
            "trainer.keep_best goes by validation accuracy, but there are no validation tasks; add some"
        )
    return tasks


def _checkpoints(config: RunConfig) -> Checkpoints:
    keep, best = config.trainer.keep_checkpoints, config.trainer.keep_best
    identity = replace(identity_of(config), inputs=input_digests(config))
    return Checkpoints(config.folder / "train" / "checkpoints", identity, keep=keep, best=best)


def _done(session: TrainingSession, written: Checkpoint | None) -> dict[str, Any]:
    """What evaluation and export need to know of a finished run: its model folders, and which step's they are."""
    config = session.config
    return {
        "policies": {
            **config.models,
            **{name: str(_model(config, name)) for name in session.trainers},
        },
        "steps": config.trainer.steps,
        "sha256": {name: tree_sha256(_model(config, name)) for name in session.trainers},
        "policies_of_step": written.step if written else config.trainer.steps,
    }


def _model(config: RunConfig, policy: str) -> Path:
    return config.folder / "train" / "models" / policy


async def _train(
    session: TrainingSession, found: Checkpoint | None, *, again: bool
) -> Checkpoint | None:
    """Train and write the models; the checkpoint they are of, if it is not the last step's.

    Args:
        again: engines may have later weights than those that training starts from.
    """
    await session.stop.run_until_stopped(
        _load(session, found, again=again), " while it was loading; the same command goes on"
    )
    async with watched(session.weight_sync.values()):
        await train_steps(
            session, found.step if found else 0, found.state["unreported"] if found else None
        )
    best = (
        session.checkpoints.best(session.logbook.note)
        if session.config.trainer.final == "best"
        else None
    )
    if best:
        await _restore(session, best)
    for policy, trainer in session.trainers.items():
        model, group = _model(session.config, policy), trainer.groups[policy]
        await retry_while_full(partial(group.write_model, model), model)
    return best


async def _load(session: TrainingSession, found: Checkpoint | None, *, again: bool) -> None:
    await asyncio.gather(*(group.ready() for group in session.groups.values()))
    loras = {policy: session.config.policies[policy].lora for policy in session.weight_sync}
    # of one that starts with an adapter, the engine has the base
    pushed = [
        policy
        for policy, lora in loras.items()
        if found or again or (lora and lora.adapter is not None)
    ]
    if pushed and session.config.engine.sleep:
        async with session.memory.rollout(pushed):
            pass  # what starts to be put to sleep sizes its memory while trainers have none
    if found:
        await _restore(session, found)
        return
    for policy in pushed:
        await session.weight_sync[policy].push(0)


async def _restore(session: TrainingSession, saved: Checkpoint) -> None:
    for name, group in session.groups.items():
        await group.restore(saved.folder / name)
    for policy, sync in session.weight_sync.items():  # by the number that these weights had
        await sync.push(saved.state.get("versions", {}).get(policy, [saved.step])[-1])


def fork_run(
    train: Path, checkpoints: Checkpoints, found: Checkpoint, steps: int
) -> tuple[Checkpoint, str]:
    """Fork the run in `train` if `found`, which it goes on from, is of another recipe or other inputs.

    Killed at any point, it has kept all that there was, and the same command does it again.

    Args:
        steps: of the new recipe.

    Returns:
        What to go on from, and the line that says so; `found` and "" where it is of the run's own recipe.

    Raises:
        CheckpointError: nothing would be trained by the new recipe, whose result this then would be.
        OSError: the old state cannot be kept; nothing has changed.
    """
    changed = checkpoints.differs(found)
    if not changed:
        return found, ""
    if found.step >= steps:
        raise CheckpointError(
            f"{found.folder}: trained with {changed}; trainer.steps is {steps}, so that a fork would train nothing and "
            "be taken for the new recipe's: raise it, or name the run anew"
        )
    taken = (
        int(path.suffix[1:])
        for path in train.parent.glob(f"{train.name}.*")
        if path.suffix[1:].isdecimal()
    )
    kept = train.with_name(f"{train.name}.{max(taken, default=0) + 1}")
    with atomic_folder(kept) as partial:
        for path in train.iterdir():
            if path.is_dir() and path.name not in _OF_THE_PROCESS:
                shutil.copytree(path, partial / path.name, symlinks=True, copy_function=_linked)
            elif path.is_file() and path.name not in _OF_THE_PROCESS:
                _linked(str(path), str(partial / path.name))
    for name in ("mlflow.json", "wandb.id"):
        (train / name).unlink(missing_ok=True)  # a run of its own there, too
    line = f"forked at step {found.step}: {changed}; the run as it was is kept in {kept}"
    return checkpoints.fork(found, found.state, kept.name), line


def _linked(source: str, target: str) -> None:
    with suppress(OSError):  # a file system without links
        if Path(source).suffix in _NEVER_APPENDED:
            os.link(source, target)
            return
    shutil.copy2(source, target)
