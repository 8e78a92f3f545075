"""Scoring of a submitted CSV file against hidden truths."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout.environments.protocol import AgentMistake
from rollout.environments.table_metrics import TABLE_METRICS, is_finite_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The column or columns to predict, their metric, and the truth.

    The score of several columns is the mean of their scores, unless the metric measures rows
    (`Metric.by_row`).

    Attributes:
        metric: name in TABLE_METRICS.
        id_column: column that identifies a row.
        column: column to predict; "" if there are several.
        columns: several columns to predict.
        truth: true value by id or, if there are several columns, the list of their values by id. It
            is in no agent's prompt, and not in the sandbox.
        baseline: score that is reached without a model.
        ceiling: score that is hardly exceeded.
    """

    metric: str
    id_column: str
    column: str = ""
    truth: Mapping[str, Any] = field(repr=False)
    baseline: float | None = None
    ceiling: float | None = None
    columns: Sequence[str] = ()

    @property
    def predicted_columns(self) -> Sequence[str]:
        """The columns to predict."""
        return self.columns or (self.column,)

    def score(self, submission: str) -> float:
        """Compute the metric of a submission.

        Args:
            submission: CSV text with the id column and the predicted columns, rows in any order.

        Raises:
            AgentMistake: the submission has another form, or does not have every id once.
            ValueError: the truths do not allow the metric, such as auc with one label only.
        """
        predictions = self._parse(submission)
        metric = TABLE_METRICS[self.metric]
        names = self.predicted_columns
        columns = {
            name: [predictions[key][index] for key in self.truth]
            for index, name in enumerate(names)
        }
        if metric.kind in ("number", "integer"):
            for name, cells in columns.items():
                self._check_cells(name, cells)
        try:
            score = metric.score_columns(
                [self._true_cells(index) for index in range(len(names))], list(columns.values())
            )
        except OverflowError:
            score = math.inf
        # Not every operation that overflows raises OverflowError; 1e308 * 10 is infinite.
        if math.isinf(score):
            raise AgentMistake(f"column {', '.join(names)[:80]} holds numbers that are too large")
        return score

    def _true_cells(self, index: int) -> list[str]:
        """Return the true cells of a column, one for each id.

        Args:
            index: index of the column in `predicted_columns`.
        """
        if not self.columns:
            return list(self.truth.values())
        return [cells[index] for cells in self.truth.values()]

    def _check_cells(self, name: str, cells: Sequence[str]) -> None:
        """Raise AgentMistake if a column of numbers holds something else."""
        metric = TABLE_METRICS[self.metric]
        for cell in cells:
            if not is_finite_number(cell):
                raise AgentMistake(f"column {name} holds {cell[:40]!r}; expected finite numbers")
            if metric.kind == "integer" and not float(cell).is_integer():
                raise AgentMistake(f"column {name} holds {cell[:40]!r}; expected whole numbers")

    def normalise(self, score: float, reward_kind: Literal["normalised", "gap"]) -> float:
        """Convert a score to a reward.

        Args:
            score: value of the metric.
            reward_kind: "normalised" maps the score to [0, 1] by its metric. "gap" is the share of the
                way from the baseline to the ceiling, as in DSBench (arXiv 2409.07703); it is 0 for a
                score that is worse than the baseline, and above 1 for one that is better than the
                ceiling.

        Raises:
            ValueError: the gap needs a baseline and a ceiling that differ.
        """
        if reward_kind == "normalised":
            return TABLE_METRICS[self.metric].normalise(score)
        if self.baseline is None or self.ceiling is None or self.baseline == self.ceiling:
            raise ValueError(
                "reward gap needs a baseline and a ceiling that differ; the task has baseline "
                f"{self.baseline} and ceiling {self.ceiling}"
            )
        return max(0.0, (score - self.baseline) / (self.ceiling - self.baseline))

    def beats_baseline(self, score: float) -> bool:
        """Return True if a score is better than the baseline's, or if there is no baseline."""
        if self.baseline is None:
            return True
        if TABLE_METRICS[self.metric].larger_is_better:
            return score > self.baseline
        return score < self.baseline

    def _parse(self, submission: str) -> dict[str, list[str]]:
        """Return the predicted cells of each id, one for each column."""
        rows = csv.DictReader(io.StringIO(submission.lstrip("\ufeff"), newline=""))
        predictions: dict[str, list[str]] = {}
        try:
            self._check_columns(rows.fieldnames or [])
            for row in rows:
                key = (row[self.id_column] or "").strip()
                if key in predictions:
                    raise AgentMistake(f"{self.id_column} {key[:40]!r} comes twice")
                predictions[key] = [(row[name] or "").strip() for name in self.predicted_columns]
        except csv.Error as error:
            raise AgentMistake(f"not CSV ({error})") from error

        missing = [key for key in self.truth if key not in predictions or "" in predictions[key]]
        unknown = [key for key in predictions if key not in self.truth]
        wrong = missing or unknown
        if wrong:
            raise AgentMistake(
                f"{len(wrong)} rows of test.csv have no prediction or are not known, one of them "
                f"is {self.id_column} {wrong[0][:40]!r}; expected {len(self.truth)} rows"
            )
        return predictions

    def _check_columns(self, names: Sequence[str]) -> None:
        """Raise AgentMistake if the id column or a predicted column is not among the names."""
        expected = [self.id_column, *self.predicted_columns]
        for column in expected:
            if column not in names:
                header = ", ".join(map(str, names))[:200] or "nothing"
                raise AgentMistake(
                    f"no column {column}; expected {','.join(expected)[:200]} and found {header}"
                )
