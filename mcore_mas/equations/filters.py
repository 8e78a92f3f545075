"""Filters: groups without a learning signal (DAPO's dynamic sampling) and turns that do not train.

Every filter maps `Turns` and options to a mask [n], True where a turn stays.

Args:
    by: peers: "task", or "state" for turns of one agent from one state (tree sampling).
    low, high: bounds of the mean score; both are exclusive.
    ratio: share that is left out, rounded down: of groups, or of each group's turns.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mcore_mas.equations.tensors import Tensor, torch
from mcore_mas.equations.turns import Grouping, Turns, grouping
from rollout.base.options import AboveLow

_By = Literal["task", "state"]
_Ratio = Annotated[float, Field(ge=0, lt=1)]  # 1 would leave nothing

_PEERS = {"task": grouping("task", "trajectory"), "state": grouping("state", "turn")}


def informative(turns: Turns, *, by: _By = "task") -> Tensor:
    """Groups whose votes differ: equal ones have no gradient   DAPO's dynamic sampling, arXiv 2503.14476."""
    return _PEERS[by].statistics(turns).differ


def mean_range(turns: Turns, *, low: float = 0.0, high: AboveLow = 1.0, by: _By = "task") -> Tensor:
    """Groups with low < mean < high   MARTI's dynamic filtering."""
    mean = _PEERS[by].statistics(turns).mean
    return (mean > low) & (mean < high)


def lowest_mean(turns: Turns, *, ratio: _Ratio = 0.5, by: _By = "task") -> Tensor:
    """All groups but the share `ratio` of them with the lowest mean   Stronger-MAS, filter_method mean."""
    b = _PEERS[by].statistics(turns)
    return _best_groups(b.mean, turns.key(*_PEERS[by].peers), ratio)


def lowest_spread(turns: Turns, *, ratio: _Ratio = 0.5, by: _By = "task") -> Tensor:
    """All groups but the share `ratio` of them with the lowest variance / range²   Stronger-MAS, filter_method std."""
    b = _PEERS[by].statistics(turns)
    groups = int(b.group_of.max()) + 1
    highest = torch.full((groups,), -torch.inf, dtype=torch.float64).scatter_reduce(
        0, b.group_of, b.votes, "amax"
    )
    lowest = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce(
        0, b.group_of, b.votes, "amin"
    )
    group = turns.key(*_PEERS[by].peers)
    span = (highest - lowest)[group]
    # the variance divides by the votes, as the released code's does
    variance = _PEERS[by].statistics(turns, ddof=0).std ** 2
    spread = torch.where(span > 0, variance / span.clamp(min=1e-12) ** 2, 0.0)
    return _best_groups(spread, group, ratio)


def outliers(turns: Turns, *, ratio: _Ratio = 0.1, by: _By = "task") -> Tensor:
    """All turns but, of each group of n, the int(n · `ratio`) furthest from its mean.

    Stronger-MAS, filter_method uid.
    """
    distance, group = (
        (turns.scores - _PEERS[by].statistics(turns).mean).abs(),
        turns.key(*_PEERS[by].peers),
    )
    order = distance.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]  # by group, furthest first
    size = group.bincount()
    place = torch.arange(len(order)) - (size.cumsum(0) - size)[group[order]]
    keep = torch.empty(len(order), dtype=torch.bool)
    keep[order] = place >= (size.double() * ratio).floor()[group[order]]
    return keep


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
    f.__name__: f for f in (informative, mean_range, lowest_mean, lowest_spread, outliers)
}
_OF_CONTRASTS = ("informative", "lowest_spread", "outliers")


def contrasted(name: str, options: Mapping[str, Any]) -> Grouping | None:
    """The groups whose votes filter `name` needs to differ; None where it judges single votes, or is not ours."""
    return _PEERS[options.get("by", "task")] if name in _OF_CONTRASTS else None
