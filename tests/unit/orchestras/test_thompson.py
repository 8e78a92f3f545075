"""Posteriors by hand, and a search whose draws are the posteriors' means."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from random import Random
from statistics import fmean

import pytest

from rollout.orchestras.ab_mcts import ScoreDraw, TreeSearch, draw_beta, draw_gaussian


def test_a_beta_posterior_counts_successes_and_failures() -> None:
    assert draw_beta([], Random(0)) == Random(0).betavariate(0.5, 0.5)
    assert draw_beta([1.0, 0.25], Random(0)) == Random(0).betavariate(
        1.75, 1.25
    )  # 0.5 + 1.25, 0.5 + 0.75
    with pytest.raises(ValueError, match=r"from 0 to 1, and one is -1; choose gaussian"):
        draw_beta([0.5, -1.0], Random(0))


@pytest.mark.parametrize(
    ("scores", "m", "kappa", "tau2"),
    [
        ([], 0.0, 1.0, 0.1),
        # n = 2, mean 0.5, spread 0.5: κ = ν = 3, m = 1 / 3, τ² = (0.1 + 0.5 + 2 · 0.25 / 3) / 3
        ([1.0, 0.0], 1 / 3, 3.0, (0.6 + 0.5 / 3) / 3),
    ],
)
def test_a_gaussian_posterior_is_the_normal_inverse_chi_squared_one(
    scores: list[float], m: float, kappa: float, tau2: float
) -> None:
    hand = Random(0)
    variance = kappa * tau2 / hand.gammavariate(kappa / 2, 2.0)  # ν = κ
    assert draw_gaussian(scores, Random(0)) == pytest.approx(
        hand.gauss(m, sqrt(variance / kappa)), rel=1e-12
    )


@pytest.mark.parametrize(
    ("draw", "scores", "mean"),
    [(draw_beta, [1.0, 1.0, 0.5], 3 / 4), (draw_gaussian, [0.5] * 9, 9 * 0.5 / 10)],
)
def test_draws_lie_around_the_mean(draw: ScoreDraw, scores: list[float], mean: float) -> None:
    draws = [draw(scores, Random(seed)) for seed in range(2000)]
    assert fmean(draws) == pytest.approx(mean, abs=0.02)
    assert draws[0] == draw(scores, Random(0))


def certain(scores: Sequence[float], random: Random) -> float:
    """The mean of what was seen, 0.5 before."""
    return fmean(scores) if scores else 0.5


def test_where_nothing_is_known_of_below_it_goes_wider_only_if_that_pays() -> None:
    search = TreeSearch(["a"], certain)
    assert search.select(Random(0)) == (search.root, "a")
    poor = search.add(search.root, "a", 0.25)
    # GEN promises 0.25, CONT nothing seen: 0.5; the leaf below can only be expanded
    assert search.select(Random(0)) == (poor, "a")
    good = search.add(poor, "a", 0.75)
    assert (poor.name, good.name) == ("0", "0.0")
    assert (search.root.children, search.root.below, poor.seen) == ([poor], [0.75], [0.25, 0.75])
    assert (poor.children, poor.below, good.seen) == ([good], [], [0.75])
    # at the root CONT 0.75 > GEN 0.25; at the node GEN 0.75 > CONT 0.5: wider there
    assert search.select(Random(0)) == (poor, "a")
    second = search.add(poor, "a", 0.0)
    assert (second.name, poor.children, search.root.below) == ("0.1", [good, second], [0.75, 0.0])
    # at the node GEN 0.375 < CONT 0.5: deeper, at the better child, 0.75 > 0
    assert search.select(Random(0)) == (good, "a")


def test_the_agent_whose_nodes_score_best_makes_the_next() -> None:
    search = TreeSearch(["a", "b"], certain)
    assert search.select(Random(0))[1] == "a"  # the first of equals
    search.add(search.root, "a", 0.25)
    assert search.select(Random(0))[1] == "b"
    search.add(search.root, "b", 0.125)
    assert search.select(Random(0))[1] == "a"


def test_scores_outside_the_belief_leave_the_tree_as_it_was() -> None:
    search = TreeSearch(["a"], draw_beta)
    with pytest.raises(ValueError, match="choose gaussian"):
        search.add(search.root, "a", 2.0)
    assert (search.root.children, search.scores) == ([], {"a": []})
