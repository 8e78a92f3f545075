"""Tables of papers: their layout, their published numbers, and the experiments to compare with.

The files of workflow/tables define them; docs/tables.md explains the keys.
"""

from collections.abc import Mapping
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
_OUR_METRICS = ("avg", "pass", "maj")


class TableError(ValueError):
    """A table or an evaluation cannot be used; the message names the file and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCell:
    """One number of a paper, and the evaluation that it is compared with."""

    block: str
    row: str
    column: str
    metric: str  # name of the metric in the paper
    our_metric: str  # avg, pass or maj
    experiment: str
    state: str  # base, trained, trained-base, or a name of the table's `evaluate`
    dataset: str  # a data source, "all" or "average"
    # In the unit of the paper. Text if it is not a single number, None if it is not in the paper.
    published: float | str | None

    @property
    def states(self) -> tuple[str, ...]:
        """States of the policies whose evaluations the cell is compared with."""
        return ("trained", "base") if self.state == GAIN else (self.state,)


class PaperTable(Section):
    """A table of a paper, as a file of workflow/tables defines it.

    Rows, columns and blocks have fields for the name of the experiment, and may have `dataset` (a data
    source, `all` tasks, or the `average` of the sources), `state` (base, trained, a name of `evaluate`,
    or gain, which is trained - base) and `metric` (ours: avg, pass or maj). Fields of columns take
    precedence over fields of rows, and fields of rows over those of blocks.
    """

    name: str = ""  # key of the table in its file
    title: str
    source: str  # paper, and table, figure or page
    # Grade of the source of the published numbers. primary: the paper or its README; secondary: another source;
    # none: no number is known.
    grade: Literal["primary", "secondary", "none"]
    # Our metric by the name of the metric in the paper.
    metrics: dict[str, Literal["avg", "pass", "maj"]] = Field(min_length=1)
    fraction: bool = False  # the published numbers are fractions of 1, and not per cents
    experiment: str  # name of the experiment, with fields in braces
    rows: dict[str, dict[str, str]] = Field(min_length=1)
    columns: dict[str, dict[str, str]] = Field(min_length=1)
    compare: tuple[tuple[str, str], ...] = ()  # (method, baseline): two rows or two columns
    # Evaluations in which other models play, as in a suite: the model of each agent, by experiment and
    # by name of the evaluation.
    evaluate: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()  # results in the paper's text that are not in the table
    # Fields of each block, and its `values`: the published numbers of each row, in the order of the columns. A list
    # may be shorter; the paper has no numbers for the columns that remain.
    blocks: dict[str, dict[str, Any]] = Field(min_length=1)

    @classmethod
    def load(cls, name: str, folder: Path = TABLES) -> Self:
        """Read a table from the files of a folder.

        Raises:
            TableError: there is no such table, or it is invalid.
        """
        tables = tables_in_folder(folder)
        if name not in tables:
            raise TableError(f"no table '{name}'; tables: {', '.join(table_names(folder))}")
        path, values = tables[name]
        try:
            table = cls.model_validate(values).model_copy(update={"name": name})
            table._check_experiments()
            for method, baseline in table.compare:
                table.compared_axis(method, baseline)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise TableError(f"{path}, {name}.{key}: {first['msg']}") from error
        except ValueError as error:
            raise TableError(
                f"{path}, {name}: {' '.join(str(error).split())}; see docs/tables.md"
            ) from error
        return table

    def _check_experiments(self) -> None:
        """Check that every cell is valid, and that its experiment exists."""
        names = experiments()
        for experiment in self.experiments:  # makes the cells, which checks them
            if experiment not in names:
                raise ValueError(
                    f"no experiment '{experiment}'; expected one of configs/experiment"
                )

    def compared_axis(self, method: str, baseline: str) -> Literal["row", "column"]:
        """Return "row" if a pair of `compare` names two rows, and "column" if it names two columns.

        Raises:
            ValueError: the pair does neither.
        """
        for name in (method, baseline):
            if name not in self.rows and name not in self.columns:
                names = ", ".join(sorted({*self.rows, *self.columns}))
                raise ValueError(f"compare: no row or column '{name}'; there are: {names}")
        if method in self.rows and baseline in self.rows:
            return "row"
        if method in self.columns and baseline in self.columns:
            return "column"
        raise ValueError(
            f"compare: one of '{method}' and '{baseline}' is a row, and the other a column; "
            "expected two rows or two columns"
        )

    @cached_property
    def cells(self) -> tuple[PaperCell, ...]:
        """All cells, in the order of blocks, rows, columns and metrics.

        Raises:
            ValueError: published values, a state or a metric are invalid, or a field of the
                experiment's name is missing.
        """
        cells: list[PaperCell] = []
        for block in self.blocks:
            self._check_values(block)
            for row in self.rows:
                for column_index, column in enumerate(self.columns):
                    cells += self._cells_at(block, row, column, column_index)
        return tuple(cells)

    @property
    def experiments(self) -> tuple[str, ...]:
        """The experiments that the table needs."""
        return tuple(dict.fromkeys(cell.experiment for cell in self.cells))

    @property
    def evaluations(self) -> tuple[tuple[str, str], ...]:
        """The evaluations that the table needs, as (experiment, policy state)."""
        pairs = [(cell.experiment, state) for cell in self.cells for state in cell.states]
        return tuple(dict.fromkeys(pairs))

    def _check_values(self, block: str) -> None:
        """Check that the values of a block are lists by row, and that no list has more values than columns."""
        values = self.blocks[block].get("values", {})
        if not isinstance(values, Mapping):
            raise ValueError(
                f"values of block '{block}' are {values}; expected a list of numbers for each row"
            )
        for row, row_values in values.items():
            if row not in self.rows:
                raise ValueError(f"values of '{row}', which is not a row")
            label = f"values of row '{row}' in block '{block}'"
            if not isinstance(row_values, list):
                raise ValueError(
                    f"{label} are {row_values}; expected a list with one for each column"
                )
            if len(row_values) > len(self.columns):
                raise ValueError(
                    f"{label}: {len(row_values)} for {len(self.columns)} columns; "
                    "remove the surplus, or add a column"
                )

    def _cells_at(self, block: str, row: str, column: str, column_index: int) -> list[PaperCell]:
        """Return the cells of all metrics in one row and column.

        Raises:
            ValueError: the values, the state or the metric of these cells are invalid, or a field of
                the experiment's name is missing.
        """
        block_fields = {key: value for key, value in self.blocks[block].items() if key != "values"}
        fields = {**block_fields, **self.rows[row], **self.columns[column]}
        try:
            experiment = self.experiment.format(**fields)
        except KeyError as error:
            raise ValueError(
                f"experiment '{self.experiment}': field {error} is set by none of block '{block}', "
                f"row '{row}' and column '{column}'"
            ) from None
        state = fields.get("state", "trained")
        valid_states = ("base", "trained", "gain", *self.evaluate.get(experiment, ()))

        numbers = self._published_numbers(block, row, column_index)
        if state not in valid_states:
            raise ValueError(
                f"state '{state}' of {row}, {column}; expected {', '.join(valid_states)}"
            )
        if "metric" in fields and fields["metric"] not in _OUR_METRICS:
            raise ValueError(
                f"metric '{fields['metric']}' of {row}, {column}; expected {', '.join(_OUR_METRICS)}"
            )
        return [
            PaperCell(
                block=block,
                row=row,
                column=column,
                metric=metric,
                our_metric=fields.get("metric", our_metric),
                experiment=experiment,
                state=GAIN if state == "gain" else state,
                dataset=fields.get("dataset", "all"),
                published=published,
            )
            for (metric, our_metric), published in zip(self.metrics.items(), numbers, strict=True)
        ]

    def _published_numbers(
        self, block: str, row: str, column_index: int
    ) -> list[float | str | None]:
        """Return the numbers of all metrics in a row and a column, None where the paper has none."""
        row_values = self.blocks[block].get("values", {}).get(row, [])
        value = row_values[column_index] if column_index < len(row_values) else None
        return _split_metrics(value, len(self.metrics))


def table_names(folder: Path = TABLES) -> list[str]:
    """Return the names of the tables of a folder."""
    return sorted(tables_in_folder(folder))


def tables_in_folder(folder: Path = TABLES) -> dict[str, tuple[Path, Any]]:
    """Return the file and the values of each table of a folder, by name.

    A file has several tables by name. In an older bundle a file is one table, named after the file.

    Raises:
        TableError: a file is not YAML.
    """
    tables: dict[str, tuple[Path, Any]] = {}
    for path in sorted(folder.glob("*.yaml")):
        values = _read_file(path, path.stat().st_mtime_ns)
        is_single = not isinstance(values, dict) or "title" in values
        if is_single:
            values = {path.stem: values}
        for name, table in values.items():
            tables[name] = (path, table)
    return tables


@lru_cache
def _read_file(path: Path, modified_ns: int) -> Any:
    """Read a file of tables; a file that was modified is read again."""
    try:
        return read_yaml(path)
    except yaml.YAMLError as error:
        raise TableError(f"{path}: {' '.join(str(error).split())}; see docs/tables.md") from error


def _split_metrics(value: Any, metric_count: int) -> list[float | str | None]:
    """Split the value of a cell, such as `38.8/63.3`, into a number for each metric.

    Without a value, each metric gets None.

    Raises:
        ValueError: the value has another number of parts.
    """
    if value is None:
        return [None] * metric_count
    texts = str(value).split("/")
    if len(texts) != metric_count:
        raise ValueError(
            f"cell '{value}' has {len(texts)} numbers; expected {metric_count}, one of each metric"
        )
    return [_parse_number(text) for text in texts]


def _parse_number(text: str) -> float | str:
    """Return the number that a text holds, or the text itself if it holds none, such as a range."""
    try:
        return float(text)
    except ValueError:
        return text.strip()
