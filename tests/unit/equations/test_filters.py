"""Filters drop turns that give no signal, and outliers."""

import torch

from mcore_mas.equations.filters import FILTERS
from mcore_mas.equations.turns import Turns
from tests.support.turns import make_turns


def make_groups(*groups: tuple[float, ...]) -> Turns:
    """Return turns of one task per tuple, with a trajectory of one turn per score."""
    rows = []
    for task, scores in enumerate(groups):
        for number, score in enumerate(scores):
            rows.append({"task": task, "trajectory": f"{task}/{number}", "score": score})
    return make_turns(rows)


def retained(name: str, turns: Turns, **options: object) -> list[bool]:
    """Return for every turn whether the filter retains it."""
    return FILTERS[name](turns, **options).tolist()


def test_informative_drops_groups_of_equal_scores() -> None:
    turns = make_groups((1, 1), (0, 1), (0, 0))
    assert retained("informative", turns) == [False, False, True, True, False, False]


def test_informative_compares_trajectories_and_not_turns() -> None:
    # The turns differ, but the mean of both trajectories is 1/2.
    rows = []
    for trajectory in ("a", "b"):
        for turn, score in enumerate((0.0, 1.0)):
            rows.append({"trajectory": trajectory, "turn": turn, "score": score})
    assert retained("informative", make_turns(rows)) == [False] * 4


def test_informative_can_group_the_turns_of_a_tree_by_state() -> None:
    rows = [
        {"node": "0", "state": "x", "score": 1.0},
        {"node": "1", "state": "x", "score": 1.0},
        {"node": "0.0", "turn": 1, "state": "y", "score": 0.0},
        {"node": "0.1", "turn": 1, "state": "y", "score": 1.0},
    ]
    assert retained("informative", make_turns(rows), by="state") == [False, False, True, True]
    # all turns are of one trajectory, which is one vote
    assert retained("informative", make_turns(rows)) == [False] * 4


def test_mean_range_retains_groups_whose_mean_is_inside() -> None:
    turns = make_groups((1, 1), (0, 1), (0, 0))
    assert retained("mean_range", turns) == [False, False, True, True, False, False]
    turns = make_groups((0, 1), (1, 1, 0))
    assert retained("mean_range", turns, low=0.6) == [False, False, True, True, True]


def test_lowest_mean_drops_the_groups_with_the_lowest_means() -> None:
    turns = make_groups((0, 1), (3, 3), (2, 0), (9, 9))
    half = [False, False, True, True, False, False, True, True]
    assert retained("lowest_mean", turns, ratio=0.5) == half
    assert retained("lowest_mean", turns, ratio=0.25) == [False, False, *[True] * 6]
    assert retained("lowest_mean", turns, ratio=0.2) == [True] * 8  # 0.8 groups round down to 0


def test_lowest_spread_drops_the_lowest_variance_over_squared_range() -> None:
    """The variance divides by n, as in PettingLLMs.

    If it divided by n - 1, the pair (0, 1) with 1/2 would rank above (0, 0, 1, 1) with 1/3.
    """
    # variance / range²: 1/4, 2/9 and 0 for equal scores
    turns = make_groups((0, 1), (0, 0, 9), (4, 4))
    assert retained("lowest_spread", turns, ratio=0.34) == [True] * 5 + [False] * 2
    assert retained("lowest_spread", turns, ratio=0.67) == [True] * 2 + [False] * 5
    # variance / range²: 1/4, 1/4 and 3/16; by n - 1 it would be 1/2, 2/7 and 1/4
    turns = make_groups((0, 1), (0, 0, 0, 4, 4, 4, 4, 0), (0, 1, 1, 1))
    assert retained("lowest_spread", turns, ratio=0.34) == [True] * 10 + [False] * 4


def test_outliers_are_dropped_from_every_group_by_its_size() -> None:
    """`uid` of PettingLLMs: int(n · ratio) of each group, not only from groups of large rewards."""
    turns = make_groups((0, 50, 50, 100), (0, 1, 0, 10))
    expected = [False, True, True, True, True, True, True, False]
    assert retained("outliers", turns, ratio=0.25) == expected

    turns = make_groups((0, 0, 0, 8), (100, 101))
    assert retained("outliers", turns, ratio=0.25) == [True, True, True, False, True, True]
    assert retained("outliers", turns, ratio=0.2) == [True] * 6  # 0.8 turns round down to 0
    assert FILTERS["outliers"](turns, ratio=0.1).dtype is torch.bool

    # 100 · 0.29 is 28.999… in floating point, and the released code rounds down.
    dropped = retained("outliers", make_groups(tuple(range(100))), ratio=0.29).count(False)
    assert dropped == int(100 * 0.29) == 28
