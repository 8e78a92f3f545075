"""Log-ratios of replies at every level, and their exponential at extreme values."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_mas.equations.log_ratios import Level, at_level, bounded_exp

TOKENS = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=12)


@given(TOKENS)
def test_levels_of_single_tokens_agree_and_sums_are_sizes_times_means(
    tokens: list[tuple[float, int]],
) -> None:
    log_ratio = torch.tensor([value for value, _ in tokens], dtype=torch.float64)
    alone = torch.arange(len(tokens))
    for level in get_args(Level):
        assert torch.equal(at_level(log_ratio, alone, level), log_ratio)
    replies = torch.tensor([number for _, number in tokens])
    size = replies.bincount()[replies]
    assert torch.allclose(
        at_level(log_ratio, replies, "sequence"),
        at_level(log_ratio, replies, "geometric") * size,
        atol=1e-9,
    )


def test_the_exponential_of_extreme_log_ratios_is_finite() -> None:
    assert bounded_exp(torch.tensor([1000.0, -1000.0])).tolist() == pytest.approx(
        [math.exp(20), math.exp(-20)]
    )
