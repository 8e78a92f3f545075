"""Samples to columns to advantages and back, with a rule per agent."""

from dataclasses import replace

import pytest
import torch

from mcore_mas.config.credit import AdvantageConfig, FilterConfig
from mcore_mas.credit.assign import add_advantages, columns, filter_samples
from mcore_mas.credit.samples import CreditError, Sample, step_rewards, to_samples
from mcore_mas.equations.advantages import discounted_returns, whiten
from mcore_mas.equations.turns import Turns
from tests.support.played import group, trajectory, turn


def sample(trajectory: str, turn: int, agent: str, reward: float, **fields: object) -> Sample:
    defaults = {"policy": "p", "task": "t", "prompt_ids": (1, 2, 3, 4), "completion_ids": (2, 3)}
    return Sample(
        **defaults
        | {"trajectory": trajectory, "turn": turn, "agent": agent, "reward": reward}
        | fields
    )


def team() -> list[Sample]:
    return [
        sample("a", 0, "solver", 1.0),
        sample("a", 1, "verifier", 5.0),
        sample("b", 0, "solver", 0.0),
        sample("b", 1, "verifier", 4.0),
        sample("c", 0, "solver", 0.5),
    ]


def test_every_agent_has_its_own_rule_under_one_policy() -> None:
    estimators = {
        "solver": AdvantageConfig(name="rloo"),
        "verifier": AdvantageConfig(name="drmas", options={"std": "agent", "eps": 1e-12}),
    }
    got = add_advantages(team(), estimators)
    assert [len(s.advantages or ()) for s in got] == [2] * 5
    by_turn = [s.advantages[0] for s in got]
    # RLOO sees all turns: votes 3, 2, 1/2.  Dr. MAS's verifier: 5 and 4
    assert by_turn[0::2] == pytest.approx([3 - 1.25, 2 - 1.75, 0.5 - 2.5])
    assert by_turn[1::2] == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert [s.reward for s in got] == [s.reward for s in team()]


def test_children_of_different_parents_are_no_siblings_though_their_parents_are_filtered() -> None:
    rewards = {"0": 1.0, "1": 5.0, "0.0": 2.0, "0.1": 4.0, "1.0": 7.0, "1.1": 9.0}
    tree = [
        sample("a", node.count("."), "solver", reward, node=node)
        for node, reward in rewards.items()
    ]
    estimators = {"solver": AdvantageConfig(name="mcts")}
    whole = [s.advantages[0] for s in add_advantages(tree, estimators) if s.advantages]
    assert whole == [-4.0, 4.0, 2 - (1 + 4) / 2, 4 - (1 + 2) / 2, 7 - (5 + 9) / 2, 9 - (5 + 7) / 2]
    alone = [s.advantages[0] for s in add_advantages(tree[2:], estimators) if s.advantages]
    assert alone == [-2.0, 2.0, -2.0, 2.0]  # each against its one sibling
    above = [
        sample("a", 0, "solver", 3.0),
        *tree[:2],
    ]  # a turn before the first branching is the parent of 0 and 1
    assert [s.advantages[0] for s in add_advantages(above, estimators) if s.advantages] == [
        0.0,
        1 - (3 + 5) / 2,
        5 - (3 + 1) / 2,
    ]


def test_a_critics_agents_get_returns_and_others_need_none() -> None:
    gae = AdvantageConfig(name="gae", options={"gamma": 0.5, "lam": 1.0})
    estimators = {"solver": AdvantageConfig(name="grpo"), "verifier": gae}
    samples = team()
    for i in (1, 3):
        samples[i] = sample(
            samples[i].trajectory, 1, "verifier", samples[i].reward, values=(1.0, 2.0), policy="q"
        )
    got = add_advantages(samples, estimators)
    # returns to go: 2.5, 5 and 2, 4; advantages before whitening: 1.5, 3, 1, 2
    assert got[1].returns == pytest.approx((2.5, 5.0))
    assert got[3].returns == pytest.approx((2.0, 4.0))

    expected = whiten(
        torch.tensor([1.5, 3.0, 1.0, 2.0]).double(), torch.zeros(4, dtype=torch.int64)
    ).tolist()
    assert [*got[1].advantages, *got[3].advantages] == pytest.approx(expected)
    assert got[0].returns is None
    with pytest.raises(CreditError, match="advantage 'gae' needs values of every turn"):
        add_advantages(team(), estimators)


