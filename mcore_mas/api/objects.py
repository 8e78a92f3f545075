"""Objects of the Python API: agents, tasks in the forms that people have them in, trajectories that show themselves."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import ValidationError
from rich.console import Console

from rollout.base.error_lines import error_line
from rollout.base.errors import OptionsError
from rollout.base.lookup import LOCAL_OBJECTS, lookup
from rollout.base.options import validate_options
from rollout.base.signatures import check_call
from rollout.config.data import TaskFile, placed_tasks
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.tasks.files import PLAIN, distinct, located_dataset, not_downloaded, read_task_file
from rollout.tasks.splits import SPLITS
from rollout.teams.roles import Parser


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
        LOCAL_OBJECTS[f"{path}:{name}"] = thing
    return f"{path}:{name}"


def _script() -> str:
    """The import path of this process's script; "" where an import would run it again, and of a notebook."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if not file or not re.search(
        r"^if __name__ ==", Path(file).read_text(encoding="utf-8"), re.MULTILINE
    ):
        return ""
    return spec.name if spec else Path(file).stem


def reward_section(reward: Callable[..., Any] | str, label: str) -> dict[str, Any]:
    """The section `reward` of a config.

    Raises:
        TaskError: it is neither a name nor a function of one argument.
    """
    if isinstance(reward, str):
        return {"name": reward}
    try:
        check_call(f"reward {label}", reward, ("trajectory",), keywords=())
    except OptionsError as error:
        raise TaskError(
            f"{error}; expected a function of a trajectory or a group, or an allocator's name"
        ) from error
    if allocator_of(reward) is reward:
        return {"name": known_here(reward, label)}
    return {"name": f"{__name__}:by_trajectory", "options": {"reward": known_here(reward, label)}}


def by_trajectory(group: Group, *, reward: str) -> Group:
    """The allocator of a reward of one trajectory, by its import path."""
    return allocator_of(lookup("reward", reward, {}))(group)


