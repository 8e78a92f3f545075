"""Metrics of predicted tables, and which submissions can be scored."""

from __future__ import annotations

import math
from random import Random

import pytest

from rollout.environments.predictions import Target
from rollout.environments.protocol import AgentMistake
from rollout.environments.table_metrics import (
    TABLE_METRICS,
    auc,
    f1,
    kappa,
    log_loss,
    spearman,
)

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
        ("median_ae", ["1", "2", "3"], ["1", "4", "0"], 2),
        ("smape_fraction", ["1", "0", "0"], ["3", "0", "1"], (1 + 0 + 2) / 3),
        ("smape", ["1"], ["3"], 100),
        ("r2", ["1", "2", "3"], ["1", "2", "2"], 1 - 1 / 2),
        ("gini", ["0", "0", "1", "1"], ["0.1", "0.4", "0.35", "0.8"], 1 / 2),  # 2 * 3/4 - 1
        ("pearson", ["1", "2", "3"], ["1", "3", "2"], 1 / 2),
        ("pearson", ["1", "2"], ["3", "3"], 0),
        ("pearson", ["1", "2", "3"], ["1e-200", "3e-200", "2e-200"], 1 / 2),  # squares underflow
        ("pearson", ["1", "2", "3"], ["1e200", "3e200", "2e200"], 1 / 2),  # squares overflow
        ("spearman", ["1", "2", "3"], ["10", "1000", "100"], 1 / 2),
        # E[(t - p)^2] = 1/4, and 5/4 for predictions of other rows
        ("kappa", ["1", "2", "3", "2"], ["1", "2", "3", "3"], 1 - (1 / 4) / (5 / 4)),
        ("jaccard", ["So good", "a b"], ["so", "a b"], (1 / 2 + 1) / 2),
        ("hits_at_3", ["b", "d"], ["a b c d", "a b c d"], 1 / 2),
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


def test_rank_metrics_agree_with_scikit_learn_and_scipy() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    stats = pytest.importorskip("scipy.stats")
    random = Random(1)
    truth = random.choices(range(6), k=200)
    labels = random.choices(range(6), k=200)
    pairs = list(zip(truth, labels, strict=True))
    expected = metrics.cohen_kappa_score(truth, labels, weights="quadratic")
    assert kappa(pairs) == pytest.approx(expected)
    assert spearman(pairs) == pytest.approx(stats.spearmanr(truth, labels)[0])


def test_several_columns_are_scored_by_their_mean_or_row_by_row() -> None:
    truth = {"1": ["1", "0"], "2": ["0", "1"]}
    target = Target(metric="mae", id_column="id", columns=("a", "b"), truth=truth)
    assert target.score("id,b,a\n1,0,0.5\n2,0,0.5\n") == pytest.approx((1 / 2 + 1 / 2) / 2)
    with pytest.raises(AgentMistake, match="no column b; expected id,a,b and found id, a"):
        target.score("id,a\n1,0\n2,0\n")
    with pytest.raises(AgentMistake, match="one of them is id '2'"):
        target.score("id,a,b\n1,0,1\n2,0,\n")
    by_row = Target(metric="class_log_loss", id_column="id", columns=("a", "b"), truth=truth)
    # Probabilities of the right classes: 1/2, and 3/4 after scaling.
    submission = "id,a,b\n1,0.5,0.5\n2,1,3\n"
    assert by_row.score(submission) == pytest.approx(-(math.log(0.5) + math.log(0.75)) / 2)


def test_whole_numbers_are_expected_by_kappa() -> None:
    target = Target(metric="kappa", id_column="id", column="y", truth={"1": "1", "2": "2"})
    assert target.score("id,y\n1,1.0\n2,2\n") == 1.0
    with pytest.raises(AgentMistake, match=r"holds '1\.5'; expected whole numbers"):
        target.score("id,y\n1,1.5\n2,2\n")


@pytest.mark.parametrize(
    ("truth", "message"),
    [(["1", "1"], "gini needs truths that differ"), (["1", "-1"], "truths whose sum is not 0")],
)
def test_gini_needs_truths_that_differ_and_have_a_sum(truth: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TABLE_METRICS["gini"].score(truth, ["1", "2"])


def test_rmsle_needs_truths_and_predictions_above_minus_one() -> None:
    rmsle = TABLE_METRICS["rmsle"]
    with pytest.raises(AgentMistake, match="rmsle takes predictions above -1"):
        rmsle.score(["0", "1"], ["0", "-1"])
    with pytest.raises(ValueError, match="rmsle needs truths above -1") as refusal:
        rmsle.score(["0", "-1"], ["0", "1"])
    assert not isinstance(refusal.value, AgentMistake)


@pytest.mark.parametrize(
    ("metric", "rows"),
    [
        ("r2", 3),  # 0.1 + 0.1 + 0.1 is rounded up, and so is their mean
        ("gini", 7),  # the shares 1/7, 2/7, ... are rounded
    ],
)
def test_equal_truths_are_refused_where_their_sums_are_rounded(metric: str, rows: int) -> None:
    predictions = [str(row) for row in range(rows)]
    with pytest.raises(ValueError, match=f"{metric} needs truths that differ"):
        TABLE_METRICS[metric].score(["0.1"] * rows, predictions)


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


@pytest.mark.parametrize(("metric", "cell"), [("smape", "1e308"), ("r2", "1.2e154")])
def test_a_score_that_overflows_is_a_mistake_of_the_agent(metric: str, cell: str) -> None:
    target = Target(metric=metric, id_column="id", column="y", truth={"1": "1", "2": "5"})
    with pytest.raises(AgentMistake, match="column y holds numbers that are too large"):
        target.score(f"id,y\n1,{cell}\n2,{cell}\n")


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
