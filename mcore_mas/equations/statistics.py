"""Statistics of an evaluation: pass@k, maj@k, and confidence intervals of means over tasks."""

import math
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np


def pass_at(scores: Sequence[float], k: int) -> float:
    """Expected best of k of these n ≥ k scores [n], drawn without replacement: the unbiased estimate of pass@k."""
    # Σ_i s_(i) C(i-1, k-1) / C(n, k), s_(1) ≤ … ≤ s_(n); of scores 0 and 1, c of them 1, that is
    # 1 - C(n-c, k) / C(n, k)   Chen et al., arXiv 2107.03374, eq. 1
    ranked = enumerate(sorted(scores))
    return math.fsum(score * math.comb(below, k - 1) for below, score in ranked) / math.comb(
        len(scores), k
    )


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """The score of the most frequent answer [n]; of equally frequent ones, the first. None and "" do not vote.

    Without a vote it is 0.
    """
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    winner = max(votes, key=votes.__getitem__)  # max keeps the first of equals
    return scores[list(answers).index(winner)]


RESAMPLES = 10_000
_AT_ONCE = 1 << 22  # draws
# 97.5 % quantiles of Student's t with 1, 2, ... 18 degrees of freedom
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622),
    *(2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009),
)


def mean_interval(values: Sequence[float], name: str) -> tuple[float, float]:
    """95 % interval of the mean of `values` [tasks or seeds]; of one value it is that value, of which nothing is known.

    Below 20 values Student's t, from 20 on the percentile bootstrap, whose resampling `name` seeds: over 5 values of a
    normal distribution the bootstrap covers 84 %.
    """
    if len(values) == 1:
        return values[0], values[0]
    if len(values) <= len(_T) + 1:
        half = _T[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
        return statistics.fmean(values) - half, statistics.fmean(values) + half
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    size, drawn = len(values), np.asarray(values, dtype=float)
    rows = max(
        1, _AT_ONCE // size
    )  # at once, and the same draws: all resamples of 50,000 tasks would be 8 GB
    pieces = (min(rows, RESAMPLES - first) for first in range(0, RESAMPLES, rows))
    means = [drawn[generator.integers(size, size=(piece, size))].mean(axis=1) for piece in pieces]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)
