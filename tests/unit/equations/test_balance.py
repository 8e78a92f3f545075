"""Shares of agents in the gradient of their policy, and the factors that set them."""

import math

import pytest

from mcore_mas.equations.balance import gradient_shares, part_factor, sum_factor


def test_a_share_is_the_norm_over_the_sum_of_the_norms() -> None:
    assert gradient_shares({"solver": 3.0, "verifier": 1.0}) == {"solver": 0.75, "verifier": 0.25}
    assert gradient_shares({"solver": 0.5, "verifier": 0.0}) == {"solver": 1.0, "verifier": 0.0}


@pytest.mark.parametrize("norm", [0.0, math.nan, math.inf])
def test_there_are_no_shares_without_a_finite_gradient(norm: float) -> None:
    assert gradient_shares({"solver": norm, "verifier": 0.0}) == {}


def test_the_shares_of_a_balanced_gradient_are_as_the_weights_of_agents_with_a_gradient() -> None:
    weights = {"solver": 1.0, "verifier": 1.0, "judge": 2.0}
    norms = {"solver": 8.0, "verifier": 0.5, "judge": 1.5}
    assert gradient_shares(norms, weights) == {"solver": 0.25, "verifier": 0.25, "judge": 0.5}
    norms["judge"] = 0.0
    assert gradient_shares(norms, weights) == {"solver": 0.5, "verifier": 0.5, "judge": 0.0}
    norms["judge"] = math.nan
    assert gradient_shares(norms, weights) == {}


def test_balanced_parts_have_norms_as_the_weights_and_the_same_sum_of_norms() -> None:
    norms = {"solver": 8.0, "verifier": 0.5, "judge": 1.5}  # their sum is 10
    weights = {"solver": 1.0, "verifier": 1.0, "judge": 2.0}
    factor = sum_factor(norms, weights)
    balanced = {
        agent: norm * part_factor(norm, weights[agent]) * factor for agent, norm in norms.items()
    }
    assert balanced == {"solver": 2.5, "verifier": 2.5, "judge": 5.0}


def test_an_agent_without_a_gradient_leaves_its_share_to_the_others() -> None:
    norms = {"solver": 3.0, "verifier": 1.0, "judge": 0.0}
    weights = {"solver": 1.0, "verifier": 3.0, "judge": 9.0}
    assert [part_factor(norms[agent], weights[agent]) for agent in norms] == [1 / 3, 3.0, 1.0]
    assert sum_factor(norms, weights) == 1.0  # the sum of the norms is 4, as that of the weights


@pytest.mark.parametrize("norm", [0.0, math.nan, math.inf])
def test_a_gradient_that_is_zero_or_not_finite_is_not_scaled(norm: float) -> None:
    assert part_factor(norm, 2.0) == 1.0
    assert sum_factor({"solver": norm, "verifier": 0.0}, {"solver": 2.0, "verifier": 1.0}) == 1.0
