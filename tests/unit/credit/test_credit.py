"""Advantages of samples, with an estimator for each agent."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_mas.config.estimators import AdvantageConfig, FilterConfig
from mcore_mas.credit.assign import add_advantages, columns, filter_samples
from mcore_mas.credit.samples import CreditError, Sample, step_rewards, to_samples
from mcore_mas.equations.advantages import discounted_returns, whiten
from mcore_mas.equations.turns import Turns
from tests.support.played import group, trajectory, turn

MASKED = (False, False)  # `trained` of a sample with two tokens


def sample(trajectory: str, turn: int, agent: str, reward: float, **fields: Any) -> Sample:
    """Return a sample of two tokens, with some fields changed."""
    defaults: dict[str, Any] = {
        "policy": "p",
        "task": "t",
        "prompt_ids": (1, 2, 3, 4),
        "completion_ids": (2, 3),
        "trajectory": trajectory,
        "turn": turn,
        "agent": agent,
        "reward": reward,
    }
    return Sample(**{**defaults, **fields})


def team() -> list[Sample]:
    return [
        sample("a", 0, "solver", 1.0),
        sample("a", 1, "verifier", 5.0),
        sample("b", 0, "solver", 0.0),
        sample("b", 1, "verifier", 4.0),
        sample("c", 0, "solver", 0.5),
    ]


def first_advantages(samples: list[Sample]) -> list[float]:
    """Return the advantage of the first token of each sample that has advantages."""
    return [sample.advantages[0] for sample in samples if sample.advantages]


def test_agents_of_one_policy_have_their_own_estimators() -> None:
    estimators = {
        "solver": AdvantageConfig(name="rloo"),
        "verifier": AdvantageConfig(name="drmas", options={"std": "agent", "eps": 1e-12}),
    }
    samples = add_advantages(team(), estimators)
    assert [len(sample.advantages or ()) for sample in samples] == [2] * 5
    assert [sample.reward for sample in samples] == [sample.reward for sample in team()]
    advantages = first_advantages(samples)
    # RLOO of the solver compares the means 3, 2 and 1/2 of whole trajectories.
    assert advantages[0::2] == pytest.approx([3 - 1.25, 2 - 1.75, 0.5 - 2.5])
    # Dr. MAS of the verifier compares 5 with 4.
    assert advantages[1::2] == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_children_of_different_parents_are_no_siblings_even_if_the_parents_are_filtered() -> None:
    rewards = {"0": 1.0, "1": 5.0, "0.0": 2.0, "0.1": 4.0, "1.0": 7.0, "1.1": 9.0}
    tree = [
        sample("a", node.count("."), "solver", reward, node=node)
        for node, reward in rewards.items()
    ]
    estimators = {"solver": AdvantageConfig(name="mcts")}
    assert first_advantages(add_advantages(tree, estimators)) == [
        1 - 5,
        5 - 1,
        2 - (1 + 4) / 2,
        4 - (1 + 2) / 2,
        7 - (5 + 9) / 2,
        9 - (5 + 7) / 2,
    ]
    # Without the parents, each child is compared with its sibling.
    children = tree[2:]
    assert first_advantages(add_advantages(children, estimators)) == [-2.0, 2.0, -2.0, 2.0]
    # A turn before the first branching is the parent of 0 and 1.
    with_root = [sample("a", 0, "solver", 3.0), *tree[:2]]
    assert first_advantages(add_advantages(with_root, estimators)) == [
        0.0,
        1 - (3 + 5) / 2,
        5 - (3 + 1) / 2,
    ]


def test_agents_with_a_critic_get_returns_and_others_need_no_values() -> None:
    gae = AdvantageConfig(name="gae", options={"gamma": 0.5, "lam": 1.0})
    estimators = {"solver": AdvantageConfig(name="grpo"), "verifier": gae}
    samples = team()
    for index in (1, 3):
        samples[index] = replace(samples[index], values=(1.0, 2.0), policy="q")
    credited = add_advantages(samples, estimators)
    # The discounted returns are 2.5, 5 and 2, 4. Minus the values, the advantages are 1.5, 3 and 1, 2.
    assert credited[1].returns == pytest.approx((2.5, 5.0))
    assert credited[3].returns == pytest.approx((2.0, 4.0))
    advantages = torch.tensor([1.5, 3.0, 1.0, 2.0]).double()
    expected = whiten(advantages, torch.zeros(4, dtype=torch.int64)).tolist()
    assert [*credited[1].advantages, *credited[3].advantages] == pytest.approx(expected)
    assert credited[0].returns is None
    with pytest.raises(CreditError, match="advantage 'gae' needs values of every turn"):
        add_advantages(team(), estimators)


def test_remax_needs_the_greedy_outcome() -> None:
    estimators = {"solver": AdvantageConfig(name="remax")}
    samples = [sample("a", 0, "solver", 1.0, scores={"greedy": 0.25})]
    (credited,) = add_advantages(samples, estimators)
    assert credited.advantages == (0.75, 0.75)
    with pytest.raises(CreditError, match="advantage 'remax' needs greedy"):
        add_advantages(team()[:1], estimators)


def test_a_masked_turn_is_compared_but_gets_no_advantage() -> None:
    """The number of tokens equals the number of turns, so that mixing them up would raise no error."""
    samples = [sample("a", 0, "solver", 1.0, trained=MASKED), sample("b", 0, "solver", 0.0)]
    credited = add_advantages(samples, {"solver": AdvantageConfig(name="dr_grpo")})
    assert [sample.advantages for sample in credited] == [(), (-0.5, -0.5)]


@pytest.mark.parametrize("name", ["gae", "remax", "reinforce_pp", "grpo"])
def test_a_step_of_masked_replies_has_no_advantages(name: str) -> None:
    samples = [
        sample(trajectory, 0, "solver", 1.0, trained=MASKED, scores={"greedy": 0.0})
        for trajectory in ("a", "b")
    ]
    credited = add_advantages(samples, {"solver": AdvantageConfig(name=name)})
    assert first_advantages(credited) == []


def test_penalties_are_subtracted_from_the_score() -> None:
    samples = [sample("a", 0, "solver", 1.0, penalties=(0.25, 0.25)), sample("b", 0, "solver", 1.0)]
    turns = columns(samples)
    assert turns.rewards.tolist() == [0.5, 1.0]
    assert turns.token_rewards().tolist() == [-0.25, 0.75, 0.0, 1.0]
    credited = add_advantages(samples, {"solver": AdvantageConfig(name="dr_grpo")})
    assert first_advantages(credited) == [-0.25, 0.25]


def test_nodes_and_parents_are_numbered_within_their_tree() -> None:
    samples = [sample("a", 0, "s", 0.0, node=node) for node in ("0", "1", "1.0", "1.0")]
    samples += [sample("b", 0, "s", 0.0, node="0"), sample("c", 0, "s", 0.0)]
    keys = columns(samples).keys
    assert keys["node"].tolist() == [0, 1, 2, 2, 3, 4]
    assert keys["parent"].tolist() == [-1, -1, 1, 1, -1, -1]
    assert columns(samples).step_rewards is None


def test_similar_states_join_the_first_state_that_is_near_enough() -> None:
    prompts = [(1, 2, 3, 4), (1, 2, 3, 5), (9, 9, 9, 9), (1, 2, 3, 4)]
    samples = [sample(str(i), 0, "s", 0.0, prompt_ids=prompt) for i, prompt in enumerate(prompts)]
    cluster_states = columns(samples).cluster_states
    assert cluster_states is not None
    assert cluster_states(0.75).tolist() == [0, 0, 1, 0]
    assert cluster_states(0.9).tolist() == [0, 1, 2, 0]
    # States of different tasks are never joined.
    cluster_states = columns([*samples, sample("5", 0, "s", 0.0, task="u")]).cluster_states
    assert cluster_states is not None
    assert cluster_states(0.75).tolist() == [0, 0, 1, 0, 2]


def test_an_agent_without_an_estimator_is_named() -> None:
    message = r"trajectory a, turn 1: agent 'verifier' has no estimator; agents with one: solver"
    with pytest.raises(CreditError, match=message):
        add_advantages(team(), {"solver": AdvantageConfig(name="grpo")})


def user_estimator(turns: Turns, *, factor: float = 2.0) -> torch.Tensor:
    """Estimate advantages as an estimator of a user that returns only the values."""
    return factor * turns.rewards


def test_a_users_estimator_may_return_only_values() -> None:
    name = "tests.unit.credit.test_credit:user_estimator"
    estimator = AdvantageConfig(name=name, options={"factor": 3.0})
    (credited,) = add_advantages([sample("a", 0, "solver", 0.5)], {"solver": estimator})
    assert credited.advantages == (1.5, 1.5)
    assert credited.returns is None


def test_a_step_reward_has_the_penalties_of_its_turns() -> None:
    """A step gives 1 after two turns, one of which has a penalty of 0.1: its reward is 0.9 (Dr. MAS's GiGPO)."""
    turns = [
        turn(0, "s", {"team": 1.0}, round=0),
        turn(1, "s", {"team": 1.0, "penalty": -0.1}, round=0),
        turn(2, "s", {"team": 0.5}, round=1),
    ]
    assert step_rewards(turns) == pytest.approx((0.9, 0.5))


def samples_of_rounds(*scores: dict[str, float], masked: int | None = None) -> list[Sample]:
    """Return the samples of a trajectory with one turn in each round.

    Args:
        scores: scores of each turn.
        masked: index of a masked turn, which has no reward.
    """
    turns = []
    for index, turn_scores in enumerate(scores):
        is_masked = index == masked
        played_turn = turn(index, "s", turn_scores, round=index, masked=is_masked)
        turns.append(played_turn if is_masked else replace(played_turn, reward=0.0))
    return to_samples([group(trajectory(*turns))])


def test_a_return_counts_all_steps_of_a_trajectory_even_if_turns_are_missing() -> None:
    # The steps give 1, 10 and 100. With γ = 1/2 the first return is 1 + 5 + 25.
    samples = samples_of_rounds({"team": 1.0}, {"team": 10.0}, {"team": 100.0}, masked=1)
    assert [sample.turn for sample in samples] == [0, 2]
    assert discounted_returns(columns(samples), 0.5).tolist() == [31.0, 100.0]
    assert discounted_returns(columns(samples[:1]), 0.5).tolist() == [31.0]


def test_a_turn_without_a_following_step_has_no_return() -> None:
    samples = samples_of_rounds({"team": 1.0}, {})
    assert columns(samples[:1]).step_rewards is not None
    message = "advantage 'gigpo' needs step_rewards of every turn, and a turn has none"
    with pytest.raises(CreditError, match=message):
        add_advantages(samples, {"s": AdvantageConfig(name="gigpo")})


def test_a_masked_turn_with_a_reward_counts_only_for_its_peers() -> None:
    """DAPO masks the loss of truncated replies, and keeps their rewards in the group's mean."""
    first = sample("a", 0, "s", 1.0)
    masked = sample("b", 0, "s", 0.0, trained=MASKED)
    third = sample("c", 0, "s", 0.5)
    credited = add_advantages([first, masked, third], {"s": AdvantageConfig(name="dr_grpo")})
    assert [sample.advantages for sample in credited] == [(0.5, 0.5), (), (0.0, 0.0)]
    assert [sample.has_gradient for sample in credited] == [True, False, False]

    # A masked turn needs no values.
    first = replace(first, values=(0.0, 0.0))
    third = replace(third, values=(0.0, 0.0))
    credited = add_advantages([first, masked, third], {"s": AdvantageConfig(name="gae")})
    assert [len(sample.advantages or ()) for sample in credited] == [2, 0, 2]


def test_a_step_without_samples_has_no_advantages() -> None:
    assert add_advantages([], {}) == []
    assert filter_samples([], FilterConfig(name="informative")) == []


def test_filtered_samples_are_removed() -> None:
    equal_rewards = [
        sample("d", 0, "solver", 1.0, task="u"),
        sample("e", 0, "solver", 1.0, task="u"),
    ]
    remaining = filter_samples([*team(), *equal_rewards], FilterConfig(name="informative"))
    assert {sample.task for sample in remaining} == {"t"}
