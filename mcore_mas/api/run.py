"""A run of the Python API: the stages of the pipeline on a config that is made from objects."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console

from mcore_mas import resolve_page_paths
from mcore_mas.api.agents import AgentSpec
from mcore_mas.api.arguments import (
    check_given,
    plain_values,
    policy_sections,
    read_settings,
    team_sections,
)
from mcore_mas.api.conversation import Conversation
from mcore_mas.api.references import ArgumentError
from mcore_mas.api.tasks import split_tasks
from mcore_mas.api.training_thread import StepRow, TrainingThread, wait_for_stop
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import MAX_NAME_CHARS
from mcore_mas.pipeline.check import (
    answer_problems,
    machine_problems,
    model_problems,
    task_count_problems,
)
from mcore_mas.pipeline.prepare import check_answers, write_prepared
from mcore_mas.pipeline.prompt_check import prompt_problems
from mcore_mas.pipeline.recipe_check import checkpoint_mismatch
from mcore_mas.reports.turn_advantages import find_turn_advantages
from mcore_mas.runtime.checkpoint import CheckpointError
from mcore_mas.runtime.stop_signal import StopSignal
from rollout.base.files import ensure_writable, write_text
from rollout.base.json_files import read_json_lines
from rollout.base.nested import merged
from rollout.base.terminal import typed_lines
from rollout.config.tasks import check_envs, make_tasks
from rollout.records.files import read_trajectories, write_tasks
from rollout.records.trajectory import Task, Trajectory

_T = TypeVar("_T")
_TASKS_PER_STEP = 8  # default of tasks_per_step
_EXPLAINED_TASKS = 3


class Run:
    """A team, its tasks and its training, in a folder of its own.

    Nothing starts before `train`, `arun`, iteration, `evaluate` or `chat`. These work in scripts,
    in notebooks and inside a running event loop: the training has a thread and an event loop of
    its own, and handles no signals. A training continues from the run's newest checkpoint.

    Args:
        agents: the agents; or the name of a team that ships (`mcore-mas list teams`), with its
            orchestra, environment and reward.
        orchestra: who speaks when: an async function `(task, team, env)`, or the name of one that
            ships.
        tasks: tasks, (prompt, answer) pairs or rows with a prompt, an answer and optionally an id,
            such as those of a data set; a file or hub's id, as `load_tasks` takes it; a mapping of
            splits to any of these; or the `data` section of a config, such as a generator. A tenth
            of train is held out for validation, and another for test, unless they are given.
        policies: a model for all policies, or a model or section for each. A model is a folder, or
            the hub's id of a model that was downloaded.
        env: the environment: a function or class that takes a task, or the name of one that ships.
            By default that of the team, or math.
        reward: a function of a trajectory that returns a number or a number for each agent; a
            function of a `group` that returns the group with rewards on its turns; or the name of
            an allocator that ships (`mcore-mas list allocators`). By default that of the team, or
            shared_outcome.
        folder: folder of the run, for all of its files; its name is the name of the run.
        settings: keys of the trainer and of policies (steps, 20 by default; group_size, 8; lr,
            1e-6); names of groups of configs (advantage="grpo"); sections
            (engine={"max_length": 256}); which agents share weights in a team that ships
            (sharing="separate"); and penalties in addition to the reward.

    Raises:
        ConfigError: a setting is not valid.
        ArgumentError: an argument cannot be used, or this machine cannot train the run.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec] | str,
        orchestra: Callable[..., Any] | str | None = None,
        *,
        tasks: Any = None,
        policies: str | Path | Mapping[str, Any] | None = None,
        env: Callable[..., Any] | str | None = None,
        reward: Callable[..., Any] | str | None = None,
        folder: str | Path = "results/run",
        **settings: Any,
    ) -> None:
        # Settings are read first: an argument of another library, such as TRL's `model`, arrives as a
        # setting, and its error says more than the error about the missing `policies`.
        chosen = read_settings(settings)
        check_given("tasks", tasks)
        check_given("policies", policies)
        self.folder = Path(folder).expanduser()
        _check_folder(self.folder)
        name = self.folder.name

        tasks_by_split: dict[str, list[Task]] = {}
        data = tasks
        tasks_per_step = _TASKS_PER_STEP
        if not _is_data_section(tasks):
            tasks_by_split = split_tasks(tasks)
            data = {split: [str(self._task_file(split))] for split in tasks_by_split}
            tasks_per_step = min(_TASKS_PER_STEP, len(tasks_by_split["train"]))

        chosen.sections["trainer"].setdefault("tasks_per_step", tasks_per_step)
        sections = {
            "run": name,
            "evaluation": {},
            "data": data,
            **team_sections(name, agents, orchestra, env, reward),
            **policy_sections(agents, policies),
        }
        overrides = ["~experiment", f"results={json.dumps(str(self.folder.parent))}"]
        overrides += chosen.choices
        if isinstance(agents, str):
            overrides.append(f"team={agents}")

        self._values = resolve(overrides, sections=plain_values(merged(sections, chosen.sections)))
        default_env = self._values["env"]["name"]
        self._tasks: dict[str, list[Task]] = {}
        for split, user_tasks in tasks_by_split.items():
            self._tasks[split] = [replace(task, env=task.env or default_env) for task in user_tasks]
        self.config = RunConfig.from_values(self._values, f"run '{name}'")
        _check_run(self.config, self._tasks.get("train"))
        self._training: TrainingThread | None = None  # the training of the newest loop

    def _task_file(self, split: str) -> Path:
        """Return the file of the tasks that were given for a split."""
        return self.folder / "given" / f"{split}.parquet"

    def _write_inputs(self, *, trains: bool) -> Path:
        """Check the inputs, then write config and tasks as the pipeline does; return the config's file.

        Nothing is written if a check refuses the run.

        Args:
            trains: True if the run is about to be trained. Its first tasks are then played too.

        Raises:
            ArgumentError, ModelError: see `_check_first_tasks`.
            CheckpointError: the folder has checkpoints of other settings or tasks.
            FolderError: the folder cannot be written.
            RecordError, ValueError: the tasks cannot be read or made, a task lacks an answer, or its
                environment does not exist.
            RetrievalError: the passages cannot be read; the config and the tasks have been written then.
        """
        prepared = self._tasks or make_tasks(self.config.data, self.config.seed)
        check_answers(self.config, prepared)
        check_envs(task for split in prepared.values() for task in split)
        problem = checkpoint_mismatch(self.config, prepared["train"], trains=trains)
        if problem:
            raise CheckpointError(resolve_page_paths(problem))
        if trains:
            self._check_first_tasks(prepared["train"])

        ensure_writable(self.folder)
        config_file = self.folder / "config.yaml"
        for split, tasks in self._tasks.items():
            write_tasks(self._task_file(split), tasks)
        text = yaml.safe_dump(self._values, sort_keys=False, allow_unicode=True, width=120)
        write_text(config_file, text)
        write_prepared(self.config, prepared, self.folder / "tasks")
        return config_file

    def train(self) -> Run:
        """Train to the last step. Ctrl-C stops it with a checkpoint.

        Raises:
            Exception: the error that ended the training, such as a TrainingError.
        """
        for _ in self:
            pass
        return self

    async def arun(self) -> Run:
        """Train to the last step as `train` does, without blocking the running event loop.

        Raises:
            Exception: the error that ended the training, such as a TrainingError.
        """
        async for _ in self:
            pass
        return self

    def __iter__(self) -> Iterator[StepRow]:
        """Train, and yield the metrics of each step; leaving the loop saves a checkpoint.

        Raises:
            Exception: the error that ended the training, such as a TrainingError.
        """
        training = self._start_training()
        try:
            while (row := training.next()) is not None:
                yield row
        except KeyboardInterrupt:
            training.interrupt()
            raise KeyboardInterrupt from None  # without the frames of the wait for a row
        finally:
            training.close()

    async def __aiter__(self) -> AsyncIterator[StepRow]:
        """Train as in `__iter__`, inside a running event loop.

        The checkpoint is saved after a `break` has left the loop.
        """
        training = await asyncio.to_thread(self._start_training)
        try:
            while (row := await asyncio.to_thread(training.next)) is not None:
                yield row
        finally:
            await asyncio.to_thread(training.close)

    def _start_training(self) -> TrainingThread:
        """End the training of an earlier loop, check and write the inputs, and start a training.

        An earlier iterator that a program still holds has no further steps then.
        """
        if self._training is not None:
            # A `break` out of `async for` does not wait until the generator is closed.
            self._training.close()
            self._training.join()
        config_file = self._write_inputs(trains=True)
        self._training = TrainingThread(config_file)
        return self._training

    def _check_first_tasks(self, tasks: Sequence[Task]) -> None:
        """Play the first tasks with empty replies, as `mcore-mas check` does.

        Raises:
            ArgumentError: an agent's prompt leaves no room for its reply, or the user's reward fails.
            ModelError: a tokenizer or a chat template cannot be loaded.
        """
        problems = _call_in_thread(lambda: list(prompt_problems(self.config, tasks)))
        if problems:
            raise ArgumentError(problems[0])

    @property
    def metrics(self) -> list[StepRow]:
        """The metrics of every step so far; `step` counts from 0, and -1 is the validation before training."""
        path = self.folder / "train" / "metrics.jsonl"
        return list(read_json_lines(path)[0]) if path.is_file() else []

    @property
    def trajectories(self) -> list[Conversation]:
        """The trajectories of the newest step."""
        return self.trajectories_of(None)

    def trajectories_of(self, step: int | None) -> list[Conversation]:
        """Return the trajectories of a step, counted from 0, or of the newest one if it is None.

        The list is empty if the step has not been taken, or if its trajectories were not kept.
        """
        file = self._trajectory_file(step)
        if file is None:
            return []
        trajectories = read_trajectories(file)
        advantages = find_turn_advantages(file, trajectories)
        return [Conversation.of(trajectory, advantages) for trajectory in trajectories]

    def _trajectory_file(self, step: int | None) -> Path | None:
        """Return the file of the trajectories of a step, or of the newest one if it is None."""
        files = sorted((self.folder / "train" / "trajectories").glob("step_*.parquet"))
        if step is not None:
            files = [file for file in files if file.stem == f"step_{step:06d}"]
        return files[-1] if files else None

    def explain(
        self,
        advantage: str | None = None,
        *,
        step: int | None = None,
        task: str | None = None,
        **options: Any,
    ) -> None:
        """Print the credit that an estimator assigns to the turns of a step.

        The groups that are compared are printed, and every turn's reward, vote and advantage.

        Args:
            advantage: an estimator (`mcore-mas list estimators`), not necessarily one of the run; by
                default those of the run's config.
            step: step of the training, from 0; by default the newest.
            task: the only task to print, by default the first three.
            options: options of the estimator.

        Raises:
            ArgumentError: no such step was taken, or its trajectories were not kept.
            CreditError: the estimator is unknown, lacks what it needs, or has no such option; or no
                completed turn of the step is of `task`.
        """
        from mcore_mas.reports.credit_terminal import print_credit

        file = self._trajectory_file(step)
        if file is None:
            missing = "no trajectories yet" if step is None else f"no trajectories with step={step}"
            raise ArgumentError(f"{self.folder}: {missing}; they are written when a step is taken")
        console = Console(highlight=False)
        print_credit(file, advantage, options, task, _EXPLAINED_TASKS, console)

    def evaluate(self, k: int = 4, state: str = "trained") -> dict[str, float]:
        """Evaluate the team on the test tasks, and return avg@k, pass@k and maj@k by name.

        There is no maj@k if the environment records no answers, and no score at all if every
        trajectory failed and `evaluation.max_failed` is 1. The scores are in [0, 1], unless the
        outcomes of the user's environment are not.

        Ctrl-C stops the evaluation. Call this method again with the same arguments to go on.

        Args:
            k: samples of each task.
            state: "trained" or "base".

        Raises:
            ArgumentError: k is less than 1.
            ConfigError: there is no such state.
            CheckpointError: the run was trained with other settings or tasks.
            FolderError: the training has not finished, or another process evaluates this state of the
                run.
            PlacementError: there are fewer GPUs than the engines need.
            RemoteError, RetrievalError: a remote model or the retriever cannot be used.
            EvaluationError: too many trajectories failed.
        """
        from mcore_mas.evaluation.evaluate import evaluate

        if k < 1:
            raise ArgumentError(f"k is {k}; expected a number of samples of each task, at least 1")
        self._write_inputs(trains=False)
        evaluation = self.config.evaluation.model_copy(update={"samples": k})
        config = self.config.model_copy(update={"evaluation": evaluation})
        out = self.folder / "evaluation" / f"{state}.json"
        stop = StopSignal(signals=False)
        result = _call_in_thread(lambda: evaluate(config, state, out, stop=stop), stop)
        rows = result["rows"]
        if not rows:
            return {}
        # The last rows are those of the only data source, or of all of them together.
        dataset = rows[-1]["dataset"]
        return {row["metric"]: row["value"] for row in rows if row["dataset"] == dataset}

    def export(self, to: str | Path, policy: str | None = None) -> Path:
        """Export a policy as a Hugging Face folder, and check the folder.

        Args:
            to: folder to write.
            policy: name of the policy, by default the first one that is trained.

        Raises:
            ExportError: there is no such policy, none is trained, nothing is trained yet, `to` is not
                empty, or transformers gives other token ids or log-probabilities.
            ConfigError, ModelError: the run's config or model is missing.
            FolderError: `to` cannot be written, or a file of the finished model is not as training wrote
                it.
        """
        from mcore_mas.evaluation.export import export
        from mcore_mas.evaluation.export_check import ExportError

        if policy is None and not self.config.trained:
            raise ExportError(
                f"{self.folder}: all policies are frozen; set the loss_weight of an agent above 0 to train one"
            )
        name = policy or self.config.trained[0]

        def ignore(line: str) -> None:
            pass  # the notes of an export are for the terminal

        _call_in_thread(lambda: export(self.folder, name, Path(to), note=ignore))
        return Path(to)

    def chat(self, *prompts: str, state: str = "trained") -> list[Conversation]:
        """Have the team play prompts as tasks, and return its conversations.

        If no prompts are given, they are read from the terminal until an empty line or Ctrl-D.

        Args:
            prompts: tasks for the team.
            state: "trained" or "base".

        Raises:
            ConfigError: there is no such state.
            FolderError: the training has not finished.
            PlacementError: there are fewer GPUs than the engines need.
        """
        from mcore_mas.evaluation.converse import converse

        queued: queue.Queue[str] = queue.Queue()
        trajectories = converse(self.config, state, iter(queued.get, None))
        return _converse_in_thread(trajectories, queued, prompts)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {len(self.metrics)} rows of metrics)"

    def _repr_html_(self) -> str:
        from mcore_mas.reports.charts import key_curves

        metrics = self.metrics
        steps = sum(row["step"] >= 0 for row in metrics)
        curves = key_curves({self.config.run: metrics}) if metrics else ""
        folder = escape(str(self.folder))
        return f"<p>{folder}: {steps} of {self.config.trainer.steps} steps</p>{curves}"


