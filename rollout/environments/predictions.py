"""Metrics of predicted tables, and the scoring of a submitted CSV file against hidden truths.

The metrics are computed in plain Python. For tables of some thousand rows this is 10 to 30 times as
fast as scikit-learn, whose import takes a second.
"""

import csv
import io
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from rollout.environments.protocol import AgentMistake

# Pairs of truth and prediction: finite numbers, or labels.
Pairs = Sequence[tuple[Any, Any]]

_MIN_PROBABILITY = 1e-15


def accuracy(pairs: Pairs) -> float:
    """Return the share of predictions that equal the truth."""
    return fmean(truth == prediction for truth, prediction in pairs)


def f1(pairs: Pairs) -> float:
    """Return the F1 score of label 1 if all truths are 0 or 1, else the mean over the labels."""
    labels = sorted({truth for truth, _ in pairs}, key=str)
    if set(labels) <= {0.0, 1.0}:
        labels = [1.0]

    scores = []
    for label in labels:
        true_positives = sum(truth == label == prediction for truth, prediction in pairs)
        positives = sum(truth == label for truth, _ in pairs)
        predicted = sum(prediction == label for _, prediction in pairs)
        # F1 = 2 TP / (2 TP + FP + FN), and TP + FN and TP + FP are the two counts
        total = positives + predicted
        scores.append(2 * true_positives / total if total else 0.0)
    return fmean(scores)


def auc(pairs: Pairs) -> float:
    """Return the area under the ROC curve.

    It is the probability that a row of label 1 has a higher prediction than one of label 0; ties
    count half.

    Raises:
        ValueError: one of the labels 0 and 1 has no row.
    """
    ones = [prediction for truth, prediction in pairs if truth == 1]
    zeros = sorted(prediction for truth, prediction in pairs if truth == 0)
    if not ones or not zeros:
        raise ValueError("auc needs truths of both labels, 0 and 1")

    pairs_in_order = 0.0
    for prediction in ones:
        below = bisect_left(zeros, prediction)
        below_or_equal = bisect_right(zeros, prediction)
        pairs_in_order += (below + below_or_equal) / 2
    return pairs_in_order / (len(ones) * len(zeros))


def mae(pairs: Pairs) -> float:
    """Return the mean absolute error."""
    return fmean(abs(truth - prediction) for truth, prediction in pairs)


def mse(pairs: Pairs) -> float:
    """Return the mean squared error."""
    return fmean((truth - prediction) ** 2 for truth, prediction in pairs)


def rmse(pairs: Pairs) -> float:
    """Return the root mean squared error."""
    return math.sqrt(mse(pairs))


def rmsle(pairs: Pairs) -> float:
    """Return the root mean squared error of log(1 + x).

    Raises:
        AgentMistake: a prediction is -1 or less.
    """
    try:
        logarithms = [(math.log1p(truth), math.log1p(prediction)) for truth, prediction in pairs]
    except ValueError as error:
        raise AgentMistake("rmsle takes predictions above -1") from error
    return rmse(logarithms)


