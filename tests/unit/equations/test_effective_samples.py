"""Effective sample size of replies, by hand."""

import math

import pytest
import torch

from mcore_mas.equations.effective_samples import (
    REPLY_SUMS,
    effective_sample_metrics,
    reply_statistics,
)

NAN = math.nan


def test_the_weight_of_a_reply_is_the_product_over_its_sampled_tokens() -> None:
    ratios = torch.tensor([2.0, 0.5, 1.5, 4.0, 7.0])
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0], dtype=torch.float64)
    behaviour = logprobs - ratios.double().log()
    behaviour[4] = NAN  # not sampled
    statistics = reply_statistics(logprobs, behaviour, torch.tensor([8, 3, 8, 3, 8]))
    # Reply 3 has 0.5 · 4 = 2, and reply 8 has 2 · 1.5 = 3.
    assert tuple(statistics) == REPLY_SUMS
    ones, weights, squares = (column.tolist() for column in statistics.values())
    assert ones == [1.0, 1.0]
    assert weights == pytest.approx([2.0, 3.0])
    assert squares == pytest.approx([4.0, 9.0])


def test_a_reply_without_sampled_tokens_does_not_count() -> None:
    statistics = reply_statistics(torch.zeros(2), torch.tensor([NAN, 0.0]), torch.tensor([0, 1]))
    assert [column.tolist() for column in statistics.values()] == [[1.0]] * 3


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ([0.5, 0.5, 0.5], 3.0),  # equal weights
        ([2.0, 1.0, 1.0], 16 / 6),  # (2 + 1 + 1)² / (4 + 1 + 1)
        ([5.0, 0.0, 0.0], 1.0),  # one reply has all of the weight
    ],
)
def test_the_effective_sample_size_is_the_square_of_the_sum_over_the_sum_of_squares(
    weights: list[float], size: float
) -> None:
    sums = (len(weights), sum(weights), sum(weight**2 for weight in weights))
    metrics = effective_sample_metrics(dict(zip(REPLY_SUMS, sums, strict=True)))
    assert metrics == {
        "effective_sample_size": pytest.approx(size),
        "effective_sample_share": pytest.approx(size / 3),
    }


def test_there_is_no_size_without_replies_or_with_an_unknown_weight() -> None:
    assert effective_sample_metrics({}) == {}
    assert effective_sample_metrics(dict(zip(REPLY_SUMS, (2.0, NAN, NAN), strict=True))) == {}
