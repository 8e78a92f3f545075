"""Metrics of predictions (accuracy, F1, AUC, errors) against hidden truths, and how a submission is read."""

import csv
import io
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from rollout.environments.protocol import AgentMistake

ScoredRows = Sequence[
    tuple[Any, Any]
]  # truth and prediction: numbers, or labels, in which 1 and 1.0 are the same


def f1(rows: ScoredRows) -> float:
    """F1 of label 1 where the truths are 0 and 1; else the mean over the truths' labels (macro)."""
    labels = sorted({a for a, _ in rows}, key=str)
    labels = [1.0] if set(labels) <= {0.0, 1.0} else labels
    scores = []
    for label in labels:  # F1 = 2 TP / (2 TP + FP + FN)
        hits = sum(a == label == b for a, b in rows)
        named = sum(a == label for a, _ in rows) + sum(b == label for _, b in rows)
        scores.append(2 * hits / named if named else 0.0)
    return fmean(scores)


def auc(rows: ScoredRows) -> float:
    """The chance that label 1 is predicted higher than label 0, ties counted half; ValueError if one is missing."""
    ones, zeros = (sorted(b for a, b in rows if a == label) for label in (1, 0))
    if not ones or not zeros:
        raise ValueError("auc needs truths of both labels, 0 and 1")
    # AUC = Σ over ones (zeros below + ties / 2) / (n₁ n₀)
    return sum((bisect_left(zeros, b) + bisect_right(zeros, b)) / 2 for b in ones) / (
        len(ones) * len(zeros)
    )


def rmse(rows: ScoredRows) -> float:
    """The root of the mean squared error."""
    return math.sqrt(fmean((a - b) ** 2 for a, b in rows))


def rmsle(rows: ScoredRows) -> float:
    """The root of the mean squared error of log(1 + x); AgentMistake if a prediction is -1 or less."""
    try:
        return rmse([(math.log1p(a), math.log1p(b)) for a, b in rows])
    except ValueError as error:
        raise AgentMistake("rmsle takes predictions above -1") from error


def log_loss(rows: ScoredRows) -> float:
    """The mean of -log p(truth), for probabilities of label 1, which are kept 1e-15 away from 0 and 1."""
    chances = [(a, min(max(b, 1e-15), 1 - 1e-15)) for a, b in rows]
    return -fmean(math.log(p if a else 1 - p) for a, p in chances)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """How predictions are measured."""

    measure: Callable[[ScoredRows], float]
    numeric: bool = True  # predictions must be finite numbers
    scale: float | None = None  # of an error; None: in [0, 1], and more is better

    def score(self, truth: Sequence[str], given: Sequence[str]) -> float:
        """The metric of predictions as a table has them."""
        read = float if self.numeric else _label
        return self.measure([(read(a), read(b)) for a, b in zip(truth, given, strict=True)])

    def normalise(self, score: float) -> float:
        """The score in [0, 1], more being better: exp(-x / scale) of an error   MAPPA, arXiv 2601.23228."""
        return score if self.scale is None else math.exp(-score / self.scale)


TABLE_METRICS: dict[str, Metric] = {  # scales are MAPPA's, that of rmsle our own
    "accuracy": Metric(measure=lambda rows: fmean(a == b for a, b in rows), numeric=False),
    "f1": Metric(measure=f1, numeric=False),
    "auc": Metric(measure=auc),
    "rmse": Metric(measure=rmse, scale=20.0),
    "mae": Metric(measure=lambda rows: fmean(abs(a - b) for a, b in rows), scale=10.0),
    "mse": Metric(measure=lambda rows: fmean((a - b) ** 2 for a, b in rows), scale=400.0),
    "rmsle": Metric(measure=rmsle, scale=1.0),
    "log_loss": Metric(measure=log_loss, scale=1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is to be predicted, how it is measured, and the truth."""

    metric: str  # name in TABLE_METRICS
    id_column: str
    column: str
    truth: Mapping[str, str] = field(repr=False)  # by id; never in a prompt, never in a sandbox
    baseline: float | None = None  # a score that needs no model
    ceiling: float | None = None  # a score that is hardly beaten

    def score(self, submission: str) -> float:
        """The metric of a submission, CSV text with the columns `id_column` and `column`, in any order of rows.

        Raises:
            AgentMistake: it is not of that form, or has not every id once.
        """
        given = self._read(submission)
        metric = TABLE_METRICS[self.metric]
        if metric.numeric:
            for value in given.values():
                if not _finite(value):
                    raise AgentMistake(
                        f"column {self.column} holds {value[:40]!r}; expected finite numbers"
                    )
        try:
            return metric.score(list(self.truth.values()), [given[key] for key in self.truth])
        except OverflowError as error:
            raise AgentMistake(f"column {self.column} holds numbers that are too large") from error

    def normalise(self, score: float, how: Literal["normalised", "gap"]) -> float:
        """A score as reward: in [0, 1] by its metric, or the relative performance gap.

        Raises:
            ValueError: a gap without baseline and ceiling.
        """
        if how == "normalised":
            return TABLE_METRICS[self.metric].normalise(score)
        if self.baseline is None or self.ceiling is None or self.baseline == self.ceiling:
            raise ValueError(
                "reward gap needs a baseline and another ceiling, and the task has none"
            )
        # max(0, (p - b) / (g - b))   DSBench, arXiv 2409.07703, show_results.py
        return max(0.0, (score - self.baseline) / (self.ceiling - self.baseline))

    def beats_baseline(self, score: float) -> bool:
        """Whether a score is better than the baseline's; any is, where there is none."""
        if self.baseline is None:
            return True
        return (
            score > self.baseline
            if TABLE_METRICS[self.metric].scale is None
            else score < self.baseline
        )

    def _read(self, submission: str) -> dict[str, str]:
        rows = csv.DictReader(io.StringIO(submission.lstrip("\ufeff"), newline=""))
        given: dict[str, str] = {}
        try:
            columns = rows.fieldnames or []
            for column in (self.id_column, self.column):
                if column not in columns:
                    found = ", ".join(map(str, columns))[:200] or "nothing"
                    expected = f"{self.id_column},{self.column}"
                    raise AgentMistake(f"no column {column}; expected {expected} and found {found}")
            for row in rows:
                key, value = (row[self.id_column] or "").strip(), (row[self.column] or "").strip()
                if key in given:
                    raise AgentMistake(f"{self.id_column} {key[:40]!r} comes twice")
                given[key] = value
        except csv.Error as error:
            raise AgentMistake(f"not CSV ({error})") from error
        wrong = [key for key in self.truth if not given.get(key)] or [
            key for key in given if key not in self.truth
        ]
        if wrong:
            raise AgentMistake(
                f"{len(wrong)} rows of test.csv have no prediction or are not known, one of them is "
                f"{self.id_column} {wrong[0][:40]!r}; expected {len(self.truth)} rows"
            )
        return given


def _label(value: str) -> object:
    """A label, numbers as numbers: 1 and 1.0 are the same."""
    return float(value) if _finite(value) else value.strip()


def _finite(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False
