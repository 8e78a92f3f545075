"""Metrics by hand, and which submissions can be scored."""

from __future__ import annotations

import math

import pytest

from rollout.environments.predictions import TABLE_METRICS, Target
from rollout.environments.protocol import AgentMistake

LABELS, GUESSES = ["1", "1", "0", "0", "1"], ["1", "0", "0", "1", "1.0"]
VALUES, PREDICTED = ["1", "2", "3"], ["1", "4", "0"]


@pytest.mark.parametrize(
    ("metric", "truth", "given", "score"),
    [
        ("accuracy", LABELS, GUESSES, 3 / 5),
        ("accuracy", ["a", " b"], ["a ", "c"], 1 / 2),
        ("f1", LABELS, GUESSES, 2 / 3),  # 2 hits, 3 true, 3 named
        ("f1", ["a", "a", "b"], ["a", "b", "b"], 2 / 3),  # macro of 2/3 and 2/3
        ("f1", ["0", "1"], ["0", "0"], 0.0),
        ("auc", ["0", "0", "1", "1"], ["0.1", "0.4", "0.35", "0.8"], 3 / 4),
        ("auc", ["0", "1", "1"], ["0.5", "0.5", "0.5"], 1 / 2),
        ("auc", ["0", "1", "0", "1"], ["1", "2", "2", "3"], 7 / 8),  # one of four pairs is a tie
        ("rmse", VALUES, PREDICTED, math.sqrt(13 / 3)),
        ("mse", VALUES, PREDICTED, 13 / 3),
        ("mae", VALUES, PREDICTED, 5 / 3),
        ("rmsle", ["0", "1"], ["1", "1"], math.log(2) / math.sqrt(2)),
        ("log_loss", ["1", "0"], ["0.5", "0.25"], -(math.log(0.5) + math.log(0.75)) / 2),
    ],
)
def test_metrics(metric: str, truth: list[str], given: list[str], score: float) -> None:
    assert TABLE_METRICS[metric].score(truth, given) == pytest.approx(score)


def test_errors_are_normalised_by_mappas_scales() -> None:
    assert [
        TABLE_METRICS[name].normalise(10.0) for name in ("rmse", "mae", "mse", "log_loss")
    ] == pytest.approx([math.exp(-0.5), math.exp(-1), math.exp(-0.025), math.exp(-10)])
    assert TABLE_METRICS["accuracy"].normalise(0.7) == 0.7


def target(metric: str = "rmse", **ends: float) -> Target:
    return Target(metric=metric, id_column="id", column="y", truth={"7": "1", "8": "2"}, **ends)


def test_rows_are_matched_by_id() -> None:
    assert target().score("y,id\n2,8\n1,7\n") == 0.0
    assert target().score("\ufeffid,y,note\n7,1,x\n8,5,x\n") == pytest.approx(3 / math.sqrt(2))


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_other_submissions_are_refused_without_a_word_on_the_truth(text: str, message: str) -> None:
    with pytest.raises(AgentMistake, match=message):
        target().score(text)


def test_the_gap_is_dsbenchs() -> None:
    """max(0, (p - b) / (g - b)), whether more is better or less."""
    error, share = target(baseline=4.0, ceiling=1.0), target("accuracy", baseline=0.5, ceiling=0.9)
    assert [error.normalise(score, "gap") for score in (5.0, 4.0, 2.5, 1.0, 0.0)] == [
        0.0,
        0.0,
        0.5,
        1.0,
        4 / 3,
    ]
    assert share.normalise(0.6, "gap") == pytest.approx(0.25)
    assert [error.beats_baseline(4.0), error.beats_baseline(3.9)] == [False, True]
    assert [share.beats_baseline(0.5), share.beats_baseline(0.6), target().beats_baseline(99)] == [
        False,
        True,
        True,
    ]
    with pytest.raises(ValueError, match="needs a baseline and another ceiling"):
        target().normalise(1.0, "gap")
