"""Objects of the Python API: agents, tasks in the forms that people have them in, trajectories that show themselves."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from mcore_mas.rollout.base.options import HERE, checked, lookup
from mcore_mas.rollout.base.schema_words import invalid
from mcore_mas.rollout.config.data import TaskFile, placed_tasks
from mcore_mas.rollout.records.trajectory import Group, Status, Task, Trajectory
from mcore_mas.rollout.tasks.files import distinct, located_dataset, not_downloaded
from mcore_mas.rollout.teams.roles import Parser

PROMPT_KEYS, ANSWER_KEYS = ("prompt", "question", "problem"), ("answer", "answers", "solution", "target")


class TaskError(ValueError):
    """An object given to the Python API cannot be used: says which, what was expected and what to do."""


def said_something(text: str) -> str | None:
    """The parser of an agent that has none: the text, None where it is empty."""
    return text.strip() or None


@dataclass(frozen=True)
class AgentSpec:
    """An agent: its prompts, the parser of its replies, and the policy that it plays.

    Args:
        name: by which the orchestra asks it.
        user: the user prompt; what is in braces is filled by the orchestra.
        system: the system prompt, "" for none.
        parse: takes a reply and returns its value, None where it is malformed.
        policy: agents with the same one share weights.
        settings: keys of `agents.<name>` of a config, such as max_tokens, temperature, loss_weight, tools.
    """

    name: str
    user: str
    system: str = ""
    parse: Parser = said_something
    policy: str = "shared"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def section(self, run: str) -> dict[str, Any]:
        """Its section of the config of a run."""
        own = {"role": known_here(self.parse, f"{run}.{self.name}"), "policy": self.policy}
        return {**own, "system": self.system, "user": self.user, **self.settings}


def known_here(thing: Any, label: str) -> str:
    """A name by which a config may say `thing`: its own, its import path, or one of this process alone."""
    if isinstance(thing, str):
        return thing
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    path = _script() if module == "__main__" else module
    if not path or getattr(sys.modules.get(str(module)), name, None) is not thing:
        path, name = "here", label
    if path == "here" or module == "__main__":
        HERE[f"{path}:{name}"] = thing
    return f"{path}:{name}"


def _script() -> str:
    """The import path of this process's script; "" where an import would run it again, and of a notebook."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if not file or not re.search(r"^if __name__ ==", Path(file).read_text(encoding="utf-8"), re.MULTILINE):
        return ""
    return spec.name if spec else Path(file).stem


def reward_section(reward: Callable[..., Any] | str, label: str) -> dict[str, Any]:
    """The section `reward` of a config.

    Raises:
        TaskError: it is neither a name nor a function of one argument.
    """
    if not isinstance(reward, str) and not callable(reward):
        raise TaskError(f"reward is {reward!r}; expected a function of a trajectory or a group, or an allocator's name")
    if not isinstance(reward, str):
        try:
            inspect.signature(reward).bind(None)
        except TypeError as error:
            raise TaskError(f"reward {label}: {error}; expected a function of a trajectory or a group") from error
    if isinstance(reward, str) or allocator_of(reward) is reward:
        return {"name": known_here(reward, label)}
    return {"name": f"{__name__}:by_trajectory", "options": {"reward": known_here(reward, label)}}


def by_trajectory(group: Group, *, reward: str) -> Group:
    """The allocator of a reward of one trajectory, by its import path."""
    return allocator_of(lookup("reward", reward, {}))(group)


def allocator_of(reward: Callable[..., Any]) -> Callable[[Group], Group]:
    """An allocator: `reward` itself if its argument is called `group`, else one that asks it for each trajectory."""
    if next(iter(inspect.signature(reward).parameters), "") == "group":
        return reward

    def allocate(group: Group) -> Group:
        return Group(task=group.task, trajectories=tuple(map(paid, group.trajectories)))

    def paid(trajectory: Trajectory) -> Trajectory:
        if trajectory.status is not Status.COMPLETED:
            return trajectory
        said = reward(trajectory)
        turns = tuple(
            replace(turn, reward=float(said[turn.agent] if isinstance(said, Mapping) else said))
            for turn in trajectory.turns
        )
        return replace(trajectory, turns=turns)

    return allocate


