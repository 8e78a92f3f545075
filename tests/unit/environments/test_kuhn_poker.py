"""Kuhn poker: rules, the environment, and exact values of strategies that are computed by hand."""

from __future__ import annotations

import asyncio

import pytest

from rollout.base.errors import EnvError
from rollout.environments import ENVS
from rollout.environments.games.best_response import (
    InformationSet,
    best_response_value,
    expected_payoff,
    exploitability,
    information_sets,
    uniform_strategy,
)
from rollout.environments.games.kuhn_poker import KuhnPoker
from rollout.environments.protocol import Decision, Step
from rollout.records.trajectory import Task

GAME = KuhnPoker()


def seen(card: str, history: str = "nothing") -> str:
    return f"Your card: {card}. Actions so far: {history}."


def bets(**probabilities: float) -> dict[InformationSet, dict[str, float]]:
    """Return a strategy from the probability of a bet by card, for each of the four decisions.

    A keyword is a decision and a card: `first_K`, `answer_K` (the first player's, after a pass and a
    bet), `after_pass_K` and `after_bet_K` (the second player's).
    """
    decisions = {
        "first": ("first", "nothing"),
        "answer": ("first", "pass bet"),
        "after_pass": ("second", "pass"),
        "after_bet": ("second", "bet"),
    }
    strategy = {}
    for decision, (player, history) in decisions.items():
        for card in "JQK":
            bet = probabilities[f"{decision}_{card}"]
            strategy[player, seen(card, history)] = {"pass": 1 - bet, "bet": bet}
    return strategy


def equilibrium(alpha: float) -> dict[InformationSet, dict[str, float]]:
    """Return Kuhn's equilibrium, in which the first player bets on a J with probability alpha."""
    return bets(
        first_J=alpha,
        first_Q=0,
        first_K=3 * alpha,
        answer_J=0,
        answer_Q=alpha + 1 / 3,
        answer_K=1,
        after_pass_J=1 / 3,
        after_pass_Q=0,
        after_pass_K=1,
        after_bet_J=0,
        after_bet_Q=1 / 3,
        after_bet_K=1,
    )


@pytest.mark.parametrize("alpha", [0, 1 / 6, 1 / 3])
def test_the_equilibria_cannot_be_exploited_and_cost_the_first_player_an_eighteenth(
    alpha: float,
) -> None:
    strategy = equilibrium(alpha)
    assert expected_payoff(GAME, strategy) == pytest.approx(-1 / 18)
    assert best_response_value(GAME, strategy, "first") == pytest.approx(-1 / 18)
    assert best_response_value(GAME, strategy, "second") == pytest.approx(1 / 18)
    assert exploitability(GAME, strategy) == pytest.approx(0)


def test_the_uniform_strategy_is_exploited_as_computed_by_hand() -> None:
    strategy = uniform_strategy(GAME)
    assert len(strategy) == 12

    # A bet of the first player is answered in half of the games. After a pass, half of the games
    # end; in the others the second player bets, and the first player passes or bets.
    # With K (always higher): a bet wins (1 + 2) / 2 = 3/2; a pass and a bet (1 + 2) / 2 = 3/2.
    # With Q (higher half of the time): a bet wins (1 + 0) / 2 = 1/2; after a pass, the player is
    # even without a bet, and loses nothing on average by a bet: 0. The bet is better.
    # With J (always lower): a bet wins (1 - 2) / 2 = -1/2; a pass and a pass -1.
    assert best_response_value(GAME, strategy, "first") == pytest.approx(
        (3 / 2 + 1 / 2 - 1 / 2) / 3
    )

    # Second player. After a pass, a bet is answered by a pass or a bet with probability 1/2:
    # K: a bet wins (1 + 2) / 2 = 3/2; Q: (1 + 0) / 2 = 1/2; J: (1 - 2) / 2 = -1/2, all better than
    # to pass (1, 0 and -1). After a bet: K wins 2; Q is even; J passes and loses 1.
    after_pass = (3 / 2 + 1 / 2 - 1 / 2) / 3
    after_bet = (2 + 0 - 1) / 3
    expected = (after_pass + after_bet) / 2
    assert best_response_value(GAME, strategy, "second") == pytest.approx(expected)
    assert exploitability(GAME, strategy) == pytest.approx(11 / 24)

    # Payoffs of a random game with the higher card: +1, +1, +2, -1 and +2 with probabilities 1/4, 1/4,
    # 1/4, 1/8 and 1/8; with the lower card: -1, +1, -2, -1, -2. The mean of both is 1/8.
    assert expected_payoff(GAME, strategy) == pytest.approx((9 / 8 - 7 / 8) / 2)


