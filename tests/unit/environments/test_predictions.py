"""Metrics of predicted tables, and which submissions can be scored."""

from __future__ import annotations

import math
from random import Random

import pytest

from rollout.environments.predictions import TABLE_METRICS, Target, auc, f1, log_loss
from rollout.environments.protocol import AgentMistake

LABELS = ["1", "1", "0", "0", "1"]
PREDICTED_LABELS = ["1", "0", "0", "1", "1.0"]
VALUES = ["1", "2", "3"]
PREDICTED_VALUES = ["1", "4", "0"]


@pytest.mark.parametrize(
    ("metric", "truth", "predictions", "expected"),
    [
        ("accuracy", LABELS, PREDICTED_LABELS, 3 / 5),
        ("accuracy", ["a", " b"], ["a ", "c"], 1 / 2),
        ("f1", LABELS, PREDICTED_LABELS, 2 / 3),  # 2 true positives, 3 positives, 3 predicted
        ("f1", ["a", "a", "b"], ["a", "b", "b"], 2 / 3),  # mean of 2/3 and 2/3
        ("f1", ["0", "1"], ["0", "0"], 0.0),
        ("auc", ["0", "0", "1", "1"], ["0.1", "0.4", "0.35", "0.8"], 3 / 4),
        ("auc", ["0", "1", "1"], ["0.5", "0.5", "0.5"], 1 / 2),
        ("auc", ["0", "1", "0", "1"], ["1", "2", "2", "3"], 7 / 8),  # one of four pairs is a tie
        ("rmse", VALUES, PREDICTED_VALUES, math.sqrt(13 / 3)),
        ("mse", VALUES, PREDICTED_VALUES, 13 / 3),
        ("mae", VALUES, PREDICTED_VALUES, 5 / 3),
        ("rmsle", ["0", "1"], ["1", "1"], math.log(2) / math.sqrt(2)),
        ("log_loss", ["1", "0"], ["0.5", "0.25"], -(math.log(0.5) + math.log(0.75)) / 2),
    ],
)
def test_metrics(metric: str, truth: list[str], predictions: list[str], expected: float) -> None:
    assert TABLE_METRICS[metric].score(truth, predictions) == pytest.approx(expected)


def test_metrics_of_two_classes_agree_with_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = Random(1)
    truth = random.choices((0, 1), k=200)
    labels = random.choices((0, 1), k=200)
    scores = [round(random.random(), 1) for _ in truth]  # with ties
    probabilities = [0.05 + 0.9 * score for score in scores]

    assert f1(list(zip(truth, labels, strict=True))) == pytest.approx(
        metrics.f1_score(truth, labels)
    )
    assert auc(list(zip(truth, scores, strict=True))) == pytest.approx(
        metrics.roc_auc_score(truth, scores)
    )
    assert log_loss(list(zip(truth, probabilities, strict=True))) == pytest.approx(
        metrics.log_loss(truth, probabilities)
    )


def test_macro_f1_agrees_with_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = Random(1)
    truth = random.choices("abc", k=200)
    labels = random.choices("abc", k=200)
    expected = metrics.f1_score(truth, labels, average="macro")
    assert f1(list(zip(truth, labels, strict=True))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "score", "expected"),
    [
        ("rmse", 10.0, math.exp(-0.5)),
        ("mae", 10.0, math.exp(-1)),
        ("mse", 10.0, math.exp(-0.025)),
        ("log_loss", 10.0, math.exp(-10)),
        ("accuracy", 0.7, 0.7),
    ],
)
def test_scores_are_normalised_by_the_metrics_scale(
    metric: str, score: float, expected: float
) -> None:
    assert TABLE_METRICS[metric].normalise(score) == pytest.approx(expected)


def make_target(
    metric: str = "rmse", baseline: float | None = None, ceiling: float | None = None
) -> Target:
    """Return a target of two rows, of ids 7 and 8."""
    return Target(
        metric=metric,
        id_column="id",
        column="y",
        truth={"7": "1", "8": "2"},
        baseline=baseline,
        ceiling=ceiling,
    )


def test_rows_are_matched_by_id() -> None:
    target = make_target()
    assert target.score("y,id\n2,8\n1,7\n") == 0.0
    assert target.score("\ufeffid,y,note\n7,1,x\n8,5,x\n") == pytest.approx(3 / math.sqrt(2))


@pytest.mark.parametrize(
    ("submission", "message"),
    [
        ("", "no column id; expected id,y and found nothing"),
        ("id,z\n7,1\n", "no column y"),
        ("id,y\n7,1\n", "1 rows .* one of them is id '8'; expected 2 rows"),
        ("id,y\n7,1\n8,\n", "one of them is id '8'"),
        ("id,y\n7,1\n8,2\n9,3\n", "one of them is id '9'"),
        ("id,y\n7,1\n7,1\n", "'7' comes twice"),
        ("id,y\n7,1\n8,much\n", "holds 'much'; expected finite numbers"),
        ("id,y\n7,1\n8,nan\n", "holds 'nan'"),
        ("id,y\n7,1\n8,1e300\n", "numbers that are too large"),
        (f"id,y\n7,1\n8,{'9' * 200_000}\n", "not CSV .field larger"),
        (f"{'i' * 200_000},y\n7,1\n", "not CSV .field larger"),
    ],
)
def test_other_submissions_are_mistakes_of_the_agent(submission: str, message: str) -> None:
    with pytest.raises(AgentMistake, match=message):
        make_target().score(submission)


@pytest.mark.parametrize(
    ("score", "expected"), [(5.0, 0.0), (4.0, 0.0), (2.5, 0.5), (1.0, 1.0), (0.0, 4 / 3)]
)
def test_the_gap_of_an_error_is_dsbenchs(score: float, expected: float) -> None:
    """max(0, (p - b) / (g - b))"""
    assert make_target("rmse", baseline=4.0, ceiling=1.0).normalise(score, "gap") == expected


def test_the_gap_of_a_share_is_dsbenchs() -> None:
    target = make_target("accuracy", baseline=0.5, ceiling=0.9)
    assert target.normalise(0.6, "gap") == pytest.approx(0.25)


def test_a_gap_needs_a_baseline_and_a_ceiling() -> None:
    with pytest.raises(ValueError, match=r"differ; the task has baseline None and ceiling None$"):
        make_target().normalise(1.0, "gap")
    with pytest.raises(ValueError, match=r"differ; the task has baseline 0\.5 and ceiling 0\.5$"):
        make_target(baseline=0.5, ceiling=0.5).normalise(1.0, "gap")


def test_a_score_beats_the_baseline_if_it_is_better() -> None:
    error = make_target("rmse", baseline=4.0, ceiling=1.0)
    assert not error.beats_baseline(4.0)
    assert error.beats_baseline(3.9)
    share = make_target("accuracy", baseline=0.5, ceiling=0.9)
    assert not share.beats_baseline(0.5)
    assert share.beats_baseline(0.6)
    assert make_target().beats_baseline(99)