def split_tasks(given: Any, env: str) -> dict[str, list[Task]]:
    """Tasks by split. Of one sequence a tenth is held out for validation, and a tenth for the test.

    Args:
        given: tasks, (prompt, answer) pairs or rows with a prompt and an answer, also those of a data set; or a mapping
            of train, validation and test to them.
        env: of those that name none.

    Raises:
        TaskError: something is no task, or there are fewer than three.
    """
    if isinstance(given, Mapping):
        if set(given) != {"train", "validation", "test"}:
            raise TaskError(f"tasks has keys {', '.join(map(str, given))}; expected train, validation and test")
        parts = dict(given)
    else:
        items = list(given)
        if len(items) < 3:
            raise TaskError(f"{len(items)} tasks; expected 3 or more: a tenth is for validation, a tenth for the test")
        held = max(1, len(items) // 10)
        parts = {"train": items[: -2 * held], "validation": items[-2 * held : -held], "test": items[-held:]}
    return {split: [_task(item, env, split, n) for n, item in enumerate(own)] for split, own in parts.items()}


def load_tasks(
    path: str | Path,
    *,
    split: str = "train",
    subset: str | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
    format: str = "plain",
    limit: int | None = None,
) -> list[Task]:
    """Tasks of a data set, for `mm.Run(tasks=...)`: rows with prompts and answers, each row once.

    Args:
        path: the hub's id of a data set that was downloaded (`hf download --repo-type dataset ID`), its folder, or a
            .parquet, .jsonl, .json or .csv file.
        split: of the data set.
        subset: of the data set, where it has several.
        columns: where a row has its prompt, answer, id, source or context, in place of the format's columns.
        format: how rows are read (`mcore-mas list formats`), such as math, which finds the answer in a solution.
        limit: at most so many.

    Raises:
        TaskError: it is not there, or a column is mistyped.
        RecordError: it has no such subset or split, or a row is not of the format.
    """
    keys = {"path": located_dataset(str(path)), "subset": subset, "columns": dict(columns), "format": format}
    try:
        file = TaskFile(**checked("a data set", TaskFile, keys))
    except ValidationError as error:
        raise TaskError(invalid(error, TaskFile)) from error
    if not file.path.exists():
        raise TaskError(f"{path}: not here; {not_downloaded(str(path))}")
    return list(islice(distinct(placed_tasks(file, split, format), {}, drop=True), limit))


def _task(item: Any, env: str, split: str, number: int) -> Task:
    if isinstance(item, Task):
        return replace(item, split=split)
    prompt: Any = None
    answers: Any = ()
    if isinstance(item, Mapping):
        prompt = next((item[key] for key in PROMPT_KEYS if key in item), None)
        answers = next((item[key] for key in ANSWER_KEYS if key in item), ())
    elif isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
        prompt, answers = item
    if not isinstance(prompt, str):
        raise TaskError(
            f"tasks.{split}[{number}] is {str(item)[:80]!r}; expected a Task, (prompt, answer), or a mapping with "
            f"{' or '.join(PROMPT_KEYS)}, and {' or '.join(ANSWER_KEYS)}"
        )
    accepted = answers if isinstance(answers, list | tuple) else (answers,)
    texts = tuple(map(str, accepted))
    return Task(id=f"{split}-{number}", prompt=prompt, answers=texts, env=env, source="own", split=split)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversation(Trajectory):
    """A trajectory that can be looked at, with the advantages of its turns where they are known."""

    advantages: Mapping[tuple[str, str, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, trajectory: Trajectory, advantages: Mapping[tuple[str, str, int], float]) -> Conversation:
        """The same trajectory."""
        own = {f.name: getattr(trajectory, f.name) for f in fields(Trajectory)}
        return cls(**own, advantages=advantages)

    def show(self) -> None:
        """Print who said what to whom, with rewards and advantages."""
        from mcore_mas.reports.terminal import print_trajectory

        print_trajectory(self, Console(highlight=False), self.advantages)

    def __repr__(self) -> str:
        return f"Conversation({self.id!r}, {len(self.turns)} turns, outcome {self.outcome})"

    def _repr_html_(self) -> str:
        from mcore_mas.reports.pages import framed, trajectory_page

        return framed(trajectory_page(self, self.advantages))
