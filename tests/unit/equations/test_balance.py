"""Shares of agents in the gradient of their policy."""

import math

import pytest

from mcore_mas.equations.balance import gradient_shares


def test_a_share_is_the_norm_over_the_sum_of_the_norms() -> None:
    assert gradient_shares({"solver": 3.0, "verifier": 1.0}) == {"solver": 0.75, "verifier": 0.25}
    assert gradient_shares({"solver": 0.5, "verifier": 0.0}) == {"solver": 1.0, "verifier": 0.0}


@pytest.mark.parametrize("norm", [0.0, math.nan, math.inf])
def test_there_are_no_shares_without_a_finite_gradient(norm: float) -> None:
    assert gradient_shares({"solver": norm, "verifier": 0.0}) == {}
