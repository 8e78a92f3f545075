"""A run of the Python API: the pipeline's own stages on a config made from objects."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from rich.console import Console

from mcore_mas.api.objects import (
    AgentSpec,
    Conversation,
    TaskError,
    known_here,
    pure,
    reward_section,
    split_tasks,
)
from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import GROUPS
from mcore_mas.config.policy import PolicyConfig
from mcore_mas.config.run import RunConfig
from mcore_mas.config.trainer import TrainerConfig
from mcore_mas.pipeline.check import machine_problems, model_problems, too_few
from mcore_mas.pipeline.prepare import prepare_tasks
from rollout.base.files import write_text
from rollout.base.json_files import read_json_lines
from rollout.base.nested import merged
from rollout.base.processes import say
from rollout.base.text import nearest_hint
from rollout.records.files import read_trajectories, write_tasks
from rollout.records.trajectory import Task, Trajectory

StepRow = dict[str, float]  # a step's metrics by name, with the number of the step
_T = TypeVar("_T")
_ARGUMENTS = (
    "data",
    "env",
    "orchestra",
    "policies",
    "reward",
)  # of Run itself, that are no sections
_COLLECTED = 8  # tasks of a step, where it is not said


class Run:
    """A team, its tasks and how it learns, in a folder of its own; training goes on from its newest checkpoint.

    Nothing is started before `train`, `arun`, iteration, `evaluate` or `chat`. These work in scripts, in notebooks and
    inside a running event loop: the training has a thread and a loop of its own, and takes no signals.

    Args:
        agents: who can act; or the name of a team that ships, with its orchestra, environment and reward
            (docs/catalogue.md).
        orchestra: who speaks when: an async function `(task, team, env)`, or the name of one that ships.
        tasks: tasks, (prompt, answer) pairs or rows with a prompt and an answer, also those of a data set; a file or
            hub's id, as `load_tasks` takes it; a mapping of splits to them; or the `data` section of a config, such as
            a generator. Of train a tenth is held out for each of validation and test that is not given.
        policies: a model for all policies, or a model or section for each: a folder, or the hub's id of a model that
            was downloaded.
        env: the environment: a function or class that takes a task, or the name of one that ships. By default the
            team's, or math.
        reward: of a trajectory, a number or a number for each agent; of a `group`, the group with rewards on its turns;
            or the name of an allocator that ships. By default the team's, or shared_outcome.
        folder: of the run; all that it writes lies there.
        settings: keys of the trainer and of policies (steps, 20 by default; group_size, 8; lr, 1e-6), names of groups
            of configs (advantage="grpo"), sections (engine={"max_length": 256}), who shares weights in a team that
            ships (sharing="separate"), and penalties beside the reward.

    Raises:
        ConfigError, TaskError: something does not fit; says what, where, expected, what to do.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec] | str,
        orchestra: Callable[..., Any] | str | None = None,
        *,
        tasks: Any,
        policies: str | Path | Mapping[str, Any],
        env: Callable[..., Any] | str | None = None,
        reward: Callable[..., Any] | str | None = None,
        folder: str | Path = "results/run",
        **settings: Any,
    ) -> None:
        self.folder = Path(folder).expanduser()
        name = self.folder.name
        is_section = isinstance(tasks, Mapping) and (
            "generator" in tasks or "format" in tasks
        )  # `data` of a config
        given = {} if is_section else split_tasks(tasks)
        most = min(_COLLECTED, len(given["train"])) if given else _COLLECTED
        chosen, sections = _settings(settings, most)
        team = _team(name, agents, orchestra, env, reward)
        own = {
            "run": name,
            "evaluation": {},
            "data": {s: [str(self._given(s))] for s in given} or tasks,
        }
        own |= {**team, **_policies(agents, policies)}
        chosen += [f"team={agents}"] if isinstance(agents, str) else []
        overrides = ["~experiment", f"results={json.dumps(str(self.folder.parent))}", *chosen]
        self._values = resolve(overrides, own=pure(merged(own, sections)))
        world = self._values["env"]["name"]
        self._tasks = {
            split: [replace(t, env=t.env or world) for t in tasks] for split, tasks in given.items()
        }
        self.config = _checked(self._values, f"run '{name}'", self._tasks)
        self._steps: _Steps | None = None  # of the newest loop

    def _given(self, split: str) -> Path:
        return self.folder / "given" / f"{split}.parquet"

    def _prepared(self) -> Path:
        """The resolved config, written with the run's tasks as the pipeline does."""
        file = self.folder / "config.yaml"
        for split, tasks in self._tasks.items():
            write_tasks(self._given(split), tasks)
        write_text(
            file, yaml.safe_dump(self._values, sort_keys=False, allow_unicode=True, width=120)
        )
        prepare_tasks(file, self.folder / "tasks")
        return file

    def train(self) -> Run:
        """Train to the last step; Ctrl-C ends it with a checkpoint."""
        for _ in self:
            pass
        return self

    async def arun(self) -> Run:
        """Train to the last step, while the running event loop goes on."""
        async for _ in self:
            pass
        return self

    def __iter__(self) -> Iterator[StepRow]:
        """Each step's metrics as it is taken. Who leaves the loop stops the training, with a checkpoint."""
        steps = self._begin()
        try:
            while (row := steps.next()) is not None:
                yield row
        finally:
            steps.close()

    async def __aiter__(self) -> AsyncIterator[StepRow]:
        """As `__iter__`, inside a running event loop; the checkpoint is saved behind a `break`."""
        steps = await asyncio.to_thread(self._begin)
        try:
            while (row := await asyncio.to_thread(steps.next)) is not None:
                yield row
        finally:
            await asyncio.to_thread(steps.close)

    def _begin(self) -> _Steps:
        """The training from its newest checkpoint on, once that of an earlier loop has ended and saved."""
        if self._steps is not None:  # `break` does not wait where the loop is an `async for`
            self._steps.close()
        self._steps = _Steps(self._prepared())
        return self._steps

    @property
    def metrics(self) -> list[StepRow]:
        """The metrics of every step so far; step -1 is the validation before training."""
        path = self.folder / "train" / "metrics.jsonl"
        return list(read_json_lines(path)[0]) if path.is_file() else []

    @property
    def trajectories(self) -> list[Conversation]:
        """The trajectories of the newest step."""
        return self.trajectories_of(None)

    def trajectories_of(self, step: int | None) -> list[Conversation]:
        """The trajectories of a step, of the newest with None; [] before there is one."""
        from mcore_mas.reports.terminal import credit_of

        file = self._recorded(step)
        found = read_trajectories(file) if file else []
        advantages = credit_of(file, found)[0] if file else {}
        return [Conversation.of(trajectory, advantages) for trajectory in found]

    def _recorded(self, step: int | None) -> Path | None:
        """The file of a step's trajectories, of the newest with None; None before there is one."""
        files = sorted((self.folder / "train" / "trajectories").glob("step_*.parquet"))
        return next(
            (file for file in files[::-1] if step is None or file.stem == f"step_{step:06d}"), None
        )

    def explain(
        self,
        advantage: str = "drmas",
        *,
        step: int | None = None,
        task: str | None = None,
        **options: Any,
    ) -> None:
        """Print the credit that an estimator gives a step's turns: who was compared with whom, and every advantage.

        Args:
            advantage: an estimator (`mcore-mas list estimators`), whichever the run was trained with.
            step: of the training, by default the newest.
            task: only this one; by default the first three.
            options: of the estimator.

        Raises:
            TaskError: no such step was taken.
            CreditError: the estimator is unknown, lacks what it needs, or has no such option.
        """
        from mcore_mas.reports.terminal import print_credit

        if (file := self._recorded(step)) is None:
            raise TaskError(f"{self.folder}: no trajectories of step {step or 0}; train it first")
        print_credit(file, advantage, options, task, 3, Console(highlight=False))

    def evaluate(self, k: int = 4, state: str = "trained") -> dict[str, float]:
        """Scores on the test tasks: avg@k, pass@k and maj@k, of the `trained` team or the `base` one.

        Ctrl-C ends it; the same call goes on from what was played.

        Raises:
            FolderError: the training has not finished.
            EvaluationError: too much failed for a score.
        """
        from mcore_mas.evaluation.evaluate import evaluate
        from mcore_mas.runtime.stop_signal import StopSignal

        self._prepared()
        section = self.config.evaluation.model_copy(update={"samples": k})
        config = self.config.model_copy(update={"evaluation": section})
        out = self.folder / "evaluation" / f"{state}.json"
        stop = StopSignal(signals=False)
        rows = _apart(lambda: evaluate(config, state, out, stop=stop), stop.request_threadsafe)[
            "rows"
        ]
        return {
            row["metric"]: row["value"] for row in rows if row["dataset"] == rows[-1]["dataset"]
        }

    def export(self, to: str | Path, policy: str | None = None) -> Path:
        """Write a policy, the only one if it is not named, as a Hugging Face folder that was checked.

        Raises:
            ExportError: there is no such policy, nothing is trained yet, or `to` holds something.
        """
        from mcore_mas.evaluation.export import export

        _apart(
            lambda: export(
                self.folder, policy or self.config.trained[0], Path(to), lambda line: None
            )
        )
        return Path(to)

    def chat(self, *prompts: str, state: str = "trained") -> list[Conversation]:
        """Have the team play what you ask of it; without prompts it asks for them, until an empty line or Ctrl-D."""
        from mcore_mas.evaluation.evaluate import converse

        told: queue.Queue[str] = queue.Queue()
        return _talk(converse(self.config, state, iter(told.get, None)), told, prompts)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {len(self.metrics)} rows of metrics)"

    def _repr_html_(self) -> str:
        from mcore_mas.reports.charts import key_curves

        metrics = self.metrics
        steps = f"{sum(row['step'] >= 0 for row in metrics)} of {self.config.trainer.steps} steps"
        return f"<p>{escape(str(self.folder))}: {steps}</p>{key_curves({self.config.run: metrics}) if metrics else ''}"