def test_the_strategy_of_always_betting_loses_to_passing_with_the_lowest_card() -> None:
    always = {key: {"pass": 0.0, "bet": 1.0} for key in information_sets(GAME)}
    # Either player answers with K (wins 2) and with Q (even), and passes with J (loses 1).
    assert best_response_value(GAME, always, "second") == pytest.approx((2 + 0 - 1) / 3)
    assert best_response_value(GAME, always, "first") == pytest.approx((2 + 0 - 1) / 3)
    assert exploitability(GAME, always) == pytest.approx(1 / 3)


def play(deal: str, *actions: str) -> tuple[list[Decision], Step, str]:
    """Play a game; return the decisions before each action, the last step and the rules."""
    task = Task(id="k", prompt=deal, answers=(), env="kuhn_poker", source="k", split="train")
    env = ENVS["kuhn_poker"](task)
    rules = env.reset(task)

    async def run() -> tuple[list[Decision], Step]:
        decisions = []
        for action in actions:
            decisions.append(await env.decision())  # type: ignore[attr-defined]
            step = await env.step(action)
        return decisions, step

    decisions, step = asyncio.run(run())
    return decisions, step, rules


@pytest.mark.parametrize(
    ("deal", "actions", "payoff"),
    [
        ("K Q", ["pass", "pass"], 1),
        ("J Q", ["pass", "pass"], -1),
        ("J Q", ["bet", "pass"], 1),
        ("K Q", ["bet", "bet"], 2),
        ("J K", ["bet", "bet"], -2),
        ("K Q", ["pass", "bet", "pass"], -1),
        ("K Q", ["pass", "bet", "bet"], 2),
    ],
)
def test_a_game_pays_what_the_rules_say(deal: str, actions: list[str], payoff: float) -> None:
    decisions, step, rules = play(deal, *actions)
    assert [decision.player for decision in decisions] == ["first", "second", "first"][
        : len(actions)
    ]
    assert step == Step(
        reward=payoff,
        done=True,
        metrics={"solved": float(payoff > 0), "payoff": payoff, "forfeited": 0.0},
    )
    assert "K is the highest" in rules
    # Each player sees its own card alone.
    assert decisions[0].observation == seen(deal[0])
    assert decisions[1].observation == seen(deal[2], actions[0])


def test_an_illegal_action_forfeits_the_game() -> None:
    _, step, _ = play("K Q", "raise")
    assert step.done
    assert step.reward == -2
    assert step.metrics == {"solved": 0.0, "payoff": -2.0, "forfeited": 1.0}
    _, step, _ = play("J Q", "pass", "")
    assert step.reward == 2


def test_the_state_is_the_information_set_of_the_player_to_move() -> None:
    task = Task(id="k", prompt="K J", answers=(), env="kuhn_poker", source="k", split="train")
    env: object = ENVS["kuhn_poker"](task)
    assert env.state() == ""  # type: ignore[attr-defined]
    env.reset(task)  # type: ignore[attr-defined]
    assert env.state() == seen("K")  # type: ignore[attr-defined]
    asyncio.run(env.step("bet"))  # type: ignore[attr-defined]
    assert env.state() == seen("J", "bet")  # type: ignore[attr-defined]


def test_a_deal_that_does_not_exist_is_refused() -> None:
    with pytest.raises(EnvError, match="task k: 'K K' is no deal of Kuhn poker"):
        play("K K", "bet")


def test_a_game_that_has_ended_cannot_go_on() -> None:
    with pytest.raises(EnvError, match="KuhnPokerEnv: no game is being played"):
        play("K Q", "bet", "bet", "bet")
