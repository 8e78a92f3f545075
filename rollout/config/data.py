"""Data section of a config: where tasks come from, and the tasks themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator, model_validator

from rollout.base.errors import OptionsError
from rollout.base.lookup import UnknownName, lookup
from rollout.base.options import options_model, validate_options
from rollout.base.section import Section, StrictSection
from rollout.environments import ENVS
from rollout.records.files import RecordError, read_tasks
from rollout.records.trajectory import Task
from rollout.tasks import GENERATORS, Generator
from rollout.tasks.files import OWN, READABLE, Placed, dataset_files, distinct, read_task_file
from rollout.tasks.splits import SPLITS, Split


class Columns(StrictSection):
    """Columns in which a data set has what, in place of its format's."""

    prompt: str | None = None
    answer: str | None = None
    id: str | None = None
    source: str | None = None
    context: str | None = None


class TaskFile(StrictSection):
    """A data file, or the part of it that a split takes."""

    path: Path  # or a folder; a hub's id of a data set becomes its folder in the cache
    subset: str | None = None  # of a data set
    split: str | None = None  # of a data set; None: the one of the same name
    columns: Columns = Columns()
    format: str | None = None  # None: data.format
    source: str = ""  # data source to report under; "": the row's own, or the format's name
    skip: int = Field(0, ge=0)  # tasks passed over at the beginning
    limit: int | None = Field(None, ge=1)  # tasks taken after them
    limit_per_source: int | None = Field(None, ge=1)  # of those, tasks kept of each data source