def test_remax_needs_the_greedy_outcome() -> None:
    samples = [sample("a", 0, "solver", 1.0, scores={"greedy": 0.25})]
    assert add_advantages(samples, {"solver": AdvantageConfig(name="remax")})[0].advantages == (
        0.75,
        0.75,
    )
    with pytest.raises(CreditError, match="advantage 'remax' needs greedy"):
        add_advantages(team()[:1], {"solver": AdvantageConfig(name="remax")})


def test_a_masked_turn_is_a_peer_whose_advantage_nobody_else_gets() -> None:
    """Two turns, one of them masked, have two tokens: an advantage by turn is none by token."""
    samples = [sample("a", 0, "solver", 1.0, trained=(False, False)), sample("b", 0, "solver", 0.0)]
    got = add_advantages(samples, {"solver": AdvantageConfig(name="dr_grpo")})
    assert [s.advantages for s in got] == [(), (-0.5, -0.5)]


@pytest.mark.parametrize("name", ["gae", "remax", "reinforce_pp", "grpo"])
def test_a_step_in_which_every_reply_is_masked_goes_on(name: str) -> None:
    samples = [
        sample(place, 0, "solver", 1.0, trained=(False, False), scores={"greedy": 0.0})
        for place in "ab"
    ]
    assert not any(
        s.advantages for s in add_advantages(samples, {"solver": AdvantageConfig(name=name)})
    )


def test_penalties_are_taken_from_the_score() -> None:
    samples = [sample("a", 0, "solver", 1.0, penalties=(0.25, 0.25)), sample("b", 0, "solver", 1.0)]
    turns = columns(samples)
    assert turns.scores.tolist() == [0.5, 1.0]
    assert turns.token_rewards().tolist() == [-0.25, 0.75, 0.0, 1.0]
    assert [
        s.advantages[0]
        for s in add_advantages(samples, {"solver": AdvantageConfig(name="dr_grpo")})
    ] == [-0.25, 0.25]


def test_nodes_and_parents_are_numbered_within_their_tree() -> None:
    samples = [sample("a", 0, "s", 0.0, node=node) for node in ("0", "1", "1.0", "1.0")]
    samples += [sample("b", 0, "s", 0.0, node="0"), sample("c", 0, "s", 0.0)]
    keys = columns(samples).keys
    assert keys["node"].tolist() == [0, 1, 2, 2, 3, 4]
    assert keys["parent"].tolist() == [-1, -1, 1, 1, -1, -1]
    assert columns(samples).steps is None


def test_alike_states_join_the_first_that_is_near_enough() -> None:
    prompts = [(1, 2, 3, 4), (1, 2, 3, 5), (9, 9, 9, 9), (1, 2, 3, 4)]
    samples = [sample(str(i), 0, "s", 0.0, prompt_ids=prompt) for i, prompt in enumerate(prompts)]
    alike = columns(samples).cluster_states
    assert alike is not None
    assert alike(0.75).tolist() == [0, 0, 1, 0]
    assert alike(0.9).tolist() == [0, 1, 2, 0]
    other_task = [*samples, sample("5", 0, "s", 0.0, task="u")]
    assert columns(other_task).cluster_states(0.75).tolist() == [0, 0, 1, 0, 2]  # type: ignore[misc]


def test_an_agent_without_an_estimator_is_named() -> None:
    with pytest.raises(
        CreditError,
        match=r"trajectory a, turn 1: agent 'verifier' has no estimator; agents with one: solver",
    ):
        add_advantages(team(), {"solver": AdvantageConfig(name="grpo")})


