"""Section of a config about tasks: a generator with numbers of tasks, or data files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator, model_validator

from rollout.base.errors import OptionsError
from rollout.base.lookup import lookup
from rollout.base.options import validate_options
from rollout.base.section import Section, StrictSection
from rollout.tasks.files import READABLE, TASKS_FORMAT
from rollout.tasks.generators import GENERATORS, Generator
from rollout.tasks.splits import SPLITS, Split


class Columns(StrictSection):
    """Names of the columns of a data set; None: the name that its format gives the column."""

    prompt: str | None = None
    answer: str | None = None
    id: str | None = None
    source: str | None = None
    context: str | None = None


class TaskFile(StrictSection):
    """A data file or a data set, or the part of it that a split takes."""

    # A file or a folder; the id of a downloaded data set on the Hub becomes its folder in the cache.
    path: Path
    # Subset (configuration) of a data set.
    subset: str | None = None
    # Split of a data set; None: the one with the name of the run's split.
    split: str | None = None
    columns: Columns = Columns()
    # Format of the rows; None: data.format.
    format: str | None = None
    # Data source to report under; "": the row's own, or the name of the format.
    source: str = ""
    # Number of tasks that are skipped at the beginning.
    skip: int = Field(0, ge=0)
    # Maximum number of tasks that are taken after the skipped ones; None: all.
    limit: int | None = Field(None, ge=1)
    # Maximum number of these tasks of each data source; None: all.
    limit_per_source: int | None = Field(None, ge=1)


class DataConfig(Section):
    """The source of tasks: a generator with the number of tasks per split, or data files per split."""

    generator: str | None = None
    # Options of the generator.
    options: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    # Format of files that name no other.
    format: str = TASKS_FORMAT
    # "refuse": a task that the files of a split have twice is an error; "drop": it is taken once.
    duplicates: Literal["refuse", "drop"] = "refuse"
    train: NonNegativeInt | tuple[TaskFile, ...]
    validation: NonNegativeInt | tuple[TaskFile, ...]
    test: NonNegativeInt | tuple[TaskFile, ...]

    @field_validator("generator")
    @classmethod
    def _check_generator(cls, name: str | None) -> str | None:
        if name is not None:
            generator = lookup("task generator", name, GENERATORS)
            if not isinstance(generator, Generator):
                raise ValueError(
                    f"'{name}' is of type {type(generator).__name__}; expected a Generator, "
                    "such as LETTERS = Generator(tasks=letters)"
                )
        return name

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "generator" in info.data:
            _task_arguments(info.data["generator"], options)
        return options

    @field_validator("train", "validation", "test", mode="before")
    @classmethod
    def _to_files(cls, value: Any) -> Any:
        """Convert a path, the settings of a file, or a list of them to task files.

        An integer, which is a number of generated tasks, is left unchanged.
        """
        if not isinstance(value, str | Path | Mapping | TaskFile | list | tuple):
            return value
        entries = value if isinstance(value, list | tuple) else [value]
        if not entries:
            raise ValueError("no file is named")
        return tuple(_to_file(entry, number) for number, entry in enumerate(entries))

    @model_validator(mode="after")
    def _check_splits(self) -> DataConfig:
        for split in SPLITS:
            value = getattr(self, split)
            if self.generator is None and isinstance(value, int):
                raise ValueError(
                    f"data.{split} is {value}; expected a data file, as no generator is named"
                )
            if self.generator is not None and not isinstance(value, int):
                files = ", ".join(f"the file {file.path}" for file in value)
                raise ValueError(f"data.{split} is {files}; expected a number of tasks")
        if self.generator is not None and self.format != TASKS_FORMAT:
            raise ValueError(
                f"data.format is {self.format}, but data.generator makes the tasks; leave one of them out"
            )
        for split in SPLITS:
            for file in self.files(split):
                self._check_format(file)
        return self

    def _check_format(self, file: TaskFile) -> None:
        name = file.format or self.format
        if name != TASKS_FORMAT:
            lookup("data format", name, READABLE)
        elif file.source or file.columns != Columns():
            raise ValueError(
                f"{file.path}: files of the format '{TASKS_FORMAT}' name their own sources; leave "
                "source and columns out, or name a format, such as plain"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments of the generator, in the types of its parameters."""
        return _task_arguments(self.generator, self.options)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the data files of all splits, each once; empty with a generator."""
        paths: list[Path] = []
        for split in SPLITS:
            paths += [file.path for file in self.files(split)]
        return tuple(dict.fromkeys(paths))

    def files(self, split: Split) -> tuple[TaskFile, ...]:
        """Return the files of a split; none with a generator."""
        value = getattr(self, split)
        return () if isinstance(value, int) else value

    def demonstration_arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a cold start as keyword arguments of the generator's `demonstrations`.

        Raises:
            OptionsError: there is no generator, it has no demonstrations, or an option is unknown or
                missing.
            ValidationError: an option has another type or is out of bounds.
        """
        if self.generator is None:
            raise OptionsError("cold_start needs data.generator, which writes its demonstrations")
        model = lookup("task generator", self.generator, GENERATORS).demonstration_options
        if model is None:
            raise OptionsError(
                f"task generator '{self.generator}' has no demonstrations; "
                "name models that exist and set cold_start=null"
            )
        owner = (
            f"cold_start.options: the demonstration function of task generator '{self.generator}'"
        )
        return validate_options(owner, model, options, location=("cold_start", "options"))


def _task_arguments(generator: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    if generator is None:
        if options:
            raise OptionsError(
                f"data files have no option '{next(iter(options))}'; name a generator"
            )
        return {}
    model = lookup("task generator", generator, GENERATORS).task_options
    return validate_options(f"task generator '{generator}'", model, options)


def _to_file(entry: Any, number: int) -> TaskFile:
    if isinstance(entry, TaskFile):
        return entry
    keys = entry if isinstance(entry, Mapping) else {"path": entry}
    return TaskFile(**validate_options("a data file", TaskFile, keys, location=(number,)))
