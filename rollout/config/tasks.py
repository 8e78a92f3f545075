"""Tasks of a run, from the generator or the data files that its config names."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rollout.base.lookup import UnknownName, lookup
from rollout.config.data import DataConfig, TaskFile
from rollout.environments import ENVS
from rollout.records.files import RecordError, read_tasks
from rollout.records.trajectory import Task
from rollout.tasks.files import LocatedTask, distinct_tasks, read_task_file
from rollout.tasks.generators import GENERATORS
from rollout.tasks.hub_datasets import dataset_files
from rollout.tasks.splits import SPLITS, Split

_SHOWN_CHARS = 80  # length of a shown object that is not a task


def make_tasks(data: DataConfig, seed: int) -> dict[str, list[Task]]:
    """Return the tasks of each split, from the generator or the data files.

    Raises:
        RecordError: a file or a row is not of its format, a task comes twice against
            `data.duplicates`, or a file has no task left after `skip` and the limits.
        ValueError: the generator fails, or makes an object that is no task, a task of an unknown
            split, a task twice, or no task for a split.
    """
    if data.generator is None:
        return {split: _read_split(data, split) for split in SPLITS}

    label = f"data.generator '{data.generator}'"
    sizes: dict[Split, int] = {split: getattr(data, split) for split in SPLITS}
    generator = lookup("task generator", data.generator, GENERATORS)
    try:
        tasks = list(generator.tasks(seed, sizes, **data.arguments))
    except Exception as error:
        if data.generator in GENERATORS:
            raise
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{label} fails with seed {seed} and sizes {sizes}: {message}") from error
    _check_generated(tasks, sizes, label)
    return {split: [task for task in tasks if task.split == split] for split in SPLITS}


def prepared_tasks(folder: Path, split: Split) -> list[Task]:
    """Return the tasks of a split that a run has written to a folder.

    Raises:
        RecordError: the file cannot be read, has a task twice, or a task is of an unknown environment.
    """
    path = folder / f"{split}.parquet"
    tasks = read_tasks(path)
    for name, times in Counter(task.id for task in tasks).items():
        if times > 1:
            raise RecordError(f"{path}: task {name!r} is there twice; make the file again")
    try:
        check_envs(tasks)
    except UnknownName as error:
        raise RecordError(f"{path}: {error}") from None
    return tasks


def check_envs(tasks: Iterable[Task]) -> None:
    """Check that the environments of tasks exist.

    Raises:
        UnknownName: an environment does not exist.
    """
    for env in sorted({task.env for task in tasks}):
        lookup("env", env, ENVS)


def located_tasks(file: TaskFile, split: str, format: str) -> Iterator[LocatedTask]:
    """Yield the tasks of a data file or data set, each with the file and row that it comes from.

    Args:
        split: the run's split.
        format: format of a file whose config names none.

    Raises:
        RecordError: the file, subset or split does not exist, or a row is not of the format.
    """
    paths = [file.path]
    if file.path.is_dir():
        paths = dataset_files(file.path, file.subset, file.split or split)
    columns = file.columns.model_dump(exclude_none=True)
    for path in paths:
        yield from read_task_file(
            path,
            format=file.format or format,
            split=split,
            source=file.source,
            columns=columns,
        )


def _check_generated(tasks: list[Any], sizes: Mapping[Split, int], label: str) -> None:
    """Check that a generator made tasks of the splits, with different ids, and some for each split."""
    counts: Counter[tuple[str, str]] = Counter()
    for task in tasks:
        if not isinstance(task, Task) or task.split not in sizes:
            raise ValueError(
                f"{label} makes {str(task)[:_SHOWN_CHARS]!r}; expected tasks with a split of {', '.join(sizes)}"
            )
        counts[task.split, task.id] += 1
    for (split, name), times in counts.items():
        if times > 1:
            raise ValueError(
                f"{label} makes {times} {split} tasks with the id '{name}'; give each an id of its own"
            )
    splits = {split for split, _ in counts}
    for split, size in sizes.items():
        if size and split not in splits:
            raise ValueError(f"{label} makes no {split} task; expected {size}")


def _read_split(data: DataConfig, split: Split) -> list[Task]:
    earlier: dict[str, LocatedTask] = {}
    tasks: list[Task] = []
    for file in data.files(split):
        located = located_tasks(file, split, data.format)
        distinct = distinct_tasks(located, earlier, drop=data.duplicates == "drop")
        limited = list(_limited(distinct, file))
        if not limited:
            raise RecordError(
                f"{file.path}: no task for data.{split} after skipping {file.skip}; see skip and limit"
            )
        tasks += limited
    return tasks


def _limited(tasks: Iterable[Task], file: TaskFile) -> Iterator[Task]:
    """Yield the tasks that `skip`, `limit` and `limit_per_source` of a file let through."""
    end = None if file.limit is None else file.skip + file.limit
    counts: Counter[str] = Counter()  # by source
    for task in islice(tasks, file.skip, end):
        counts[task.source] += 1
        if file.limit_per_source is None or counts[task.source] <= file.limit_per_source:
            yield task
