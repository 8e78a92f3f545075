"""Filters: groups without a learning signal (DAPO's dynamic sampling) and turns that do not train.

Every filter maps `Turns` and options to a mask [n], True where a turn stays. `by` names the peers: "task", or "state"
for turns of one agent from one state (tree sampling).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from mcore_mas.equations.turns import Grouping, GroupStatistics, Turns
from rollout.base.options import AboveLow, Share

Peers = Literal["task", "state"]

_PEERS = {
    "task": Grouping(peers=("task",), vote=("trajectory",)),
    "state": Grouping(peers=("task", "state", "agent", "turn"), vote=("trajectory", "node", "turn")),
}


def informative(turns: Turns, *, by: Peers = "task") -> Tensor:
    """Groups whose votes differ: equal ones have no gradient   DAPO's dynamic sampling, arXiv 2503.14476."""
    return _votes(turns, by).differ


def mean_range(turns: Turns, *, low: float = 0.0, high: AboveLow = 1.0, by: Peers = "task") -> Tensor:
    """Groups with low < mean < high   MARTI's dynamic filtering."""
    mean = _votes(turns, by).mean
    return (mean > low) & (mean < high)


def lowest_mean(turns: Turns, *, ratio: Share = 0.5, by: Peers = "task") -> Tensor:
    """All groups but the share `ratio` of them with the lowest mean   Stronger-MAS, filter_method mean."""
    b = _votes(turns, by)
    return _best_groups(b.mean, turns.key(*_PEERS[by].peers), ratio)


def lowest_spread(turns: Turns, *, ratio: Share = 0.5, by: Peers = "task") -> Tensor:
    """All groups but the share `ratio` of them with the lowest variance / range²   Stronger-MAS, filter_method std."""
    b = _votes(turns, by)
    groups = int(b.group_of.max()) + 1
    highest = torch.full((groups,), -torch.inf, dtype=torch.float64).scatter_reduce(0, b.group_of, b.votes, "amax")
    lowest = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce(0, b.group_of, b.votes, "amin")
    group = turns.key(*_PEERS[by].peers)
    span = (highest - lowest)[group]
    spread = torch.where(span > 0, b.std**2 / span.clamp(min=1e-12) ** 2, 0.0)
    return _best_groups(spread, group, ratio)


def outliers(turns: Turns, *, ratio: Share = 0.1, by: Peers = "task") -> Tensor:
    """All turns but the share `ratio` of them furthest from their group's mean   Stronger-MAS, filter_method uid."""
    distance = (turns.scores - _votes(turns, by).mean).abs()
    keep = torch.ones(len(distance), dtype=torch.bool)
    keep[distance.argsort(descending=True, stable=True)[: int(len(distance) * ratio)]] = False
    return keep


def _votes(turns: Turns, by: str) -> GroupStatistics:
    return _PEERS[by].statistics(turns)


def _best_groups(value: Tensor, group: Tensor, ratio: float) -> Tensor:
    """[n] True in all groups but the share `ratio`, rounded down, with the lowest `value` (the same within a group)."""
    groups = int(group.max()) + 1
    by_group = torch.empty(groups, dtype=value.dtype)
    by_group[group] = value
    keep = torch.ones(groups, dtype=torch.bool)
    keep[by_group.argsort(stable=True)[: int(groups * ratio)]] = False
    return keep[group]


Filter = Callable[..., Tensor]

FILTERS: dict[str, Filter] = {
    "informative": informative,
    "mean_range": mean_range,
    "lowest_mean": lowest_mean,
    "lowest_spread": lowest_spread,
    "outliers": outliers,
}
