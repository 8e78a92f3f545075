"""Contract of the reward allocators."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

import rollout.rewards
from rollout.records.trajectory import Group, Status, Turn
from rollout.rewards import ALLOCATORS
from tests.support.played import failed, group, trajectory, turn

OPTIONS: dict[str, dict[str, Any]] = {
    "discounts": {"mode": "hop_discount"},
    "turn_difference": {"metric": "f1", "scored": ["verifier"]},
}
AGENTS = ("solver", "verifier", "solver", "verifier")
SCORES = {"local": 0.5, "team": 1.0, "f1": 0.25, "process": 6.0}


def nodes_for(allocator: str) -> Sequence[str]:
    """Return the tree nodes of four turns; empty names for allocators that need no tree."""
    return ("0", "0.0", "0.0.0", "0.0.1") if allocator == "tree_shaping" else ("",) * 4


def scored_turns(nodes: Sequence[str], masked: int | None = None) -> list[Turn]:
    """Return a turn of each of AGENTS; `masked` is the index of a masked turn."""
    return [
        turn(index, agent, SCORES, node=nodes[index], masked=index == masked)
        for index, agent in enumerate(AGENTS)
    ]


def example_group(nodes: Sequence[str]) -> Group:
    """Return two completed trajectories with a failed one between them."""
    return group(
        trajectory(*scored_turns(nodes), answer="1", leaf=nodes[-1]),
        failed(turn(0), sample=1),
        trajectory(*scored_turns(nodes), sample=2, answer="2", outcome=0.0, leaf=nodes[-1]),
    )


def turn_positions(turns: Sequence[Turn]) -> list[tuple[int, str, str]]:
    return [(turn.index, turn.node, turn.agent) for turn in turns]


@pytest.mark.parametrize("name", ALLOCATORS)
def test_an_allocator_rewards_completed_turns_and_changes_nothing_else(name: str) -> None:
    before = example_group(nodes_for(name))
    after = ALLOCATORS[name](before, **OPTIONS.get(name, {}))
    assert before == example_group(nodes_for(name))
    assert after.task == before.task
    assert [t.id for t in after.trajectories] == [t.id for t in before.trajectories]
    for old, new in zip(before.trajectories, after.trajectories, strict=True):
        if old.status is Status.FAILED:
            assert new == old
            continue
        assert turn_positions(new.turns) == turn_positions(old.turns)
        for rewarded in new.turns:
            if rewarded.reward is None:
                assert rewarded.masked
            else:
                assert math.isfinite(rewarded.reward)
                assert not rewarded.masked
        assert any(rewarded.reward is not None for rewarded in new.turns)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_masked_turn_stays_masked(name: str) -> None:
    nodes = nodes_for(name)
    before = group(trajectory(*scored_turns(nodes, masked=2), answer="1", leaf=nodes[-1]))
    (after,) = ALLOCATORS[name](before, **OPTIONS.get(name, {})).trajectories
    assert [turn.masked for turn in after.turns] == [False, False, True, False]
    assert [turn.reward is None for turn in after.turns] == [False, False, True, False]


@pytest.mark.parametrize("name", ALLOCATORS)
def test_an_allocator_is_documented(name: str) -> None:
    assert f"\n{name} " in str(rollout.rewards.__doc__)
    assert ALLOCATORS[name].__doc__
