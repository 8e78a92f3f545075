"""Statistics of tokens, reduced over micro-batches and ranks to the metrics of an update."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from mcore_mas.equations.histograms import histogram_quantile, log_histogram

# Statistics of a micro-batch by name: [N], one number for each row, or one number for each reply.
TokenStatistics = dict[str, Tensor]

# Partial statistics by name, as plain numbers that ranks can exchange: a histogram if the name ends
# in "_p99", and otherwise sum, count, minimum and maximum.
_Partial: TypeAlias = dict[str, list[float]]


def _without_exchange(partial: _Partial) -> Iterable[_Partial]:
    return [partial]


def summarise(
    rows: Sequence[TokenStatistics],
    exchange: Callable[[_Partial], Iterable[_Partial]] = _without_exchange,
) -> dict[str, float]:
    """Reduce statistics of tokens to one number each.

    The end of a name decides: `_count` is a sum, `_max` and `_min` are extremes, `_p99` is the 99th
    percentile (up to 5 % too large), and any other name is a mean. A token whose statistic is NaN
    does not count, and a statistic that no token has is left out. A loss that is NaN is not left
    out: it makes the sum NaN.

    Args:
        rows: statistics of each micro-batch on the CPU. "loss" is required, and is multiplied by
            the token weights already.
        exchange: returns the partial statistics of all ranks for this rank's, in the same order on
            every rank.

    Returns:
        "loss", the sum of the losses; "tokens", their number; and the reduced statistics.
    """
    rank_part = _merge(
        {name: _reduce_column(name, column) for name, column in statistics.items()}
        for statistics in rows
    )
    merged = _merge(exchange(rank_part))
    total_loss, tokens, *_ = merged.pop("loss")

    summary = {"loss": total_loss, "tokens": tokens}
    for name, numbers in merged.items():
        if name.endswith("_p99"):
            if any(numbers):
                summary[name] = histogram_quantile(numbers, 0.99)
            continue
        total, count, smallest, largest = numbers
        if not count:
            continue
        reductions = {"max": largest, "min": smallest, "count": total}
        suffix = name.rpartition("_")[2]
        summary[name] = reductions.get(suffix, total / count)
    return summary


def _reduce_column(name: str, column: Tensor) -> list[float]:
    """Return the partial statistics of one micro-batch under one name."""
    values = column.double()
    if name != "loss":
        # NumPy selects by the mask. torch would use all threads, which took 4 ms a column with 16.
        numbers = values.numpy()
        values = torch.from_numpy(numbers[~np.isnan(numbers)])
    if name.endswith("_p99"):
        return log_histogram(values)
    if not len(values):
        return [0.0, 0.0, math.inf, -math.inf]
    return [float(values.sum()), float(len(values)), float(values.min()), float(values.max())]


def _merge(partials: Iterable[_Partial]) -> _Partial:
    """Merge partial statistics of micro-batches or ranks, in their order."""
    merged: _Partial = {}
    for partial in partials:
        for name, numbers in partial.items():
            before = merged.get(name)
            if before is None:
                merged[name] = numbers
            elif name.endswith("_p99"):
                merged[name] = [a + b for a, b in zip(before, numbers, strict=True)]
            else:
                merged[name] = [
                    before[0] + numbers[0],
                    before[1] + numbers[1],
                    min(before[2], numbers[2]),
                    max(before[3], numbers[3]),
                ]
    return merged
