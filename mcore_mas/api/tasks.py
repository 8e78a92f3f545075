"""Tasks of the Python API: from tasks, pairs, rows and files to splits of tasks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import ValidationError

from mcore_mas.api.references import ArgumentError
from rollout.base.error_lines import error_line
from rollout.base.options import validate_options
from rollout.config.data import TaskFile
from rollout.config.tasks import located_tasks
from rollout.records.files import task_id_problem
from rollout.records.trajectory import Task
from rollout.tasks.files import PLAIN, distinct_tasks, read_task_file
from rollout.tasks.hub_datasets import locate_dataset, missing_data_hint
from rollout.tasks.splits import SPLITS

_MIN_TASKS = 3  # one for each split
_HELD_OUT = 10  # a tenth of train is held out for each split that is not given


def split_tasks(tasks: Any) -> dict[str, list[Task]]:
    """Return tasks by split.

    A tenth of train is held out for each of validation and test that is not given: the last tasks
    for the test, those before them for validation.

    Args:
        tasks: tasks, (prompt, answer) pairs, or rows with a prompt and an answer, such as those of
            a data set; an id on the Hub, a folder or a file, as for `load_tasks`; or a mapping of splits
            to any of these. The `id` of a row is the task's. Tasks made of pairs and rows get the
            environment "", which `Run` replaces by its own.

    Raises:
        ArgumentError: an item is not a task, an id is given twice or is not valid, a split has an
            unknown name, there is no train, a task of train is also in a split that is held out from
            train, or train has fewer than three tasks and a split would be taken from it.
    """
    items = _items_by_split(tasks)
    train = items["train"]
    if len(train) < _MIN_TASKS and len(items) < len(SPLITS):
        raise ArgumentError(
            f"{len(train)} tasks; expected {_MIN_TASKS} or more: a tenth is for validation, a "
            "tenth for the test"
        )

    held_out_splits = [split for split in ("test", "validation") if split not in items]
    size = max(1, len(train) // _HELD_OUT)
    for split in held_out_splits:
        items[split] = train[-size:]
        train = train[:-size]
    items["train"] = train

    result: dict[str, list[Task]] = {}
    for split in SPLITS:
        result[split] = [_to_task(item, split, number) for number, item in enumerate(items[split])]
    for split in items:
        if split in held_out_splits:
            continue
        user_tasks = list(result[split])
        if split == "train":  # the user gave the held-out tasks as tasks of train
            for held_out_split in held_out_splits:
                user_tasks += result[held_out_split]
        _check_ids(split, user_tasks)
    _check_disjoint(result, held_out_splits)
    return result


def _check_ids(split: str, tasks: Sequence[Task]) -> None:
    """Raise ArgumentError if two tasks that were given for a split have the same id, or an id cannot be used."""
    for task_id, count in Counter(task.id for task in tasks).items():
        if count > 1:
            raise ArgumentError(
                f"tasks.{split}: {count} tasks have the id {task_id!r:.80}; give each its own"
            )
        problem = task_id_problem(task_id)
        if problem:
            raise ArgumentError(f"tasks.{split}: {problem}")


def _items_by_split(tasks: Any) -> dict[str, list[Any]]:
    """Return the items of each split of `tasks`; files and named data sets are read."""
    parts = dict(tasks) if isinstance(tasks, Mapping) else {"train": tasks}
    if "train" not in parts or not parts.keys() <= set(SPLITS):
        raise ArgumentError(
            f"tasks has keys {', '.join(map(str, parts))}; expected {', '.join(SPLITS)}, "
            "of which train is required"
        )
    items: dict[str, list[Any]] = {}
    for split, part in parts.items():
        if isinstance(part, str | Path):
            items[split] = list(load_tasks(part, split=split))
        elif isinstance(part, Iterable):
            items[split] = list(_as_rows(part))
        else:
            raise ArgumentError(
                f"tasks.{split} is {part!r:.80}; expected tasks, (prompt, answer) pairs, rows, or "
                "a file"
            )
    return items


def _as_rows(items: Iterable[Any]) -> Iterable[Any]:
    """Return the rows of a DataFrame; any other items as they are."""
    pandas = sys.modules.get("pandas")  # loaded already if the items are a DataFrame
    if pandas is not None and isinstance(items, pandas.DataFrame):
        rows: list[Any] = items.to_dict("records")
        return rows
    return items


def _check_disjoint(tasks: Mapping[str, Sequence[Task]], held_out_splits: Sequence[str]) -> None:
    """Raise ArgumentError if a task is in train and in a split that was held out from train."""
    in_train = {(task.prompt, task.answers) for task in tasks["train"]}
    for split in held_out_splits:
        for task in tasks[split]:
            if (task.prompt, task.answers) in in_train:
                raise ArgumentError(
                    f"tasks: {task.prompt!r:.80} comes twice, and would be in train and {split}; "
                    f'take it out once, or give the split: tasks={{"train": ..., "{split}": ...}}'
                )


def _to_task(item: Any, split: str, number: int) -> Task:
    if isinstance(item, Task):
        return replace(item, split=split)
    prompt: Any = None
    answers: Any = ()
    task_id: Any = None
    if isinstance(item, Mapping):
        task_id = item.get("id")
        prompt = next((item[key] for key in PLAIN.question if key in item), None)
        answers = next((item[key] for key in PLAIN.answers if key in item), ())
    elif isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
        prompt, answers = item
    if not isinstance(prompt, str):
        raise ArgumentError(
            f"tasks.{split}[{number}] is {str(item)[:80]!r}; expected a Task, (prompt, answer), or "
            f"a mapping with {' or '.join(PLAIN.question)}, and {' or '.join(PLAIN.answers)}; "
            "mm.load_tasks reads other columns"
        )
    if isinstance(answers, np.ndarray):
        answers = answers.tolist()
    if answers is None:
        answers = ()
    if not isinstance(answers, list | tuple):
        answers = (answers,)
    return Task(
        id=f"{split}-{number}" if task_id is None else str(task_id),
        prompt=prompt,
        answers=tuple(map(str, answers)),
        env="",
        source="own",
        split=split,
    )


def load_tasks(
    given: str | Path | Iterable[Mapping[str, Any]],
    *,
    split: str = "train",
    subset: str | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
    format: str = "plain",
    limit: int | None = None,
) -> list[Task]:
    """Load the tasks of a data set, for `mm.Run(tasks=...)`. Equal rows become one task.

    Args:
        given: the hub's id of a data set that was downloaded (`hf download --repo-type dataset
            ID`), its folder, or a .parquet, .jsonl, .json or .csv file; or the rows themselves,
            such as a `datasets.Dataset` or a DataFrame.
        split: split of the data set.
        subset: subset of the data set, if it has several.
        columns: columns of the prompt, answer, id, source and context that differ from those of
            the format.
        format: format of the rows (`mcore-mas list formats`); math finds the answer in a solution.
        limit: maximum number of tasks.

    Raises:
        ArgumentError: the data set is not on this machine, or an argument is not valid.
        RecordError: the data set has no such subset or split, or a row does not fit the format.
    """
    rows = None if isinstance(given, str | Path) else _as_rows(given)
    options = {
        "path": locate_dataset(str(given)) if rows is None else "rows",
        "subset": subset,
        "columns": dict(columns),
        "format": format,
    }
    try:
        file = TaskFile(**validate_options("a data set", TaskFile, options))
    except ValidationError as error:
        raise ArgumentError(error_line(error, TaskFile, options)) from error

    if rows is not None:
        named_columns = file.columns.model_dump(exclude_none=True)
        tasks = read_task_file(file.path, rows, format=format, split=split, columns=named_columns)
    elif file.path.exists():
        tasks = located_tasks(file, split, format)
    else:
        raise ArgumentError(f"{given}: not here; {missing_data_hint(str(given))}")
    return list(islice(distinct_tasks(tasks, {}, drop=True), limit))
