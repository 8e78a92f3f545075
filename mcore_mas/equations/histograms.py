"""Histograms with fixed logarithmic bins, from which several ranks compute a quantile together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from mcore_mas.equations.tensors import Tensor, torch


@cache
def _bin_edges() -> Tensor:
    """Return the edges of a histogram's bins, [451] float64; each bin is 4.7 % wide."""
    return torch.logspace(-7, 2, 9 * 50 + 1, dtype=torch.float64)


def log_histogram(values: Tensor) -> list[float]:
    """Count non-negative values [N] in a fixed set of 452 logarithmic bins.

    The bins do not depend on the values, so histograms of several ranks can be added.
    """
    edges = _bin_edges()
    bins = torch.bucketize(values.double(), edges.to(values.device))
    return torch.bincount(bins, minlength=len(edges) + 1).double().tolist()


def histogram_quantile(counts: Sequence[float], share: float) -> float:
    """Return the quantile `share` of a `log_histogram`, as the upper edge of its bin; NaN for an empty histogram."""
    cumulative = torch.tensor(counts, dtype=torch.float64).cumsum(0)
    if not cumulative[-1]:
        return math.nan
    bin_index = int(torch.searchsorted(cumulative, share * cumulative[-1]))
    edges = _bin_edges()
    return float(edges[bin_index]) if bin_index < len(edges) else math.inf
