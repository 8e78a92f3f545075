"""What every reward allocator promises."""

import math

import pytest

from rollout.records.trajectory import Status
from rollout.rewards import ALLOCATORS
from tests.support.played import failed, group, trajectory, turn

OPTIONS = {
    "discounts": {"mode": "hop_discount"},
    "turn_difference": {"metric": "f1", "scored": ["verifier"]},
}
TREES_ONLY = {"tree_shaping"}


def scored(index, agent, **fields):
    return turn(index, agent, {"local": 0.5, "team": 1.0, "f1": 0.25, "process": 6.0}, **fields)


def scripted(nodes):
    """Two completed trajectories and a failed one between them."""
    agents = ("solver", "verifier", "solver", "verifier")

    def turns():
        return (scored(i, agent, node=nodes[i]) for i, agent in enumerate(agents))

    return group(
        trajectory(*turns(), answer="1", leaf=nodes[-1]),
        failed(turn(0), sample=1),
        trajectory(*turns(), sample=2, answer="2", outcome=0.0, leaf=nodes[-1]),
    )


@pytest.mark.parametrize("name", ALLOCATORS)
def test_an_allocator_rewards_completed_turns_and_nothing_else(name):
    nodes = ("0", "0.0", "0.0.0", "0.0.1") if name in TREES_ONLY else ("",) * 4
    before, again = scripted(nodes), scripted(nodes)
    after = ALLOCATORS[name](before, **OPTIONS.get(name, {}))
    assert before == again
    assert after.task == before.task
    assert [t.id for t in after.trajectories] == [t.id for t in before.trajectories]
    for old, new in zip(before.trajectories, after.trajectories, strict=True):
        if old.status is Status.FAILED:
            assert new == old
            continue
        assert [(t.index, t.node, t.agent) for t in new.turns] == [
            (t.index, t.node, t.agent) for t in old.turns
        ]
        assert all(
            t.masked if t.reward is None else math.isfinite(t.reward) and not t.masked
            for t in new.turns
        )
        assert any(t.reward is not None for t in new.turns)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_masked_turn_stays_masked(name):
    nodes = ("0", "0.0", "0.0.0", "0.0.1") if name in TREES_ONLY else ("",) * 4
    fields = {"local": 0.5, "team": 1.0, "f1": 0.25, "process": 6.0}
    agents = ("solver", "verifier", "solver", "verifier")
    turns = (turn(i, a, fields, node=nodes[i], masked=i == 2) for i, a in enumerate(agents))
    played = group(trajectory(*turns, answer="1", leaf=nodes[-1]))
    (got,) = ALLOCATORS[name](played, **OPTIONS.get(name, {})).trajectories
    assert [t.masked for t in got.turns] == [False, False, True, False]
    assert [t.reward is None for t in got.turns] == [False, False, True, False]


@pytest.mark.parametrize("name", ALLOCATORS)
def test_an_allocator_is_documented(name):
    import rollout.rewards

    assert f"\n{name} " in str(rollout.rewards.__doc__)
    assert ALLOCATORS[name].__doc__