def log_loss(pairs: Pairs) -> float:
    """Return the mean of -log p(truth), for predicted probabilities of label 1.

    Probabilities are clipped to [1e-15, 1 - 1e-15].
    """
    losses = []
    for truth, prediction in pairs:
        probability = min(max(prediction, _MIN_PROBABILITY), 1 - _MIN_PROBABILITY)
        losses.append(-math.log(probability if truth else 1 - probability))
    return fmean(losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of predictions, and how its value becomes a reward.

    Attributes:
        measure: computes it from pairs of truth and prediction.
        numeric: True if predictions must be finite numbers, False for labels.
        scale: value of an error at which the reward is 1/e; None for a metric in [0, 1] of which
            more is better.
    """

    measure: Callable[[Pairs], float]
    numeric: bool = True
    scale: float | None = None

    def score(self, truth: Sequence[str], predictions: Sequence[str]) -> float:
        """Compute the metric from the cells of two columns."""
        convert: Callable[[str], object] = float if self.numeric else _label
        pairs = [
            (convert(true_cell), convert(predicted_cell))
            for true_cell, predicted_cell in zip(truth, predictions, strict=True)
        ]
        return self.measure(pairs)

    def normalise(self, score: float) -> float:
        """Map a score to [0, 1], more being better: exp(-x / scale) for an error.

        MAPPA, arXiv 2601.23228.
        """
        return score if self.scale is None else math.exp(-score / self.scale)


# The scales are MAPPA's, but for those of rmsle and log_loss.
TABLE_METRICS: dict[str, Metric] = {
    "accuracy": Metric(measure=accuracy, numeric=False),
    "f1": Metric(measure=f1, numeric=False),
    "auc": Metric(measure=auc),
    "rmse": Metric(measure=rmse, scale=20.0),
    "mae": Metric(measure=mae, scale=10.0),
    "mse": Metric(measure=mse, scale=400.0),
    "rmsle": Metric(measure=rmsle, scale=1.0),
    "log_loss": Metric(measure=log_loss, scale=1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The column to predict, its metric, and the truth.

    Attributes:
        metric: name in TABLE_METRICS.
        id_column: column that identifies a row.
        column: column to predict.
        truth: true value by id. It is in no agent's prompt, and not in the sandbox.
        baseline: score that needs no model.
        ceiling: score that is hardly exceeded.
    """

    metric: str
    id_column: str
    column: str
    truth: Mapping[str, str] = field(repr=False)
    baseline: float | None = None
    ceiling: float | None = None

    def score(self, submission: str) -> float:
        """Compute the metric of a submission.

        Args:
            submission: CSV text with the columns `id_column` and `column`, rows in any order.

        Raises:
            AgentMistake: the submission has another form, or does not have every id once.
            ValueError: the truths do not allow the metric: auc needs both labels.
        """
        predictions = self._parse(submission)
        metric = TABLE_METRICS[self.metric]
        if metric.numeric:
            for cell in predictions.values():
                if not _is_finite(cell):
                    raise AgentMistake(
                        f"column {self.column} holds {cell[:40]!r}; expected finite numbers"
                    )
        try:
            return metric.score(list(self.truth.values()), [predictions[key] for key in self.truth])
        except OverflowError as error:
            raise AgentMistake(f"column {self.column} holds numbers that are too large") from error

    def normalise(self, score: float, how: Literal["normalised", "gap"]) -> float:
        """Convert a score to a reward.

        Args:
            how: "normalised" maps it to [0, 1] by its metric. "gap" is the share of the way from
                the baseline to the ceiling, max(0, (p - b) / (g - b)), as in DSBench, arXiv
                2409.07703.

        Raises:
            ValueError: the gap needs a baseline and a ceiling that differ.
        """
        if how == "normalised":
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
        if TABLE_METRICS[self.metric].scale is None:
            return score > self.baseline
        return score < self.baseline

    def _parse(self, submission: str) -> dict[str, str]:
        """Return the predicted cell of each id."""
        rows = csv.DictReader(io.StringIO(submission.lstrip("\ufeff"), newline=""))
        predictions: dict[str, str] = {}
        try:
            self._check_columns(rows.fieldnames or [])
            for row in rows:
                key = (row[self.id_column] or "").strip()
                if key in predictions:
                    raise AgentMistake(f"{self.id_column} {key[:40]!r} comes twice")
                predictions[key] = (row[self.column] or "").strip()
        except csv.Error as error:
            raise AgentMistake(f"not CSV ({error})") from error

        missing = [key for key in self.truth if not predictions.get(key)]
        unknown = [key for key in predictions if key not in self.truth]
        wrong = missing or unknown
        if wrong:
            raise AgentMistake(
                f"{len(wrong)} rows of test.csv have no prediction or are not known, one of them "
                f"is {self.id_column} {wrong[0][:40]!r}; expected {len(self.truth)} rows"
            )
        return predictions

    def _check_columns(self, names: Sequence[str]) -> None:
        for column in (self.id_column, self.column):
            if column not in names:
                header = ", ".join(map(str, names))[:200] or "nothing"
                raise AgentMistake(
                    f"no column {column}; expected {self.id_column},{self.column} "
                    f"and found {header}"
                )


def _label(cell: str) -> object:
    """Convert a cell to a label, in which 1 and 1.0 are the same."""
    return float(cell) if _is_finite(cell) else cell.strip()


def _is_finite(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False
