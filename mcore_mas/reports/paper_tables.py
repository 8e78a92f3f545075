"""Papers' tables: their numbers and layout (workflow/tables), and the same table of what was measured here."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError

from mcore_mas import SHIPPED
from mcore_mas.config.experiments import experiments
from mcore_mas.config.run import GAIN
from rollout.base.section import Section
from rollout.base.yaml_files import read_yaml

TABLES = SHIPPED / "workflow" / "tables"


class TableError(ValueError):
    """An evaluation or a table cannot be used: says which file, what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCell:
    """One number of a paper, and what it is compared with here."""

    block: str
    row: str
    column: str
    metric: str  # the paper's name of it
    kind: str  # avg | pass | maj
    experiment: str
    state: str  # base | trained | trained-base | a cell of `evaluate`
    dataset: str
    published: (
        float | str | None
    )  # in the paper's unit; text where it is no single number; None: not in the paper

    @property
    def states(self) -> tuple[str, ...]:
        """The evaluations that it is made of."""
        return ("trained", "base") if self.state == GAIN else (self.state,)


class PaperTable(Section):
    """A table of a paper, in a file of workflow/tables."""

    name: str = ""  # its key there
    title: str
    source: str  # paper, and table, figure or page
    # read in the paper or its README, at second hand, or no number known
    grade: Literal["primary", "secondary", "none"]
    metrics: dict[str, Literal["avg", "pass", "maj"]] = Field(
        min_length=1
    )  # the paper's name -> ours
    fraction: bool = False  # the paper's numbers are of 1, not of 100
    experiment: str  # with fields in braces
    # What a row, a column or a block gives: fields of that name, and dataset (a data source, `all` tasks, or the
    # `average` of the sources), state (base, trained, a cell of `evaluate`, or gain, trained - base) and metric.
    # Columns have the word.
    rows: dict[str, dict[str, str]] = Field(min_length=1)
    columns: dict[str, dict[str, str]] = Field(min_length=1)
    compare: tuple[tuple[str, str], ...] = ()  # (method, baseline), two rows or two columns
    evaluate: dict[str, dict[str, dict[str, Any]]] = Field(
        default_factory=dict
    )  # as a suite's: other models in seats
    notes: tuple[str, ...] = ()  # what the paper says that is no cell
    blocks: dict[str, dict[str, Any]] = Field(min_length=1)  # also `values`: by row, of each column

    @classmethod
    def load(cls, name: str, folder: Path = TABLES) -> Self:
        """Read a table of the files in `folder`.

        Raises:
            TableError: there is no such table, or it is not of that form.
        """
        tables = tables_of(folder)
        if name not in tables:
            raise TableError(f"no table '{name}'; tables: {', '.join(table_names(folder))}")
        path, values = tables[name]
        try:
            table = cls.model_validate(values).model_copy(update={"name": name})
            known = experiments()
            unknown = [cell.experiment for cell in table.cells if cell.experiment not in known]
        except ValidationError as error:
            first = error.errors()[0]
            raise TableError(
                f"{path}, {name}.{'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from error
        except (ValueError, KeyError) as error:
            raise TableError(
                f"{path}, {name}: {' '.join(str(error).split())}; see docs/tables.md"
            ) from error
        if unknown:
            raise TableError(
                f"{path}, {name}: no experiment '{unknown[0]}'; expected one of configs/experiment"
            )
        lines = {*table.rows, *table.columns}
        strange = [name for pair in table.compare for name in pair if name not in lines]
        if strange:
            raise TableError(
                f"{path}, {name}.compare: no row or column '{strange[0]}'; there are: {', '.join(sorted(lines))}"
            )
        return table

    @cached_property
    def cells(self) -> tuple[PaperCell, ...]:
        """Every cell, by block, row and column."""
        return tuple(
            cell
            for block in self.blocks
            for row in self.rows
            for number, column in enumerate(self.columns)
            for cell in self._cells(block, row, column, number)
        )

    @property
    def experiments(self) -> tuple[str, ...]:
        """The experiments that it is made of."""
        return tuple(dict.fromkeys(cell.experiment for cell in self.cells))

    @property
    def evaluations(self) -> tuple[tuple[str, str], ...]:
        """(Experiment, policy state) of each evaluation that it is made of."""
        return tuple(
            dict.fromkeys((cell.experiment, state) for cell in self.cells for state in cell.states)
        )

    def _cells(self, block: str, row: str, column: str, number: int) -> list[PaperCell]:
        own = {key: value for key, value in self.blocks[block].items() if key != "values"}
        place = {**own, **self.rows[row], **self.columns[column]}
        values = self.blocks[block].get("values", {})
        if unknown := values.keys() - self.rows.keys():
            raise ValueError(f"values of '{min(unknown)}', which is no row")
        line = values.get(row, [])
        parts = _parts(line[number] if number < len(line) else None, len(self.metrics))
        state = place.get("state", "trained")
        experiment = self.experiment.format(**place)
        known = ("base", "trained", "gain", *self.evaluate.get(experiment, ()))
        if state not in known:
            raise ValueError(f"state '{state}' of {row}, {column}; expected {', '.join(known)}")
        return [
            PaperCell(
                block=block,
                row=row,
                column=column,
                metric=metric,
                kind=place.get("metric", kind),
                experiment=experiment,
                state=GAIN if state == "gain" else state,
                dataset=place.get("dataset", "all"),
                published=published,
            )
            for (metric, kind), published in zip(self.metrics.items(), parts, strict=True)
        ]


def table_names(folder: Path = TABLES) -> list[str]:
    """The tables that there are."""
    return sorted(tables_of(folder))


def tables_of(folder: Path = TABLES) -> dict[str, tuple[Path, Any]]:
    """The file and the values of each table: a file has several by name, or is one, as in an older bundle.

    Raises:
        TableError: a file is no YAML.
    """
    found: dict[str, tuple[Path, Any]] = {}
    for path in sorted(folder.glob("*.yaml")):
        values = _read(path, path.stat().st_mtime_ns)
        several = isinstance(values, dict) and "title" not in values
        found |= {
            name: (path, own) for name, own in (values if several else {path.stem: values}).items()
        }
    return found


@lru_cache
def _read(path: Path, modified_ns: int) -> Any:
    try:
        return read_yaml(path)
    except yaml.YAMLError as error:
        raise TableError(f"{path}: {' '.join(str(error).split())}; see docs/tables.md") from error


def _parts(value: Any, count: int) -> list[float | str | None]:
    """A cell such as `38.8/63.3` as the numbers of its metrics."""
    if value is None:
        return [None] * count
    texts = str(value).split("/")
    if len(texts) != count:
        raise ValueError(
            f"cell '{value}' has {len(texts)} numbers; expected {count}, one of each metric"
        )
    return [_number(text) for text in texts]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.strip()