def _check_folder(folder: Path) -> None:
    """Raise ArgumentError if a folder's name is too long for a run, or the folder or a parent of it is a file."""
    if len(folder.name) > MAX_NAME_CHARS:
        raise ArgumentError(
            f"folder: {folder.name:.80}… has {len(folder.name)} characters; the name of a run has at "
            f"most {MAX_NAME_CHARS}"
        )
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ArgumentError(f"folder: {path} is a file; name the folder of the run")


def _is_data_section(tasks: Any) -> bool:
    """Return True if tasks are the `data` section of a config."""
    return isinstance(tasks, Mapping) and ("generator" in tasks or "format" in tasks)


def _check_run(config: RunConfig, train: Sequence[Task] | None) -> None:
    """Refuse a run that is known to fail.

    Args:
        config: config of the run.
        train: its training tasks, or None if they are made by a generator or read from files.

    Raises:
        ArgumentError: lists all problems of the machine, the models and the tasks.
    """
    problems = list(machine_problems(config))
    for policy, model in config.models.items():
        problems += model_problems(config, policy, model)
    count = config.data.train if train is None else len(train)
    if isinstance(count, int):
        problems += task_count_problems(config, count)
    if problems:
        raise ArgumentError("; ".join(problems))

    if train:
        problems = list(answer_problems(config.env.name, train))
        if problems:
            raise ArgumentError(problems[0])
        try:
            config.env.check_task(train[0])
        except ValueError as error:
            raise ArgumentError(str(error)) from error


