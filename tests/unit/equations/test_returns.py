"""Advantages by token, by hand."""

from dataclasses import replace

import pytest
import torch

from mcore_mas.equations.advantages import (
    advantages_and_returns,
    gae,
    reinforce_pp,
    reinforce_pp_baseline,
    whiten,
)
from tests.support.turns import make_turns


def test_whitening_is_by_group_over_tokens() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 10.0, 14.0]).double()
    got = whiten(values, torch.tensor([0, 0, 0, 1, 1]), eps=0.0)
    assert got.tolist() == pytest.approx([-1.0, 0.0, 1.0, -(0.5**0.5), 0.5**0.5])


def test_reinforce_pp_whitens_returns_to_go() -> None:
    # two turns of 2 and 1 tokens with rewards 4 and 1; γ = 1/2: returns 2, 4, 1
    turns = make_turns([{"tokens": 2, "score": 4.0}, {"turn": 1, "tokens": 1, "score": 1.0}])
    mean, std = 7 / 3, (((2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2 + (1 - 7 / 3) ** 2) / 2) ** 0.5
    assert reinforce_pp(turns, gamma=0.5).values.tolist() == pytest.approx(
        [(v - mean) / std for v in (2, 4, 1)]
    )


def test_a_token_penalty_stays_on_its_token() -> None:
    turns = make_turns([{"tokens": 3, "score": 1.0 - 0.6}], penalties=[0.1, 0.2, 0.3])
    assert turns.token_rewards().tolist() == pytest.approx([-0.1, -0.2, 1.0 - 0.3])


def test_reinforce_pp_baseline_subtracts_the_task_mean_first() -> None:
    rows = [{"task": t, "trajectory": i, "tokens": n, "score": s}
            for i, (t, n, s) in enumerate([("t", 1, 1.0), ("t", 2, 3.0), ("u", 1, 10.0)])]  # fmt: skip
    # centred: -1, (1, 1), 0 by token; mean 1/4
    values = [-1.0, 1.0, 1.0, 0.0]
    std = (sum((v - 0.25) ** 2 for v in values) / 3) ** 0.5
    assert reinforce_pp_baseline(make_turns(rows)).values.tolist() == pytest.approx(
        [(v - 0.25) / std for v in values]
    )


def test_whitening_may_be_by_agent_or_over_all() -> None:
    said = [(0, 1), (0, 3), (1, 5), (1, 9)]
    rows = [
        {"agent": agent, "policy": agent, "trajectory": i, "score": s}
        for i, (agent, s) in enumerate(said)
    ]
    by_agent = reinforce_pp(make_turns(rows), whitened="agent").values.tolist()
    assert by_agent == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2)
    assert reinforce_pp(make_turns(rows)).values.tolist() == pytest.approx(
        by_agent
    )  # each agent has its own policy
    std = ((3.5**2 + 1.5**2 + 0.5**2 + 4.5**2) / 3) ** 0.5
    expected = [(v - 4.5) / std for v in (1, 3, 5, 9)]
    assert reinforce_pp(make_turns(rows), whitened="batch").values.tolist() == pytest.approx(
        expected
    )


def test_gae_by_hand() -> None:
    # one turn of three tokens, reward 1 at its end, V = 0.5, 0.25, 0.75; γ = 1/2, λ = 1/2
    turns = make_turns([{"tokens": 3, "score": 1.0}], values=[0.5, 0.25, 0.75])
    # δ = 0.5*0.25 - 0.5, 0.5*0.75 - 0.25, 1 - 0.75 = -0.375, 0.125, 0.25
    expected = [-0.375 + 0.25 * (0.125 + 0.25 * 0.25), 0.125 + 0.25 * 0.25, 0.25]
    advantages, returns = advantages_and_returns(turns, gamma=0.5, lam=0.5, across="turn")
    assert advantages.tolist() == pytest.approx(expected)
    assert returns.tolist() == pytest.approx(
        [a + v for a, v in zip(expected, (0.5, 0.25, 0.75), strict=True)]
    )
    mean = sum(expected) / 3
    std = (sum((v - mean) ** 2 for v in expected) / 2) ** 0.5
    assert gae(turns, gamma=0.5, lam=0.5).values.tolist() == pytest.approx(
        [(v - mean) / std for v in expected]
    )


def test_d9_the_reward_of_a_reply_without_tokens_is_nobody_elses() -> None:
    """x of 2 tokens with 0, y of none with 10, z of 2 with 1: token rewards were 0, 10, 0, 1."""
    said = [
        {"turn": i, "tokens": n, "score": s}
        for i, (n, s) in enumerate([(2, 0.0), (0, 10.0), (2, 1.0)])
    ]
    assert make_turns(said).token_rewards().tolist() == [0.0, 0.0, 0.0, 1.0]
    assert make_turns(said[1:]).token_rewards().tolist() == [0.0, 1.0]  # first of all, it raised
    assert reinforce_pp(make_turns(said)).values.shape == (4,)


def test_d8_gae_never_runs_through_siblings() -> None:
    """Nodes 0 (reward 5), 1 (0), 1.0 (1) and 1.1 (7), values 0: the targets were 13, 8, 8, 7."""
    nodes = {"0": 5.0, "1": 0.0, "1.0": 1.0, "1.1": 7.0}
    rows = [
        {"node": node, "turn": node.count("."), "score": score} for node, score in nodes.items()
    ]
    turns = make_turns(rows, values=[0.0] * 4)
    for across in ("turn", "agent"):
        _, targets = advantages_and_returns(turns, across=across)
        assert targets.tolist() == [5.0, 0.0, 1.0, 7.0]
    # two turns of one agent in a node are a line
    more = make_turns([*rows, {"node": "1.1", "turn": 3, "score": 2.0}], values=[0.0] * 5)
    assert advantages_and_returns(more, across="agent")[1].tolist() == [5.0, 0.0, 1.0, 9.0, 2.0]


def test_gae_across_an_agents_turns_joins_them_in_order() -> None:
    # agent 0 speaks in turns 2 and 0 (rows out of order), agent 1 between; all values 0, γ = λ = 1: returns to go
    rows = [
        {"turn": 2, "tokens": 2, "score": 4.0},
        {"turn": 1, "tokens": 1, "agent": 1, "score": 2.0},
        {"turn": 0, "tokens": 1, "score": 1.0},
    ]
    turns = make_turns(rows, values=[0.0] * 4)
    assert advantages_and_returns(turns, gamma=1.0, lam=1.0, across="turn")[0].tolist() == [
        4.0,
        4.0,
        2.0,
        1.0,
    ]
    assert advantages_and_returns(turns, gamma=1.0, lam=1.0, across="agent")[0].tolist() == [
        4.0,
        4.0,
        2.0,
        5.0,
    ]


def test_with_lambda_one_the_targets_are_the_returns_whatever_the_critic_says() -> None:
    turns = make_turns([{"tokens": 3, "score": 2.0}], values=[5.0, -1.0, 0.3])
    assert advantages_and_returns(turns, gamma=1.0, lam=1.0, across="turn")[
        1
    ].tolist() == pytest.approx([2.0] * 3)


def test_a_missing_critic_is_said() -> None:
    with pytest.raises(ValueError, match="gae needs the values of a critic"):
        gae(replace(make_turns([{"score": 1.0}]), values=None))
