"""Training of a run: start its processes, train, and restart after the loss of processes or nodes.

`train` starts Ray, engines, trainers and the retriever. `train_session` takes the steps.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_mas import code_commit
from mcore_mas.config.cluster import address_problem
from mcore_mas.config.credit import truncated_sampling_warning
from mcore_mas.config.models import check_model
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.planning.jobs import object_store_mb
from mcore_mas.planning.machine import hide_gpus_from_cpu_run
from mcore_mas.runtime.checkpoint import Checkpoint, CheckpointError, Checkpoints
from mcore_mas.runtime.checkpoint_manifest import surplus_steps_problem
from mcore_mas.runtime.cluster import joined_ray
from mcore_mas.runtime.devices import RunDevices, find_devices, fit_to_machine
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.input_digests import input_digests
from mcore_mas.runtime.local_ray import running_ray
from mcore_mas.runtime.players import (
    check_teacher_contexts,
    check_teacher_tokenizers,
    make_players,
    make_renderers,
    open_remote_teachers,
    open_remotes,
)
from mcore_mas.runtime.recipe import identity_digest, identity_of
from mcore_mas.runtime.run_environments import open_environments
from mcore_mas.runtime.stop_signal import Stopped, StopSignal
from mcore_mas.tracking.logbook import Logbook, open_logbook
from mcore_mas.training.async_rollout import AsyncRollouts
from mcore_mas.training.collected_steps import CollectedSteps
from mcore_mas.training.colocation import Colocation
from mcore_mas.training.fork import fork_if_changed
from mcore_mas.training.opponents import Opponents
from mcore_mas.training.session import model_folder, train_session
from mcore_mas.training.step import AfterStep, TrainingSession
from mcore_mas.training.task_schedule import TaskSchedule
from mcore_mas.training.teachers import Teachers
from mcore_mas.training.weight_sync import WeightSync
from mcore_mas.training.workers import RunWorkers
from rollout.base.digests import tree_sha256
from rollout.base.errors import EngineError
from rollout.base.files import ensure_writable
from rollout.base.json_files import write_json
from rollout.base.ownership import epoch_of, owned
from rollout.base.restarts import ProcessLost, Restarts, forget_restarts
from rollout.base.watchdog import Watchdog
from rollout.config.agents import build_team
from rollout.config.tasks import prepared_tasks
from rollout.engines.remote.client import RemoteClient
from rollout.engines.remote.scoring import RemoteScorer
from rollout.environments.protocol import Env
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Task
from rollout.rewards.coach import Coach

# Text whose tokens show that the server of a teacher reads token ids as its student does.
_PROBE_TEXT = "The answer to 12 + 30 is 42.\nCheck it, word by word."


def train(
    config_path: Path,
    address: str | None = None,
    *,
    fork: bool = False,
    after_step: AfterStep | None = None,
    stop: StopSignal | None = None,
) -> None:
    """Train the run of a config file, from its newest valid checkpoint if it has one.

    Writes trajectories, metrics.jsonl, checkpoints, a Hugging Face folder for each trained policy
    and, last, done.json into `results`/{run}/train.

    Args:
        config_path: file config.yaml of the run.
        address: address of a running Ray to join; None: `cluster.address` of the config.
        fork: fork a run of another recipe, other inputs or other code (see `fork_if_changed`), as
            with `trainer.resume: changed`.
        after_step: called after every step; training stops with a checkpoint if it returns False.
        stop: request to stop; None: signals stop the run, or only `after_step` if there is one.

    Raises:
        Stopped: the run was told to stop.
        CheckpointError, ClusterError, ConfigError, CreditError, EngineError, FolderError, ModelError,
        PlacementError, RecordError, RemoteError, RetrievalError, TrainingError: with a message of one
        line.
    """
    forget_restarts()
    config = RunConfig.load(config_path)
    if fork:
        trainer = config.trainer.model_copy(update={"resume": "changed"})
        config = config.model_copy(update={"trainer": trainer})
    address = address or config.cluster.address
    problem = address_problem(address)
    if problem:
        raise ConfigError(f"--address: {problem}")

    # The checks that need no other process come first.
    folder = ensure_writable(config.folder / "train")
    commit = code_commit()
    for policy, model in config.models.items():
        check_model(config, policy, Path(model))
    tasks = _load_tasks(config)
    renderers = make_renderers(config, config.models)
    check_teacher_tokenizers(config, renderers)
    check_teacher_contexts(config, renderers)
    devices = None
    warnings: list[str] = []
    if address == "local":
        config, warning = fit_to_machine(config)
        if warning:
            warnings.append(warning)
        devices = find_devices(config)
    _make_private(folder)
    with hide_gpus_from_cpu_run(config), ExitStack() as stack:
        stack.enter_context(owned(folder))
        checkpoints = _open_checkpoints(config)
        checkpoint = checkpoints.recover_newest(warnings.append)
        if checkpoint is not None:
            checkpoint = fork_if_changed(
                folder, checkpoints, checkpoint, config.trainer.steps, warnings.append
            )
            problem = surplus_steps_problem(
                checkpoint.folder, checkpoint.step, config.trainer.steps
            )
            if problem:
                raise CheckpointError(problem)

        # The coach and the remote clients take their keys out of the environment, so that no child
        # process inherits them.
        coach = Coach(config.coach, folder / "coach") if config.coach else None
        remotes = open_remotes(config, folder / "remotes")
        remote_teachers = open_remote_teachers(config)
        make_env = stack.enter_context(open_environments(config, "train/retriever"))
        if devices is None:
            nodes = stack.enter_context(joined_ray(address, folder / "lock.json"))
            devices = find_devices(config, nodes)
        else:
            stack.enter_context(_start_ray(config, devices))
        workers = stack.enter_context(closing(RunWorkers(config, devices)))

        run = _TrainingRun(
            config=config,
            config_path=config_path,
            workers=workers,
            tasks=tasks,
            coach=coach,
            remotes=remotes,
            remote_teachers=remote_teachers,
            renderers=renderers,
            make_env=make_env,
            after_step=after_step,
            stop=stop or StopSignal(signals=after_step is None),
        )
        record = asyncio.run(run.train(checkpoint, warnings))
        record["commit"] = commit
        record["devices"] = workers.devices.describe()
        record["epoch"] = epoch_of(folder)
        write_json(folder / "done.json", record)


@dataclass(frozen=True, kw_only=True)
class _TrainingRun:
    """Parts of a run that outlive its trainers, and are used again when these are restarted."""

    config: RunConfig
    config_path: Path
    workers: RunWorkers
    tasks: dict[str, list[Task]]  # by split
    coach: Coach | None
    remotes: Mapping[str, RemoteClient]
    remote_teachers: Mapping[str, RemoteScorer]
    renderers: Mapping[str, Renderer]
    make_env: Callable[[Task], Env]
    after_step: AfterStep | None
    stop: StopSignal

    async def train(self, checkpoint: Checkpoint | None, warnings: Sequence[str]) -> dict[str, Any]:
        """Train from a checkpoint; after a loss of trainers, train again from the newest one.

        Args:
            checkpoint: checkpoint to continue from; None: the run starts.
            warnings: lines for the log.

        Returns:
            The record for done.json, to which `train` adds commit, devices and epoch.
        """
        self.stop.listen()
        try:
            return await self._train(checkpoint, warnings)
        finally:
            # The end of the event loop would let a signal end the process while Ray shuts down.
            self.stop.finish()

    async def _train(
        self, checkpoint: Checkpoint | None, warnings: Sequence[str]
    ) -> dict[str, Any]:
        restarts = Restarts("trainers", self.config.cluster.restarts)
        is_restarted = False
        async with AsyncExitStack() as stack:
            if self.coach:
                stack.push_async_callback(self.coach.aclose)
            for remote in self.remotes.values():
                stack.push_async_callback(remote.aclose)
            for remote_teacher in self.remote_teachers.values():
                stack.push_async_callback(remote_teacher.aclose)
            await self._check_remote_teachers()

            while True:
                kl_states = checkpoint.state.get("kl", {}) if checkpoint else {}
                self.workers.start(kl_states)
                first_step = checkpoint.step if checkpoint else 0
                with open_logbook(self.config, self.config_path, first_step) as logbook:
                    for warning in warnings:
                        logbook.note(warning)
                    if checkpoint:
                        logbook.note(describe_start(self.config, checkpoint))
                    session = self._make_session(logbook, checkpoint)
                    training = train_session(session, checkpoint, engines_may_be_newer=is_restarted)
                    try:
                        best = await self.workers.run(training)
                        return _done_record(session, best)
                    except Stopped as stopped:
                        self.stop.end_soon(stopped)
                        raise
                    except ProcessLost as lost:
                        if not restarts.take():
                            raise TrainingError(
                                f"{lost}; no cluster.restarts left; run the same command again to "
                                "continue from the newest checkpoint"
                            ) from lost
                        logbook.note(
                            f"{lost}; trainers start again from the newest checkpoint, "
                            f"{restarts.remaining} restarts left"
                        )
                        await self.workers.recover(lost, logbook.note)
                is_restarted = True
                new_warnings: list[str] = []
                checkpoint = _open_checkpoints(self.config).recover_newest(new_warnings.append)
                warnings = new_warnings

    async def _check_remote_teachers(self) -> None:
        """Refuse servers that do not score, or whose tokenizer is not that of their student.

        Raises:
            RemoteError: a server has another tokenizer, or cannot be used.
            TrainingError: a server does not give log-probabilities.
        """
        for student, teacher in self.config.teachers.items():
            if teacher.policy not in self.remote_teachers:
                continue
            renderer = self.renderers[student]
            token_ids = renderer.encode(_PROBE_TEXT)
            try:
                await self.remote_teachers[teacher.policy].check_tokens(
                    token_ids, renderer.token_texts(token_ids)
                )
            except EngineError as error:
                raise TrainingError(f"policies.{student}.teacher: {error}") from None

    def _make_session(self, logbook: Logbook, checkpoint: Checkpoint | None) -> TrainingSession:
        """Connect the parts of the run for training from a checkpoint."""
        config = self.config
        engines = self.workers.engines
        trainers = self.workers.trainers
        warning = truncated_sampling_warning(config.agents)
        if warning:
            logbook.note(warning)

        first_step = checkpoint.step if checkpoint else 0
        versions = checkpoint.state.get("versions", {}) if checkpoint else {}
        checkpoints = _open_checkpoints(config)
        collected = CollectedSteps(
            config.folder / "train",
            recipe=identity_digest(checkpoints.identity),
            first_step=first_step,
        )
        stall_s = config.collection.stall_s
        rollouts = AsyncRollouts(
            config=config,
            team=build_team(config.agents, {**make_players(config, engines), **self.remotes}),
            make_env=self.make_env,
            schedule=TaskSchedule(self.tasks["train"], config.trainer.tasks_per_step, config.seed),
            validation=tuple(self.tasks["validation"]),
            collected=collected,
            remotes=self.remotes,
            opponents=self._make_opponents(checkpoint),
            coach=self.coach,
            watchdog=Watchdog(stall_s, logbook.note) if stall_s else None,
        )
        weight_sync = {
            policy: WeightSync(
                trainer.groups[policy],
                engines[policy],
                versions=versions.get(policy, [first_step]),
                sleeps=config.engine.sleep,
            )
            for policy, trainer in trainers.items()
        }
        memory = Colocation(
            engines,
            self.workers.groups_to_offload,
            sleeps=config.engine.sleep,
            one_by_one=config.cluster.one_by_one,
        )
        return TrainingSession(
            config=config,
            rollouts=rollouts,
            trainers=trainers,
            weight_sync=weight_sync,
            teachers=Teachers(
                config, {**engines, **self.remote_teachers}, self.renderers, logbook.note
            ),
            memory=memory,
            checkpoints=checkpoints,
            logbook=logbook,
            stop=self.stop,
            after_step=self.after_step,
        )

    def _make_opponents(self, checkpoint: Checkpoint | None) -> Opponents | None:
        """Return the opponents of the run, with the ratings of a checkpoint; None without opponents."""
        if not self.config.opponents:
            return None
        ratings = checkpoint.state.get("opponents") if checkpoint else None
        return Opponents(self.config, self.workers.engines, ratings)


def describe_start(config: RunConfig, checkpoint: Checkpoint) -> str:
    """Describe where a run continues from, or that it has finished already."""
    steps = config.trainer.steps
    has_finished = (config.folder / "train" / "done.json").is_file()
    if has_finished and checkpoint.step == steps:
        return (
            f"finished already: step {steps} of {steps}; raise trainer.steps to train more, or name "
            "another run"
        )
    return f"continuing from {checkpoint.folder}"


def _load_tasks(config: RunConfig) -> dict[str, list[Task]]:
    """Load the training and validation tasks, by split.

    Raises:
        ConfigError: there are no validation tasks to choose the best checkpoint by.
        RecordError: the tasks cannot be read.
    """
    tasks = {
        split: prepared_tasks(config.folder / "tasks", split) for split in ("train", "validation")
    }
    needs_best = bool(config.trainer.keep_best) or config.trainer.final == "best"
    if needs_best and not tasks["validation"]:
        raise ConfigError(
            "trainer.keep_best and trainer.final 'best' choose checkpoints by validation accuracy, but "
            "there are no validation tasks; add some"
        )
    return tasks


def _make_private(folder: Path) -> None:
    """Make the folder of a new run readable by its user only.

    Permissions that the user has changed since the first start are kept.
    """
    if not (folder / "lock.json").exists():
        with suppress(PermissionError):  # the folder belongs to another user
            folder.chmod(0o700)


def _start_ray(config: RunConfig, devices: RunDevices) -> AbstractContextManager[None]:
    """Return a context manager that runs a private Ray on the devices of the run."""
    return running_ray(
        devices.ray_cpus,
        object_store_mb(config),
        gpus=devices.ray_gpus,
        keep_pages=devices.device_type == "CPU",
        logs=config.folder / "train" / "ray",
    )


def _open_checkpoints(config: RunConfig) -> Checkpoints:
    identity = replace(identity_of(config), inputs=input_digests(config))
    return Checkpoints(
        config.folder / "train" / "checkpoints",
        identity,
        keep=config.trainer.keep_checkpoints,
        best=config.keep_best,
    )


def _done_record(session: TrainingSession, best: Checkpoint | None) -> dict[str, Any]:
    """Return the record of a finished run, from which evaluation and export find its models.

    Args:
        session: parts of the run.
        best: checkpoint that the models were written from; None: they are those of the last step.
    """
    config = session.config
    trained_models = {policy: model_folder(config, policy) for policy in session.trainers}
    steps = config.trainer.steps
    return {
        "policies": config.models | {policy: str(path) for policy, path in trained_models.items()},
        "steps": steps,
        "sha256": {policy: tree_sha256(path) for policy, path in trained_models.items()},
        "policies_of_step": best.step if best else steps,
    }
