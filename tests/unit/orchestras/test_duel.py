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
from rollout.tasks.deals import deal_demonstrations, deal_tasks
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