def _call_in_thread(function: Callable[[], _T], stop: StopSignal | None = None) -> _T:
    """Call a function in a thread, where no event loop runs, and return its result.

    Ctrl-C raises KeyboardInterrupt. If `stop` is given, the function is first told to stop, and waited
    for unless code of the team blocks its event loop. Without `stop`, the function goes on in its thread
    until it returns or the program ends.
    """
    future: Future[_T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    # A daemon, so that the program can end while code of the team blocks the thread.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        return future.result()
    except KeyboardInterrupt:
        if stop is not None:
            stop.request_threadsafe(urgent=True)
            wait_for_stop(thread, stop)
        raise KeyboardInterrupt from None  # without the frames of the wait for the future


def _converse_in_thread(
    trajectories: Generator[Trajectory, None, None],
    queued: queue.Queue[str],
    prompts: Sequence[str],
) -> list[Conversation]:
    """Have a team play prompts one by one, in a thread; return the conversations.

    Without `prompts`, they are read from the terminal in the caller's thread, because Ctrl-C
    interrupts that thread, and each conversation is printed.

    Args:
        trajectories: yields the trajectory of each queued prompt.
        queued: queue from which `trajectories` takes its prompts.
        prompts: prompts to play; empty to read them from the terminal.
    """
    conversations: list[Conversation] = []
    is_interactive = not prompts
    with ThreadPoolExecutor(1) as pool:
        try:
            for prompt in prompts or typed_lines("you: "):
                queued.put(prompt)
                trajectory = pool.submit(next, trajectories).result()
                conversations.append(Conversation.of(trajectory, {}))
                if is_interactive:
                    conversations[-1].show()
        finally:
            pool.submit(trajectories.close).result()
    return conversations
