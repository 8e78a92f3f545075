"""Posteriors by hand, and a search whose draws are the posteriors' means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

import pytest

from rollout.orchestras.ab_mcts import Beta, Gaussian, TreeSearch


def test_a_beta_posterior_counts_successes_and_failures() -> None:
    assert Beta().after([]) == Beta(a=0.5, b=0.5)
    assert Beta().after([1.0, 0.25]) == Beta(a=1.75, b=1.25)  # 0.5 + 1.25, 0.5 + 0.75
    with pytest.raises(ValueError, match=r"from 0 to 1, and one is -1; choose gaussian"):
        Beta().after([0.5, -1.0])


def test_a_gaussian_posterior_is_the_normal_inverse_chi_squared_one() -> None:
    assert Gaussian().after([]) == Gaussian(m=0.0, kappa=1.0, nu=1.0, tau2=0.1)
    # n = 2, mean 0.5, spread 0.5: κ = 3, ν = 3, m = 1 / 3, τ² = (0.1 + 0.5 + 2 · 0.25 / 3) / 3
    after = Gaussian().after([1.0, 0.0])
    assert (after.m, after.kappa, after.nu) == (pytest.approx(1 / 3), 3.0, 3.0)
    assert after.tau2 == pytest.approx((0.6 + 0.5 / 3) / 3)
    # all at once or one after the other is the same belief
    again = Gaussian().after([1.0]).after([0.0])
    assert (again.m, again.kappa, again.nu, again.tau2) == pytest.approx(
        (after.m, after.kappa, after.nu, after.tau2), rel=1e-12
    )


@pytest.mark.parametrize(("belief", "mean"), [(Beta(a=3.0, b=1.0), 0.75), (Gaussian(m=0.4, kappa=9.0, nu=9.0), 0.4)])
def test_draws_lie_around_the_mean(belief: Beta | Gaussian, mean: float) -> None:
    draws = [belief.draw(Random(seed)) for seed in range(2000)]
    assert fmean(draws) == pytest.approx(mean, abs=0.02)
    assert draws[0] == belief.draw(Random(0))


@dataclass(frozen=True)
class Certain:
    """Draws the mean of what was seen, `prior` before."""

    prior: float
    scores: tuple[float, ...] = ()

    def after(self, scores: Sequence[float]) -> Certain:
        return Certain(self.prior, (*self.scores, *scores))

    def draw(self, random: Random) -> float:
        return fmean(self.scores) if self.scores else self.prior


def test_where_nothing_is_known_of_below_it_goes_wider_only_if_that_pays() -> None:
    search = TreeSearch(["a"], Certain(0.5))
    assert search.select(Random(0)) == (search.root, "a")
    poor = search.add(search.root, "a", 0.25)
    # GEN promises 0.25, CONT nothing seen: 0.5; the leaf below can only be expanded
    assert search.select(Random(0)) == (poor, "a")
    good = search.add(poor, "a", 0.75)
    assert (poor.name, good.name) == ("0", "0.0")
    assert (search.root.made, search.root.below, poor.seen) == ([0.25], [0.75], [0.25, 0.75])
    assert (poor.made, poor.below, good.seen) == ([0.75], [], [0.75])
    # at the root CONT 0.75 > GEN 0.25; at the node GEN 0.75 > CONT 0.5: wider there
    assert search.select(Random(0)) == (poor, "a")
    second = search.add(poor, "a", 0.0)
    assert (second.name, poor.made, search.root.below) == ("0.1", [0.75, 0.0], [0.75, 0.0])
    # at the node GEN 0.375 < CONT 0.5: deeper, at the better child, 0.75 > 0
    assert search.select(Random(0)) == (good, "a")


def test_the_agent_whose_nodes_score_best_makes_the_next() -> None:
    search = TreeSearch(["a", "b"], Certain(0.5))
    assert search.select(Random(0))[1] == "a"  # the first of equals
    search.add(search.root, "a", 0.25)
    assert search.select(Random(0))[1] == "b"
    search.add(search.root, "b", 0.125)
    assert search.select(Random(0))[1] == "a"


def test_scores_outside_the_belief_leave_the_tree_as_it_was() -> None:
    search = TreeSearch(["a"], Beta())
    with pytest.raises(ValueError, match="choose gaussian"):
        search.add(search.root, "a", 2.0)
    assert (search.root.children, search.scores) == ([], {"a": []})