def _team(run: str, agents: Any, orchestra: Any, env: Any, reward: Any) -> dict[str, Any]:
    """Sections that these arguments of `Run` stand for; a team that ships has what is None."""
    sections: dict[str, Any] = {}
    if not isinstance(agents, str):
        if (
            not isinstance(agents, Sequence)
            or not agents
            or not all(isinstance(agent, AgentSpec) for agent in agents)
        ):
            raise TaskError(
                f"agents: {agents!r:.80}; expected a list of AgentSpec, or the name of a team that ships"
            )
        for name, times in Counter(agent.name for agent in agents).items():
            if times > 1:
                raise TaskError(f"agents: '{name}' is there twice; expected different names")
        if orchestra is None:
            raise TaskError(
                "orchestra is missing; expected an async function (task, team, env), or a name that ships"
            )
        sections["agents"] = {agent.name: agent.section(run) for agent in agents}
        env, reward = env or "math", reward or "shared_outcome"
    for key, given in (("orchestra", orchestra), ("env", env)):
        if given is not None:
            sections[key] = {"name": known_here(given, f"{run}.{key}")}
    if reward is not None:
        sections["reward"] = reward_section(reward, f"{run}.reward")
    return sections


def _checked(
    values: Mapping[str, Any], where: str, tasks: Mapping[str, Sequence[Task]]
) -> RunConfig:
    """The config of these values, for `tasks` by split, of which nothing is known to fail."""
    config = RunConfig.check(values, where)
    wrong = [*machine_problems(config)]
    for policy, model in config.models.items():
        wrong += model_problems(config, policy, model)
    train = len(tasks["train"]) if tasks else config.data.train
    wrong += too_few(config, train) if isinstance(train, int) else ()
    if wrong:
        raise TaskError("; ".join(wrong))
    try:
        for task in tasks.get("train", ())[:1]:
            config.env.check_made(task)
    except ValueError as error:
        raise TaskError(str(error)) from error
    return config