def pure(value: Any) -> Any:
    """`value` with Python's numbers in the place of numpy's, as files of configs have them."""
    if isinstance(value, Mapping):
        return {key: pure(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [pure(own) for own in value]
    return value.item() if isinstance(value, np.generic) else value


def allocator_of(reward: Callable[..., Any]) -> Callable[[Group], Group]:
    """An allocator: `reward` itself if its argument is called `group`, else one that asks it for each trajectory."""
    with suppress(ValueError):  # of some that are written in C the signature cannot be read
        if next(iter(inspect.signature(reward).parameters), "") == "group":
            return reward

    def allocate(group: Group) -> Group:
        return Group(task=group.task, trajectories=tuple(map(paid, group.trajectories)))

    def paid(trajectory: Trajectory) -> Trajectory:
        if trajectory.status is not Status.COMPLETED:
            return trajectory
        said = reward(trajectory)
        turns = tuple(replace(turn, reward=number(said, turn.agent)) for turn in trajectory.turns)
        return replace(trajectory, turns=turns)

    def number(said: Any, agent: str) -> float:
        try:
            return float(said[agent] if isinstance(said, Mapping) else said)
        except (KeyError, TypeError, ValueError) as error:
            name = getattr(reward, "__name__", repr(reward))
            raise TaskError(
                f"reward {name} gave {said!r:.80} for a turn of agent '{agent}'; expected a number, or a number for "
                "each agent"
            ) from error

    return allocate


def split_tasks(given: Any) -> dict[str, list[Task]]:
    """Tasks by split. Of train a tenth is held out for the test, and a tenth for validation, where these are not given.

    Args:
        given: tasks, (prompt, answer) pairs or rows with a prompt and an answer, also those of a data set; what
            `load_tasks` takes by name; or a mapping of splits to them. Those that name no environment have "".

    Raises:
        TaskError: something is no task, there are fewer than three, or one is in train and in what is held out of it.
    """
    parts = dict(given) if isinstance(given, Mapping) else {"train": given}
    if "train" not in parts or not parts.keys() <= {*SPLITS}:
        raise TaskError(
            f"tasks has keys {', '.join(map(str, parts))}; expected {', '.join(SPLITS)}"
        )
    for split, part in parts.items():
        if isinstance(part, str | Path):
            parts[split] = load_tasks(part, split=split)
        elif not isinstance(part, Iterable):
            raise TaskError(
                f"tasks.{split} is {part!r:.80}; expected tasks, (prompt, answer) pairs, rows, or a file"
            )
    train = list(parts["train"])
    if len(train) < 3 and len(parts) < 3:
        raise TaskError(
            f"{len(train)} tasks; expected 3 or more: a tenth is for validation, a tenth for the test"
        )
    held, cut = max(1, len(train) // 10), [split for split in SPLITS[:0:-1] if split not in parts]
    for split in cut:
        parts[split], train = train[-held:], train[:-held]
    parts["train"] = train
    tasks: dict[str, list[Task]] = {
        split: [_task(item, split, n) for n, item in enumerate(parts[split])] for split in SPLITS
    }
    trained = {(task.prompt, task.answers) for task in tasks["train"]}
    for task in (task for split in cut for task in tasks[split]):
        if (task.prompt, task.answers) in trained:
            raise TaskError(
                f"tasks: {task.prompt!r:.80} comes twice, and would be in train and {task.split}; take it out once, or "
                f'give the split: tasks={{"train": ..., "{task.split}": ...}}'
            )
    return tasks


def load_tasks(
    given: str | Path | Iterable[Mapping[str, Any]],
    *,
    split: str = "train",
    subset: str | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
    format: str = "plain",
    limit: int | None = None,
) -> list[Task]:
    """Tasks of a data set, for `mm.Run(tasks=...)`: rows with prompts and answers, each row once.

    Args:
        given: the hub's id of a data set that was downloaded (`hf download --repo-type dataset ID`), its folder, or a
            .parquet, .jsonl, .json or .csv file; or the rows themselves, such as a `datasets.Dataset`.
        split: of the data set.
        subset: of the data set, where it has several.
        columns: where a row has its prompt, answer, id, source or context, in place of the format's columns.
        format: how rows are read (`mcore-mas list formats`), such as math, which finds the answer in a solution.
        limit: at most so many.

    Raises:
        TaskError: it is not there, or a column is mistyped.
        RecordError: it has no such subset or split, or a row is not of the format.
    """
    rows = None if isinstance(given, str | Path) else given
    keys = {
        "path": located_dataset(str(given)) if rows is None else "rows",
        "subset": subset,
        "columns": dict(columns),
    }
    try:
        keys["format"] = format
        file = TaskFile(**validate_options("a data set", TaskFile, keys))
    except ValidationError as error:
        raise TaskError(error_line(error, TaskFile, keys)) from error
    if rows is not None:
        own = file.columns.model_dump(exclude_none=True)
        placed = read_task_file(file.path, rows, format=format, split=split, columns=own)
    elif file.path.exists():
        placed = placed_tasks(file, split, format)
    else:
        raise TaskError(f"{given}: not here; {not_downloaded(str(given))}")
    return list(islice(distinct(placed, {}, drop=True), limit))


def _task(item: Any, split: str, number: int) -> Task:
    if isinstance(item, Task):
        return replace(item, split=split)
    prompt: Any = None
    answers: Any = ()
    if isinstance(item, Mapping):
        prompt = next((item[key] for key in PLAIN.question if key in item), None)
        answers = next((item[key] for key in PLAIN.answers if key in item), ())
    elif isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
        prompt, answers = item
    if not isinstance(prompt, str):
        raise TaskError(
            f"tasks.{split}[{number}] is {str(item)[:80]!r}; expected a Task, (prompt, answer), or a mapping with "
            f"{' or '.join(PLAIN.question)}, and {' or '.join(PLAIN.answers)}; mm.load_tasks reads other columns"
        )
    accepted = answers if isinstance(answers, list | tuple) else (answers,)
    texts = tuple(map(str, accepted))
    return Task(
        id=f"{split}-{number}", prompt=prompt, answers=texts, env="", source="own", split=split
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversation(Trajectory):
    """A trajectory that can be looked at, with the advantages of its turns where they are known."""

    advantages: Mapping[tuple[str, str, int], float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, trajectory: Trajectory, advantages: Mapping[tuple[str, str, int], float]
    ) -> Conversation:
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
