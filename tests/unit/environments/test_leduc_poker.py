"""Leduc poker: its rules, and exact values that a brute force confirms."""

from __future__ import annotations

from collections import Counter

import pytest

from rollout.environments.games.best_response import (
    InformationSet,
    best_response_value,
    expected_payoff,
    exploitability,
    information_sets,
    uniform_strategy,
)
from rollout.environments.games.game import BadPuzzle
from rollout.environments.games.leduc_poker import LeducHand, LeducPoker

GAME = LeducPoker()


def play(deal: str, actions: str) -> LeducHand:
    """Return the state after actions, written by their first letters."""
    state = GAME.read(deal)
    for letter in actions:
        [action] = [action for action in GAME.legal_actions(state) if action[0] == letter]
        state = GAME.play(state, action)
    return state


@pytest.mark.parametrize(
    ("deal", "actions", "payoff"),
    [
        ("Js Ks Qs", "rf", 1),  # the second player loses the ante
        ("Ks Js Qs", "crf", -1),
        ("Ks Js Qs", "rrf", -3),  # the ante and a raise of 2
        ("Js Ks Qs", "rrcrf", 5),  # two raises of the first round
        ("Ks Js Qs", "cccc", 1),
        ("Ks Js Qs", "rccrc", 7),  # 1 + 2 + 4
        ("Ks Js Jh", "rrcrrc", -13),  # a pair of J beats K, for 1 + 2 + 2 + 4 + 4
        ("Qs Qh Ks", "rrcrrc", 0),
    ],
)
def test_a_game_pays_what_the_rules_say(deal: str, actions: str, payoff: float) -> None:
    state = play(deal, actions)
    assert GAME.player(state) is None
    assert GAME.payoff(state) == payoff


def test_a_player_sees_its_own_card_and_later_the_open_one() -> None:
    assert GAME.observe(play("Js Ks Qs", "")) == (
        "Your card: J. First round: nothing. Legal: call, raise."
    )
    assert GAME.observe(play("Js Ks Qs", "rr")) == (
        "Your card: J. First round: raise raise. Legal: fold, call."
    )
    state = play("Js Ks Qs", "rcc")
    assert GAME.player(state) == "second"
    assert GAME.observe(state) == (
        "Your card: K. First round: raise call. Open card: Q. Second round: call. "
        "Legal: call, raise."
    )


def test_a_deal_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadPuzzle, match="'Js Js Qs' is no deal of Leduc poker; expected three of"):
        GAME.read("Js Js Qs")


def brute_force(player: str) -> float:
    """Compute the best response to uniform play: list all histories, then choose from the last turn on."""
    sign = 1 if player == "first" else -1
    # Payoff and number of turns of each end, with its probability if the player takes all its turns,
    # and these turns, each as information set and action.
    ends: list[tuple[float, list[tuple[InformationSet, str]]]] = []

    def visit(state: LeducHand, reach: float, turns: list[tuple[InformationSet, str]]) -> None:
        mover = GAME.player(state)
        if mover is None:
            ends.append((sign * reach * GAME.payoff(state), turns))
            return
        legal = GAME.legal_actions(state)
        for action in legal:
            after = GAME.play(state, action)
            if mover == player:
                visit(after, reach, [*turns, ((mover, GAME.observe(state)), action)])
            else:
                visit(after, reach / len(legal), turns)

    for deal, probability in GAME.deals().items():
        visit(GAME.read(deal), probability, [])

    depth = max(len(turns) for _, turns in ends)
    chosen: dict[InformationSet, str] = {}
    for turn in reversed(range(depth)):
        values: Counter[tuple[InformationSet, str]] = Counter()
        for value, turns in ends:
            follows = all(chosen[info_set] == action for info_set, action in turns[turn + 1 :])
            if len(turns) > turn and follows:
                values[turns[turn]] += value  # type: ignore[assignment]
        for info_set in {info_set for info_set, _ in values}:
            options = {
                action: value for (other, action), value in values.items() if other == info_set
            }
            chosen[info_set] = max(options, key=options.__getitem__)
    return sum(
        value
        for value, turns in ends
        if all(chosen[info_set] == action for info_set, action in turns)
    )


def test_best_responses_to_uniform_play_are_those_of_a_brute_force() -> None:
    strategy = uniform_strategy(GAME)
    assert len(strategy) == len(information_sets(GAME)) == 288
    by_player = [brute_force(player) for player in ("first", "second")]
    assert best_response_value(GAME, strategy, "first") == pytest.approx(by_player[0])
    assert best_response_value(GAME, strategy, "second") == pytest.approx(by_player[1])
    # OpenSpiel prints 4.747222 as NashConv of uniform play in its `leduc_poker`: the sum of both.
    assert sum(by_player) == pytest.approx(4.747222, abs=1e-6)
    assert exploitability(GAME, strategy) == pytest.approx(sum(by_player) / 2)
    assert expected_payoff(GAME, strategy) == pytest.approx(-5 / 64)