def _policies(
    agents: Sequence[AgentSpec] | str, given: str | Path | Mapping[str, Any]
) -> dict[str, Any]:
    """Sections for policies of these models: one for all, or one or a section for each."""
    if isinstance(given, Mapping):
        return {
            "policies": {
                k: {"model": str(m)} if isinstance(m, str | Path) else m for k, m in given.items()
            }
        }
    names: dict[str, Any] = (
        {} if isinstance(agents, str) else {agent.policy: {} for agent in agents}
    )
    return {"policies": names, "policy_defaults": {"model": str(given)}}


def _settings(given: Mapping[str, Any], tasks_per_step: int) -> tuple[list[str], dict[str, Any]]:
    """(Choices of groups of configs, sections) that keyword arguments stand for."""
    sections: dict[str, Any] = {
        "trainer": {"steps": 20, "tasks_per_step": tasks_per_step, "group_size": 8},
        "policy_defaults": {"lr": 1e-6},
    }
    chosen = []
    for key, value in given.items():
        if key in GROUPS and isinstance(value, str):
            chosen.append(f"{key}={value}")
        elif key == "penalties":  # of the section whose other keys are the argument `reward`
            sections["reward"] = {key: value}
        elif key in RunConfig.model_fields or key == "sharing":
            sections[key] = (
                merged(sections.get(key, {}), value) if isinstance(value, Mapping) else value
            )
        elif key in TrainerConfig.model_fields:
            sections["trainer"][key] = value
        elif key in PolicyConfig.model_fields:
            sections["policy_defaults"][key] = value
        else:
            known = [
                *RunConfig.model_fields,
                *TrainerConfig.model_fields,
                *PolicyConfig.model_fields,
            ]
            places = _places(key)
            expected = (
                f"write {' or '.join(places)}" if places else f"expected one of {', '.join(known)}"
            )
            raise TaskError(
                f"Run has no setting '{key}'; {expected}{'' if places else nearest_hint(key, known)}"
            )
    return chosen, sections


