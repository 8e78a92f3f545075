"""Orchestra `duel`: turns, prompts, and rewards and advantages of two agents that play against each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import to_samples
from rollout.environments.games.best_response import information_sets
from rollout.environments.games.kuhn_poker import KuhnPoker
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.rewards.turn_scores import local_team
from rollout.tasks.deals import deal_demonstrations, deal_tasks, random_strategy
from rollout.teams.roles import ROLES
from tests.support.casts import play, scores, speakers, validity

DEAL = Task(id="k", prompt="K Q", answers=(), env="kuhn_poker", source="k", split="train")
ROLES_BY_AGENT = {"first": "duelist", "second": "duelist"}


def duel(*replies: str) -> tuple[Trajectory, list[str]]:
    return play("duel", ROLES_BY_AGENT, *replies, task=DEAL)


def test_the_agents_take_turns_and_see_their_own_card_alone() -> None:
    trajectory, prompts = duel("pass", "bet", "bet")
    assert speakers(trajectory) == ["first", "second", "first"]
    assert "Your card: K. Actions so far: nothing." in prompts[0]
    assert "Your card: Q. Actions so far: pass." in prompts[1]
    assert "Your card: K. Actions so far: pass bet." in prompts[2]
    assert all("Two players put one point each into the pot" in prompt for prompt in prompts)
    assert trajectory.outcome == 2
    assert scores(trajectory) == [2, -2, 2]


def test_an_unusable_reply_forfeits_the_game() -> None:
    trajectory, _ = duel("pass", "<think>I do not know")
    assert trajectory.status is Status.COMPLETED
    assert trajectory.outcome == 2
    assert scores(trajectory) == [2, -2]
    assert validity(trajectory) == [True, True]


def test_each_agent_is_compared_with_its_own_turns() -> None:
    """Two games of one deal: first wins 2 and 1 points, so second loses 2 and 1."""
    trajectories = []
    for sample, replies in enumerate([("bet", "bet"), ("bet", "pass")]):
        trajectory, _ = duel(*replies)
        trajectories.append(replace(trajectory, id=f"game {sample}", sample=sample))
    group = local_team(Group(task=DEAL, trajectories=tuple(trajectories)), alpha=0)
    rewards = [[turn.reward for turn in trajectory.turns] for trajectory in group.trajectories]
    assert rewards == [[2, -2], [1, -1]]

    estimator = AdvantageConfig(name="drmas", options={"std": "none"})
    samples = add_advantages(to_samples([group]), dict.fromkeys(ROLES_BY_AGENT, estimator))
    advantages = {}
    for sample in samples:
        assert sample.advantages is not None
        advantages[sample.trajectory, sample.agent] = sample.advantages[0]
    assert sorted(value for (_, agent), value in advantages.items() if agent == "first") == [
        pytest.approx(-0.5),
        pytest.approx(0.5),
    ]
    assert sorted(value for (_, agent), value in advantages.items() if agent == "second") == [
        pytest.approx(-0.5),
        pytest.approx(0.5),
    ]


def test_all_splits_have_the_deals() -> None:
    tasks = deal_tasks("kuhn_poker", 1, {"train": 6, "validation": 6, "test": 2})
    deals = set(KuhnPoker().deals())
    assert {task.prompt for task in tasks if task.split == "train"} == deals
    assert {task.prompt for task in tasks if task.split == "validation"} == deals
    assert len({task.id for task in tasks}) == 14
    with pytest.raises(ValueError, match="kuhn_poker: 7 train tasks asked for, but there are 6"):
        deal_tasks("kuhn_poker", 1, {"train": 7})


def test_demonstrations_are_random_games() -> None:
    roles = {agent: ROLES[role] for agent, role in ROLES_BY_AGENT.items()}
    demonstrations = list(islice(deal_demonstrations("kuhn_poker", 1, 2000, roles=roles), 2000))
    bets = [demonstration.messages[-1].content == "bet" for demonstration in demonstrations]
    # 2,000 draws of probability 1/2 have a standard deviation of 22.
    assert abs(sum(bets) - 1000) < 100
    prompts = {
        (demonstration.agent, demonstration.messages[-2].content)
        for demonstration in demonstrations
    }
    assert len(prompts) == len(information_sets(KuhnPoker())) == 12


def test_with_a_spread_the_players_choose_differently_in_every_information_set() -> None:
    strategy = random_strategy("kuhn_poker", 1, 0.5)
    assert strategy.keys() == information_sets(KuhnPoker()).keys()
    bets = [probabilities["bet"] for probabilities in strategy.values()]
    # Weights are between 0.5 and 1.5, so that a bet has at most 1.5 / (1.5 + 0.5).
    assert 0.25 <= min(bets) < 0.4
    assert 0.6 < max(bets) <= 0.75
    assert len(set(bets)) == 12
    assert set(
        random_strategy("kuhn_poker", 1, 0)[
            "first", "Your card: J. Actions so far: nothing."
        ].values()
    ) == {0.5}

    roles = {agent: ROLES[role] for agent, role in ROLES_BY_AGENT.items()}
    demonstrations = deal_demonstrations("kuhn_poker", 1, 4000, roles=roles, spread=0.5)
    with_king = "Your card: K. Actions so far: nothing."
    replies = []
    for demonstration in demonstrations:
        if with_king in demonstration.messages[-2].content:
            replies.append(demonstration.messages[-1].content)
    share = replies.count("bet") / len(replies)
    # About 560 replies: a standard deviation of 0.02.
    assert share == pytest.approx(strategy["first", with_king]["bet"], abs=0.07)
