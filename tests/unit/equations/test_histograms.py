"""Quantiles of histograms: their error, and the percentile over several ranks."""

import math

import pytest
import torch

from mcore_mas.equations.histograms import histogram_quantile, log_histogram
from mcore_mas.megatron.step.statistics import summarise


def test_the_percentile_is_of_all_ranks_and_microbatches() -> None:
    large_gaps = {"loss": torch.zeros(10), "x_p99": torch.full((10,), 2.0)}
    small_gaps = log_histogram(torch.linspace(0, 0.1, 990))
    other_rank = {"x_p99": small_gaps, "loss": [0.0, 990.0, 0.0, 0.0]}
    gathered = summarise([large_gaps], lambda this_rank: [this_rank, other_rank])
    # the ten large gaps are the last percent of a thousand
    assert gathered["x_p99"] == pytest.approx(0.1, rel=0.05)
    assert summarise([large_gaps])["x_p99"] == pytest.approx(2.0, rel=0.05)
    assert "x_p99" not in summarise([{"loss": torch.zeros(1), "x_p99": torch.tensor([math.nan])}])


def test_a_quantile_is_at_most_five_percent_too_large() -> None:
    values = torch.rand(10_000, generator=torch.Generator().manual_seed(1)) ** 4
    exact = float(values.sort().values[9899])
    assert exact <= histogram_quantile(log_histogram(values), 0.99) <= 1.05 * exact
    assert histogram_quantile(log_histogram(torch.tensor([math.inf])), 0.99) == math.inf
    assert math.isnan(histogram_quantile(log_histogram(torch.tensor([])), 0.99))