def _places(key: str) -> list[str]:
    """How arguments say a key of a section of the config; [] where no section has it."""
    kinds = {
        name: (field.annotation, *get_args(field.annotation))
        for name, field in RunConfig.model_fields.items()
    }
    having = [
        name
        for name, own in kinds.items()
        if any(key in getattr(kind, "model_fields", ()) for kind in own)
    ]
    value = f'{{"{key}": ...}}'
    said = (
        f"AgentSpec(..., settings={value})" if name == "agents" else f"{name}={value}"
        for name in having
    )
    return [text for text, name in zip(said, having, strict=True) if name not in _ARGUMENTS]


def _apart(work: Callable[[], _T], interrupt: Callable[[], None] = lambda: None) -> _T:
    """What `work` returns, done in a thread where no event loop runs; Ctrl-C is passed on to it by `interrupt`."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            return done.result()
        except KeyboardInterrupt:
            interrupt()
            raise


def _talk(
    played: Generator[Trajectory, None, None], told: queue.Queue[str], prompts: Sequence[str]
) -> list[Conversation]:
    """What a team, in a thread of its own, plays of each prompt that it is told; without prompts a person is asked."""
    found: list[Conversation] = []
    with ThreadPoolExecutor(1) as pool, suppress(EOFError):
        try:  # a person is asked in the caller's thread, where Ctrl-C is heard
            for prompt in prompts or iter(lambda: input("you: "), ""):
                told.put(prompt)
                found.append(Conversation.of(pool.submit(next, played).result(), {}))
                if not prompts:
                    found[-1].show()
        finally:
            pool.submit(played.close).result()
    return found


class _Steps:
    """A training in a thread of its own, which waits after each step until somebody asks for the next."""

    def __init__(self, config: Path) -> None:
        self._run = config.parent
        self._rows: queue.Queue[StepRow | BaseException | None] = queue.Queue()
        self._asked: queue.Queue[bool] = queue.Queue()  # whether to go on
        self._taken = False  # a row that the training waits behind
        self._thread = threading.Thread(target=self._train, args=(config,), name="training")
        self._thread.start()
        # Of a program that ends in the middle of its loop; `atexit` comes too late, after all threads are waited for.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]

    def next(self) -> StepRow | None:
        """The next step's metrics, None after the last; raises what ended the training."""
        if self._taken:
            self._asked.put(True)
        self._taken = False
        found = self._rows.get()
        if isinstance(found, BaseException):
            raise found
        self._taken = found is not None
        return found

    def close(self) -> None:
        """End the training where it is, with a checkpoint, and wait for that; it says what kept it from that."""
        from mcore_mas.runtime.joblog import describe_error

        self._asked.put(False)  # of the row that it waits behind, or of a step under way
        self._thread.join()
        while not self._rows.empty():
            if isinstance(error := self._rows.get(), BaseException):
                say(f"{self._run}: {describe_error(error)}")

    def _train(self, config: Path) -> None:
        from mcore_mas.runtime.stop_signal import Stopped
        from mcore_mas.training.train import train

        async def after_step(number: int, metrics: Mapping[str, float]) -> bool:
            self._rows.put({"step": number, **metrics})
            return await asyncio.to_thread(self._asked.get)

        try:
            train(config, after_step=after_step)
        except BaseException as error:
            # from Python 3.12 on asyncio has no thread in which it ends its others where a program ends
            stopped = error.__context__ if "at interpreter shutdown" in str(error) else error
            if isinstance(stopped, Stopped):
                say(f"{self._run}: {stopped}")
            self._rows.put(None if isinstance(stopped, Stopped) else error)
        else:
            self._rows.put(None)
