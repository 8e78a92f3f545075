"""Filters that drop groups without a learning signal (DAPO's dynamic sampling) and outlying turns.

Every filter maps `Turns` and options to a mask [n], True for turns that stay. `FILTERS` is the
table.

Options:
    by: group: the turns of a "task", or of one agent from one "state" (tree sampling).
    low, high: bounds between which the mean score of a group must be; a group at a bound is dropped.
    ratio: share of the groups that is dropped, or for `outliers` of each group's turns; the number
        is rounded down.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mcore_mas.equations.tensors import Tensor, torch
from mcore_mas.equations.turns import Grouping, Turns, grouping
from rollout.base.section import AboveLow

_By = Literal["task", "state"]
_Ratio = Annotated[float, Field(ge=0, lt=1)]  # 1 would drop everything

_GROUPINGS = {"task": grouping("task", "trajectory"), "state": grouping("state", "turn")}


def informative(turns: Turns, *, by: _By = "task") -> Tensor:
    """Keep groups whose votes differ; equal votes have an advantage of 0, and so no gradient.

    Source: DAPO, dynamic sampling, arXiv 2503.14476.
    """
    return _GROUPINGS[by].statistics(turns).votes_differ


def mean_range(turns: Turns, *, low: float = 0.0, high: AboveLow = 1.0, by: _By = "task") -> Tensor:
    """Keep groups with low < mean < high.

    Source: MARTI, dynamic filtering.
    """
    mean = _GROUPINGS[by].statistics(turns).mean
    return (mean > low) & (mean < high)


def lowest_mean(turns: Turns, *, ratio: _Ratio = 0.5, by: _By = "task") -> Tensor:
    """Drop the share `ratio` of the groups with the lowest mean.

    Source: Stronger-MAS, filter_method mean.
    """
    statistics = _GROUPINGS[by].statistics(turns)
    return _highest_groups(statistics.mean, turns.joint_ids(*_GROUPINGS[by].peer_columns), ratio)


def lowest_spread(turns: Turns, *, ratio: _Ratio = 0.5, by: _By = "task") -> Tensor:
    """Drop the share `ratio` of the groups with the lowest variance / range².

    Source: Stronger-MAS, filter_method std. As in the released code, the variance divides by the
    number of votes.
    """
    statistics = _GROUPINGS[by].statistics(turns, ddof=0)
    scores = statistics.vote_scores
    groups = int(statistics.vote_group.max()) + 1
    highest = torch.full((groups,), -torch.inf, dtype=torch.float64)
    highest = highest.scatter_reduce(0, statistics.vote_group, scores, "amax")
    lowest = torch.full((groups,), torch.inf, dtype=torch.float64)
    lowest = lowest.scatter_reduce(0, statistics.vote_group, scores, "amin")

    group = turns.joint_ids(*_GROUPINGS[by].peer_columns)
    score_range = (highest - lowest)[group]
    spread = statistics.std**2 / score_range.clamp(min=1e-12) ** 2
    spread = torch.where(score_range > 0, spread, 0.0)
    return _highest_groups(spread, group, ratio)


def outliers(turns: Turns, *, ratio: _Ratio = 0.1, by: _By = "task") -> Tensor:
    """Drop the int(n · `ratio`) turns of each group of n that are furthest from its mean.

    Source: Stronger-MAS, filter_method uid.
    """
    distance = (turns.rewards - _GROUPINGS[by].statistics(turns).mean).abs()
    group = turns.joint_ids(*_GROUPINGS[by].peer_columns)
    # Sort by group; within a group the furthest turn comes first.
    order = distance.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]

    size = group.bincount()
    group_start = size.cumsum(0) - size
    rank = torch.arange(len(order)) - group_start[group[order]]
    dropped = (size.double() * ratio).floor()
    keep = torch.empty(len(order), dtype=torch.bool)
    keep[order] = rank >= dropped[group[order]]
    return keep


def _highest_groups(value: Tensor, group: Tensor, ratio: float) -> Tensor:
    """Return a mask [n] that drops the share `ratio` of the groups, those with the lowest value.

    Args:
        value: [n] equal for all turns of a group.
        group: [n] group ids.
        ratio: share of the groups that is dropped; their number is rounded down.
    """
    groups = int(group.max()) + 1
    group_value = torch.empty(groups, dtype=value.dtype)
    group_value[group] = value
    keep = torch.ones(groups, dtype=torch.bool)
    lowest_first = group_value.argsort(stable=True)
    keep[lowest_first[: int(groups * ratio)]] = False
    return keep[group]


Filter = Callable[..., Tensor]

FILTERS: dict[str, Filter] = {
    rule.__name__: rule for rule in (informative, mean_range, lowest_mean, lowest_spread, outliers)
}
# Filters that compare the votes of a group with each other; in groups of one vote they cannot.
_FILTERS_BY_DIFFERENCES = ("informative", "lowest_spread", "outliers")


def filter_grouping(name: str, options: Mapping[str, Any]) -> Grouping | None:
    """Return the grouping of a filter that compares the votes of a group with each other.

    Args:
        name: name of the filter.
        options: options that differ from the filter's defaults.

    Returns:
        None if the filter needs only the mean of a group, or is not in `FILTERS`.
    """
    if name not in _FILTERS_BY_DIFFERENCES:
        return None
    return _GROUPINGS[options.get("by", "task")]
