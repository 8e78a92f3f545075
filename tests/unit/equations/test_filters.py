"""Filters keep the turns that say something."""

import torch

from mcore_mas.equations.filters import FILTERS
from mcore_mas.equations.turns import Turns
from tests.support.turns import make_turns


def groups(*scores: tuple[float, ...]) -> Turns:
    """A task per tuple, a trajectory of one turn per number."""
    return make_turns(
        [
            {"task": task, "trajectory": f"{task}/{i}", "score": score}
            for task, own in enumerate(scores)
            for i, score in enumerate(own)
        ]
    )


def kept(name: str, turns: Turns, **options: object) -> list[bool]:
    return FILTERS[name](turns, **options).tolist()


def test_groups_of_equal_votes_are_dropped_whatever_the_ratio() -> None:
    assert kept("informative", groups((1, 1), (0, 1), (0, 0))) == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_informative_compares_trajectories_not_turns() -> None:
    # both trajectories have votes of 1/2, though their turns differ
    rows = [
        {"trajectory": t, "turn": i, "score": s}
        for t in ("a", "b")
        for i, s in enumerate((0.0, 1.0))
    ]
    assert kept("informative", make_turns(rows)) == [False] * 4


def test_states_of_a_tree_are_groups_of_their_own() -> None:
    rows = [{"node": str(b), "state": "x", "score": 1.0} for b in range(2)]
    rows += [{"node": f"0.{b}", "turn": 1, "state": "y", "score": float(b)} for b in range(2)]
    assert kept("informative", make_turns(rows), by="state") == [False, False, True, True]
    assert kept("informative", make_turns(rows)) == [False] * 4  # one trajectory is one vote


def test_the_mean_must_lie_inside_the_range() -> None:
    assert kept("mean_range", groups((1, 1), (0, 1), (0, 0))) == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert kept("mean_range", groups((0, 1), (1, 1, 0)), low=0.6) == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_the_lowest_means_go() -> None:
    turns = groups((0, 1), (3, 3), (2, 0), (9, 9))
    assert kept("lowest_mean", turns, ratio=0.5) == [
        False,
        False,
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert kept("lowest_mean", turns, ratio=0.25) == [False, False, *[True] * 6]
    assert kept("lowest_mean", turns, ratio=0.2) == [True] * 8  # the share is rounded down


def test_d7_the_lowest_spread_goes_by_variance_over_squared_range() -> None:
    """The variance divides by n, as PettingLLMs': by n - 1 the pair 0, 1 would be above the four, 1/2 against 1/3."""
    # variances / range²: (0, 1): 1/4; (0, 0, 1, 1): 1/4; (0, 0, 9): 2/9; equal votes: 0
    turns = groups((0, 1), (0, 0, 9), (4, 4))
    assert kept("lowest_spread", turns, ratio=0.34) == [True] * 5 + [False] * 2
    assert kept("lowest_spread", turns, ratio=0.67) == [True] * 2 + [False] * 5
    # (0, 1, 1, 1): 3/16 by n and 1/4 by n - 1; (0, 1): 1/4 and 1/2; (0, 0, 0, 4, 4, 4, 4, 0): 1/4 and 2/7
    turns = groups((0, 1), (0, 0, 0, 4, 4, 4, 4, 0), (0, 1, 1, 1))
    assert kept("lowest_spread", turns, ratio=0.34) == [True] * 10 + [False] * 4


def test_d7_outliers_are_taken_from_every_group_by_its_size() -> None:
    """PettingLLMs' uid: int(n · ratio) of each group, so that one of large rewards does not pay for all."""
    turns = groups((0, 50, 50, 100), (0, 1, 0, 10))
    assert kept("outliers", turns, ratio=0.25) == [False, True, True, True, True, True, True, False]
    turns = groups((0, 0, 0, 8), (100, 101))
    assert kept("outliers", turns, ratio=0.25) == [True, True, True, False, True, True]
    assert kept("outliers", turns, ratio=0.2) == [True] * 6  # the share is rounded down
    assert FILTERS["outliers"](turns, ratio=0.1).dtype is torch.bool
    hundred = groups(tuple(range(100)))
    assert (
        kept("outliers", hundred, ratio=0.29).count(False) == int(100 * 0.29) == 28
    )  # as the released code rounds