class DataConfig(Section):
    """Where tasks come from: a generator with the number of tasks per split, or data files per split."""

    generator: str | None = None
    options: dict[str, Any] = Field(
        default_factory=dict, validate_default=True
    )  # of the generator: which tasks
    format: str = OWN  # of files that name no other
    duplicates: Literal["refuse", "drop"] = "refuse"  # of a task that a split's files hold twice
    train: NonNegativeInt | tuple[TaskFile, ...]
    validation: NonNegativeInt | tuple[TaskFile, ...]
    test: NonNegativeInt | tuple[TaskFile, ...]

    @field_validator("generator")
    @classmethod
    def _known(cls, generator: str | None) -> str | None:
        if generator is not None:
            found = lookup("task generator", generator, GENERATORS)
            if not isinstance(found, Generator):
                raise ValueError(
                    f"'{generator}' is of type {type(found).__name__}; expected a Generator, "
                    "such as LETTERS = Generator(tasks=letters)"
                )
        return generator

    @field_validator("options")
    @classmethod
    def _typed(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "generator" in info.data:
            _task_options(info.data["generator"], options)
        return options

    @field_validator("train", "validation", "test", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """A number, or every file as a TaskFile: a path is one, and one file is a list of one."""
        if not isinstance(value, str | Path | Mapping | TaskFile | list | tuple):
            return value
        entries = value if isinstance(value, list | tuple) else [value]
        if not entries:
            raise ValueError("no file is named")
        return tuple(_file(number, entry) for number, entry in enumerate(entries))

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        for split in SPLITS:
            value = getattr(self, split)
            if isinstance(value, int) == (self.generator is None):
                what = (
                    "a data file, as no generator is named"
                    if self.generator is None
                    else "a number of tasks"
                )
                given = (
                    value
                    if isinstance(value, int)
                    else ", ".join(f"the file {file.path}" for file in value)
                )
                raise ValueError(f"data.{split} is {given}; expected {what}")
        if self.generator is not None and self.format != OWN:
            raise ValueError(
                f"data.format is {self.format}, which files have; leave it or data.generator out"
            )
        for file in (file for split in SPLITS for file in self.files(split)):
            name = file.format or self.format
            if name != OWN:
                lookup("data format", name, READABLE)
            elif file.source or file.columns != Columns():
                raise ValueError(
                    f"{file.path}: files of the format '{OWN}' name their own sources; leave source and columns out, "
                    "or name a format, such as plain"
                )
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments of the generator, in its parameters' types."""
        return _task_options(self.generator, self.options)

    def demonstration_arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The `options` of a cold start as keyword arguments of the generator's demonstrations.

        Raises:
            OptionsError: there are no demonstrations, or they have other options.
            ValidationError: an option is of another type or out of bounds.
        """
        if self.generator is None:
            raise OptionsError("cold_start needs data.generator, which writes its demonstrations")
        model = lookup("task generator", self.generator, GENERATORS).demonstration_options
        if model is None:
            raise OptionsError(
                f"task generator '{self.generator}' has no demonstrations; "
                "name models that exist and set cold_start=null"
            )
        whose = f"cold_start.options: what makes the demonstrations of task generator '{self.generator}'"
        return validate_options(whose, model, options, place=("cold_start", "options"))

    def files(self, split: Split) -> tuple[TaskFile, ...]:
        """The files of a split; none with a generator."""
        value = getattr(self, split)
        return () if isinstance(value, int) else value

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that the splits are made of, once."""
        return tuple(dict.fromkeys(file.path for split in SPLITS for file in self.files(split)))


def make_tasks(data: DataConfig, seed: int) -> dict[str, list[Task]]:
    """The tasks of every split, from the generator or the files.

    Raises:
        RecordError: a file or a row of it is not of its format, a task comes twice, or a file has none to give.
        ValueError: the generator cannot make so many different tasks, or one of one's own fails or makes others.
    """
    if data.generator is None:
        return {split: _read_split(data, split) for split in SPLITS}
    generator = lookup("task generator", data.generator, GENERATORS)
    sizes = {split: getattr(data, split) for split in SPLITS}
    who = f"data.generator '{data.generator}'"
    try:
        tasks = list(generator.tasks(seed, sizes, **data.arguments))
    except Exception as error:
        if data.generator in GENERATORS:
            raise
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{who} fails with seed {seed} and sizes {sizes}: {what}") from error
    if wrong := [task for task in tasks if not isinstance(task, Task) or task.split not in sizes]:
        raise ValueError(
            f"{who} makes {str(wrong[0])[:80]!r}; expected tasks with a split of {', '.join(sizes)}"
        )
    for (split, name), times in Counter((task.split, task.id) for task in tasks).items():
        if times > 1:
            raise ValueError(
                f"{who} makes {times} {split} tasks with the id '{name}'; give each an id of its own"
            )
    if none := [
        split for split in SPLITS if sizes[split] and all(task.split != split for task in tasks)
    ]:
        raise ValueError(f"{who} makes no {none[0]} task; expected {sizes[none[0]]}")
    return {split: [task for task in tasks if task.split == split] for split in SPLITS}


def prepared_tasks(folder: Path, split: Split) -> list[Task]:
    """The tasks of a run's split, as `make_tasks` gave them to be written to a file of `folder`.

    Raises:
        RecordError: the file cannot be read, is not what was written, or has a task twice or of an unknown environment.
    """
    path = folder / f"{split}.parquet"
    tasks = read_tasks(path)
    twice = [name for name, times in Counter(task.id for task in tasks).items() if times > 1]
    if twice:
        raise RecordError(f"{path}: task {twice[0]!r} is there twice; make the file again")
    try:
        check_envs(tasks)
    except UnknownName as error:
        raise RecordError(f"{path}: {error}") from None
    return tasks


def check_envs(tasks: Iterable[Task]) -> None:
    """Refuse, with UnknownName, an environment that a task names and that is not there."""
    for env in sorted({task.env for task in tasks}):
        lookup("env", env, ENVS)


def _task_options(generator: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    if generator is None:
        return validate_options("a file of tasks", options_model(make_tasks), options)
    known = lookup("task generator", generator, GENERATORS)
    return validate_options(f"task generator '{generator}'", known.task_options, options)


def _read_split(data: DataConfig, split: Split) -> list[Task]:
    seen: dict[str, Placed] = {}
    tasks = []
    for file in data.files(split):
        found = list(
            _chosen(
                distinct(
                    placed_tasks(file, split, data.format), seen, drop=data.duplicates == "drop"
                ),
                file,
            )
        )
        if not found:
            raise RecordError(
                f"{file.path}: no task for data.{split} after skipping {file.skip}; see skip and limit"
            )
        tasks += found
    return tasks


def placed_tasks(file: TaskFile, split: str, format: str) -> Iterator[Placed]:
    """The tasks of a data file or data set with the rows they are from, for `split` of a run; `format` if it has none.

    Raises:
        RecordError: it is not there, has no such subset or split, or a row is not of the format.
    """
    name, columns = file.format or format, file.columns.model_dump(exclude_none=True)
    for path in (
        dataset_files(file.path, file.subset, file.split or split)
        if file.path.is_dir()
        else [file.path]
    ):
        yield from read_task_file(
            path, format=name, split=split, source=file.source, columns=columns
        )


def _chosen(tasks: Iterable[Task], file: TaskFile) -> Iterator[Task]:
    taken: Counter[str] = Counter()
    for task in islice(tasks, file.skip, None if file.limit is None else file.skip + file.limit):
        taken[task.source] += 1
        if file.limit_per_source is None or taken[task.source] <= file.limit_per_source:
            yield task


def _file(number: int, entry: Any) -> TaskFile:
    if isinstance(entry, TaskFile):
        return entry
    keys = entry if isinstance(entry, Mapping) else {"path": entry}
    return TaskFile(**validate_options("a data file", TaskFile, keys, place=(number,)))
