"""Token-level statistics of micro-batches as one number each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

_Part: TypeAlias = dict[str, list[float]]  # by name: sum, number of tokens, minimum, maximum; plain, to be sent around


def _alone(part: _Part) -> list[_Part]:
    return [part]


def summarise(
    rows: Sequence[dict[str, Tensor]], exchange: Callable[[_Part], Iterable[_Part]] = _alone
) -> dict[str, float]:
    """The loss summed, names in `_max` and `_min` as extremes, all others as means, and the number of tokens.

    Tokens whose statistic is NaN do not have it, and a statistic that no token has is left out.

    Args:
        rows: of each micro-batch its statistics by name, each [N]; token weights are in the loss already.
        exchange: gives the parts of all ranks for this one's, in the same order on each.
    """
    own = _merge({name: _part(name, column) for name, column in row.items()} for row in rows)
    whole = _merge(exchange(own))
    total, tokens, *_ = whole.pop("loss")
    summary = {"loss": total, "tokens": tokens}
    for name, (total, count, smallest, largest) in whole.items():
        if count:
            extremes = {"max": largest, "min": smallest}
            summary[name] = extremes.get(name.rpartition("_")[2], total / count)
    return summary


def _part(name: str, column: Tensor) -> list[float]:
    column = column.double()
    known = column if name == "loss" else column[~column.isnan()]
    if not len(known):
        return [0.0, 0.0, math.inf, -math.inf]
    return [float(known.sum()), float(len(known)), float(known.min()), float(known.max())]


def _merge(parts: Iterable[_Part]) -> _Part:
    whole: _Part = {}
    for part in parts:
        for name, (total, count, smallest, largest) in part.items():
            known = whole.setdefault(name, [0.0, 0.0, math.inf, -math.inf])
            whole[name] = [known[0] + total, known[1] + count, min(known[2], smallest), max(known[3], largest)]
    return whole
