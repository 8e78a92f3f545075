"""Advantages and returns of tokens against values computed by hand."""

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


def whitened(values: list[float]) -> list[float]:
    """Subtract the mean of values and divide them by their standard deviation."""
    mean = sum(values) / len(values)
    std = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return [(value - mean) / std for value in values]


def test_whitening_is_by_group_over_tokens() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 10.0, 14.0]).double()
    result = whiten(values, torch.tensor([0, 0, 0, 1, 1]), eps=0.0)
    assert result.tolist() == pytest.approx([-1.0, 0.0, 1.0, -(0.5**0.5), 0.5**0.5])


def test_reinforce_pp_whitens_discounted_returns() -> None:
    # Two turns of 2 and 1 tokens have the rewards 4 and 1. With γ = 1/2 the returns are 2, 4 and 1.
    turns = make_turns([{"tokens": 2, "score": 4.0}, {"turn": 1, "tokens": 1, "score": 1.0}])
    advantages = reinforce_pp(turns, gamma=0.5).values.tolist()
    assert advantages == pytest.approx(whitened([2, 4, 1]))


def test_a_token_penalty_stays_on_its_token() -> None:
    turns = make_turns([{"tokens": 3, "score": 1.0 - 0.6}], penalties=[0.1, 0.2, 0.3])
    assert turns.token_rewards().tolist() == pytest.approx([-0.1, -0.2, 1.0 - 0.3])


def test_reinforce_pp_baseline_subtracts_the_mean_of_the_task_before_it_whitens() -> None:
    turns = make_turns(
        [
            {"task": "t", "trajectory": 0, "tokens": 1, "score": 1.0},
            {"task": "t", "trajectory": 1, "tokens": 2, "score": 3.0},
            {"task": "u", "trajectory": 2, "tokens": 1, "score": 10.0},
        ]
    )
    # Minus the means 2 and 10, the tokens have -1, then 1 and 1, then 0.
    advantages = reinforce_pp_baseline(turns).values.tolist()
    assert advantages == pytest.approx(whitened([-1.0, 1.0, 1.0, 0.0]))


def test_whitening_may_be_by_agent_or_over_the_batch() -> None:
    # Each agent has its own policy.
    turns = make_turns(
        [
            {"agent": 0, "policy": 0, "trajectory": 0, "score": 1},
            {"agent": 0, "policy": 0, "trajectory": 1, "score": 3},
            {"agent": 1, "policy": 1, "trajectory": 2, "score": 5},
            {"agent": 1, "policy": 1, "trajectory": 3, "score": 9},
        ]
    )
    by_agent = reinforce_pp(turns, whitened="agent").values.tolist()
    assert by_agent == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2)
    by_policy = reinforce_pp(turns).values.tolist()
    assert by_policy == pytest.approx(by_agent)
    over_batch = reinforce_pp(turns, whitened="batch").values.tolist()
    assert over_batch == pytest.approx(whitened([1, 3, 5, 9]))


def test_gae_by_hand() -> None:
    # One turn of three tokens has the reward 1 at its end and V = 0.5, 0.25, 0.75; γ = 1/2, λ = 1/2.
    values = [0.5, 0.25, 0.75]
    turns = make_turns([{"tokens": 3, "score": 1.0}], values=values)
    # δ = 0.5 · 0.25 - 0.5, 0.5 · 0.75 - 0.25, 1 - 0.75 = -0.375, 0.125, 0.25
    expected = [-0.375 + 0.25 * (0.125 + 0.25 * 0.25), 0.125 + 0.25 * 0.25, 0.25]
    advantages, returns = advantages_and_returns(turns, gamma=0.5, lam=0.5, across="turn")
    assert advantages.tolist() == pytest.approx(expected)
    expected_returns = [a + v for a, v in zip(expected, values, strict=True)]
    assert returns.tolist() == pytest.approx(expected_returns)
    assert gae(turns, gamma=0.5, lam=0.5).values.tolist() == pytest.approx(whitened(expected))


def test_the_reward_of_a_reply_without_tokens_reaches_no_other_reply() -> None:
    """The token rewards were 0, 10, 0, 1; and without the first reply there was an error."""
    rows = [
        {"turn": 0, "tokens": 2, "score": 0.0},
        {"turn": 1, "tokens": 0, "score": 10.0},
        {"turn": 2, "tokens": 2, "score": 1.0},
    ]
    assert make_turns(rows).token_rewards().tolist() == [0.0, 0.0, 0.0, 1.0]
    assert make_turns(rows[1:]).token_rewards().tolist() == [0.0, 1.0]
    assert reinforce_pp(make_turns(rows)).values.shape == (4,)


def test_gae_never_runs_through_siblings() -> None:
    """The targets of nodes 0, 1, 1.0 and 1.1 were 13, 8, 8 and 7."""
    scores = {"0": 5.0, "1": 0.0, "1.0": 1.0, "1.1": 7.0}
    rows = [
        {"node": node, "turn": node.count("."), "score": score} for node, score in scores.items()
    ]
    turns = make_turns(rows, values=[0.0] * 4)
    for across in ("turn", "agent"):
        _, targets = advantages_and_returns(turns, across=across)
        assert targets.tolist() == [5.0, 0.0, 1.0, 7.0]
    # Two turns of one agent in a node follow each other.
    second_turn = {"node": "1.1", "turn": 3, "score": 2.0}
    turns = make_turns([*rows, second_turn], values=[0.0] * 5)
    _, targets = advantages_and_returns(turns, across="agent")
    assert targets.tolist() == [5.0, 0.0, 1.0, 9.0, 2.0]


def test_gae_across_the_turns_of_an_agent_joins_them_in_their_order() -> None:
    # Agent 0 speaks in turns 0 and 2, agent 1 in between. All values are 0 and γ = λ = 1, so that the
    # advantages are returns.
    rows = [
        {"turn": 2, "tokens": 2, "score": 4.0},
        {"turn": 1, "tokens": 1, "agent": 1, "score": 2.0},
        {"turn": 0, "tokens": 1, "score": 1.0},
    ]
    turns = make_turns(rows, values=[0.0] * 4)
    by_turn, _ = advantages_and_returns(turns, gamma=1.0, lam=1.0, across="turn")
    assert by_turn.tolist() == [4.0, 4.0, 2.0, 1.0]
    by_agent, _ = advantages_and_returns(turns, gamma=1.0, lam=1.0, across="agent")
    assert by_agent.tolist() == [4.0, 4.0, 2.0, 5.0]


def test_with_lambda_one_the_targets_do_not_depend_on_the_critic() -> None:
    turns = make_turns([{"tokens": 3, "score": 2.0}], values=[5.0, -1.0, 0.3])
    _, targets = advantages_and_returns(turns, gamma=1.0, lam=1.0, across="turn")
    assert targets.tolist() == pytest.approx([2.0] * 3)


def test_gae_without_a_critic_is_an_error() -> None:
    with pytest.raises(ValueError, match="gae needs the values of a critic"):
        gae(replace(make_turns([{"score": 1.0}]), values=None))
