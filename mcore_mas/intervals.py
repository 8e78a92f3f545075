"""How sure a mean over tasks is."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def bootstrap_interval(values: Sequence[float], name: str) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of `values` [tasks]; `name` seeds the resampling."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    picks = generator.integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.asarray(values, dtype=float)[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