def own_estimator(turns: Turns, *, factor: float = 2.0) -> torch.Tensor:
    """A user's, which gives the values alone."""
    return factor * turns.scores


def test_an_estimator_of_ones_own_may_give_values_alone() -> None:
    rule = AdvantageConfig(
        name="tests.unit.credit.test_credit:own_estimator", options={"factor": 3.0}
    )
    got = add_advantages([sample("a", 0, "solver", 0.5)], {"solver": rule})[0]
    assert got.advantages == (1.5, 1.5)
    assert got.returns is None


def test_d5_a_step_reward_carries_the_penalties_of_its_turns() -> None:
    """Two turns before one step that gave 1, one of them malformed for 0.1: its reward is 0.9 (Dr. MAS's GiGPO)."""
    scores = ({"team": 1.0}, {"team": 1.0, "penalty": -0.1}, {"team": 0.5})
    turns = [turn(i, "s", own, round=i // 2) for i, own in enumerate(scores)]
    assert step_rewards(turns) == pytest.approx((0.9, 0.5))


def line(*scores: dict[str, float], masked: int | None = None) -> list[Sample]:
    """Samples of a trajectory with a turn in each round; the `masked` one has no reward."""
    turns = (turn(i, "s", own, round=i, masked=i == masked) for i, own in enumerate(scores))
    return to_samples(
        [group(trajectory(*(t if t.masked else replace(t, reward=0.0) for t in turns)))]
    )


def test_a_return_counts_all_steps_of_a_trajectory_whoever_of_it_is_there() -> None:
    """Steps that gave 1, 10 and 100: with γ of a half 1 + 5 + 25, though the second turn has no reward."""
    samples = line({"team": 1.0}, {"team": 10.0}, {"team": 100.0}, masked=1)
    assert [s.turn for s in samples] == [0, 2]
    assert discounted_returns(columns(samples), 0.5).tolist() == [31.0, 100.0]
    assert discounted_returns(columns(samples[:1]), 0.5).tolist() == [31.0]


def test_a_turn_that_no_step_followed_has_no_return() -> None:
    samples = line({"team": 1.0}, {})
    assert columns(samples[:1]).steps is not None
    with pytest.raises(
        CreditError, match="advantage 'gigpo' needs steps of every turn, and a turn has none"
    ):
        add_advantages(samples, {"s": AdvantageConfig(name="gigpo")})


def test_d10_a_masked_turn_with_a_reward_counts_for_its_peers_alone() -> None:
    """DAPO masks the loss of what was cut off, and keeps its reward in the group's mean."""
    samples = [
        sample("a", 0, "s", 1.0),
        sample("b", 0, "s", 0.0, trained=(False, False)),
        sample("c", 0, "s", 0.5),
    ]
    rule = {"s": AdvantageConfig(name="dr_grpo")}
    assert [s.advantages for s in add_advantages(samples, rule)] == [(0.5, 0.5), (), (0.0, 0.0)]
    assert [s.has_gradient for s in add_advantages(samples, rule)] == [True, False, False]
    values = [replace(s, values=(0.0, 0.0)) for s in (samples[0], samples[2])]
    got = add_advantages([values[0], samples[1], values[1]], {"s": AdvantageConfig(name="gae")})
    assert [len(s.advantages or ()) for s in got] == [2, 0, 2]


def test_nothing_is_nothing() -> None:
    assert add_advantages([], {}) == []
    assert filter_samples([], FilterConfig(name="informative")) == []


def test_keep_leaves_out_what_the_filter_says() -> None:
    samples = [
        *team(),
        sample("d", 0, "solver", 1.0, task="u"),
        sample("e", 0, "solver", 1.0, task="u"),
    ]
    assert {s.task for s in filter_samples(samples, FilterConfig(name="informative"))} == {"t"}
