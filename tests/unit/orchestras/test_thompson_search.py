"""Thompson search: posteriors computed by hand, and a tree whose draws are mean scores."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from random import Random
from statistics import fmean

import pytest

from rollout.orchestras.thompson_search import ScoreDraw, TreeSearch, draw_beta, draw_gaussian


def test_the_beta_posterior_counts_successes_and_failures() -> None:
    assert draw_beta([], Random(0)) == Random(0).betavariate(0.5, 0.5)
    # 0.5 + (1 + 0.25) and 0.5 + (0 + 0.75)
    assert draw_beta([1.0, 0.25], Random(0)) == Random(0).betavariate(1.75, 1.25)


@pytest.mark.parametrize(
    ("scores", "m", "kappa", "tau_squared"),
    [
        ([], 0.0, 1.0, 0.1),
        # n = 2, mean 0.5, squares 0.5: κ = ν = 3, m = 1 / 3, τ² = (0.1 + 0.5 + 2 · 0.25 / 3) / 3
        ([1.0, 0.0], 1 / 3, 3.0, (0.6 + 0.5 / 3) / 3),
    ],
)
def test_the_gaussian_posterior_is_normal_inverse_chi_squared(
    scores: list[float], m: float, kappa: float, tau_squared: float
) -> None:
    random = Random(0)
    variance = kappa * tau_squared / random.gammavariate(kappa / 2, 2.0)  # ν = κ
    expected = random.gauss(m, sqrt(variance / kappa))
    assert draw_gaussian(scores, Random(0)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("draw", "scores", "posterior_mean"),
    [(draw_beta, [1.0, 1.0, 0.5], 3 / 4), (draw_gaussian, [0.5] * 9, 9 * 0.5 / 10)],
)
def test_draws_have_the_mean_of_the_posterior(
    draw: ScoreDraw, scores: list[float], posterior_mean: float
) -> None:
    draws = [draw(scores, Random(seed)) for seed in range(2000)]
    assert fmean(draws) == pytest.approx(posterior_mean, abs=0.02)
    assert draws[0] == draw(scores, Random(0))


def draw_mean(scores: Sequence[float], random: Random) -> float:
    """Return the mean score, 0.5 without scores, in place of a random draw."""
    return fmean(scores) if scores else 0.5


def test_the_tree_gets_wider_or_deeper_by_the_higher_draw() -> None:
    search = TreeSearch(["a"], draw_mean)
    root = search.root
    assert search.select(Random(0)) == (root, "a")

    first = search.add(root, "a", 0.25)
    # At the root GEN draws 0.25, and CONT 0.5 without scores. A node without children is expanded.
    assert search.select(Random(0)) == (first, "a")

    second = search.add(first, "a", 0.75)
    assert (first.name, second.name) == ("0", "0.0")
    assert root.children == [first]
    assert root.scores_below_children == [0.75]
    assert first.children == [second]
    assert first.scores_below_children == []
    assert first.subtree_scores == [0.25, 0.75]
    assert second.subtree_scores == [0.75]
    # At the root GEN draws 0.25 and CONT 0.75; at the first node GEN draws 0.75 and CONT 0.5.
    assert search.select(Random(0)) == (first, "a")

    third = search.add(first, "a", 0.0)
    assert third.name == "0.1"
    assert first.children == [second, third]
    assert root.scores_below_children == [0.75, 0.0]
    # At the first node GEN draws 0.375 and CONT 0.5; the second node draws 0.75, the third 0.
    assert search.select(Random(0)) == (second, "a")


def test_the_agent_with_the_highest_draw_makes_the_next_node() -> None:
    search = TreeSearch(["a", "b"], draw_mean)
    assert search.select(Random(0))[1] == "a"  # both draw 0.5
    search.add(search.root, "a", 0.25)
    assert search.select(Random(0))[1] == "b"
    search.add(search.root, "b", 0.125)
    assert search.select(Random(0))[1] == "a"
