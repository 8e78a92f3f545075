"""Tic-tac-toe: its rules, its value, and what is known about random games."""

from __future__ import annotations

from functools import cache

import pytest

from rollout.environments.games.best_response import (
    best_response_value,
    expected_payoff,
    exploitability,
    information_sets,
    uniform_strategy,
)
from rollout.environments.games.game import BadPuzzle
from rollout.environments.games.tic_tac_toe import TicTacToe

GAME = TicTacToe()
START = "123456789"


def play(cells: str) -> str:
    state = GAME.read(START)
    for cell in cells:
        state = GAME.play(state, cell)
    return state


@pytest.mark.parametrize(
    ("cells", "payoff"),
    [
        ("14253", 1),  # the first row
        ("12437", 1),  # the first column
        ("12539", 1),  # a diagonal
        ("132547", -1),  # the other diagonal, by the second player
        ("123546879", 0),  # a full board without a line
    ],
)
def test_lines_win(cells: str, payoff: float) -> None:
    state = play(cells)
    assert GAME.player(state) is None
    assert GAME.payoff(state) == payoff


def test_a_player_sees_the_board_and_may_take_a_free_cell() -> None:
    state = play("59")
    assert GAME.player(state) == "first"
    assert GAME.observe(state) == "You play X.\n1 2 3\n4 X 6\n7 8 O"
    assert GAME.legal_actions(state) == list("1234678")
    assert GAME.observe(play("5")) == "You play O.\n1 2 3\n4 X 6\n7 8 9"


def test_another_start_is_refused() -> None:
    with pytest.raises(BadPuzzle, match="'X23456789' is no start of tic-tac-toe"):
        GAME.read("X23456789")


@cache
def minimax(state: str) -> float:
    player = GAME.player(state)
    if player is None:
        return GAME.payoff(state)
    values = [minimax(GAME.play(state, cell)) for cell in GAME.legal_actions(state)]
    return max(values) if player == "first" else min(values)


def test_the_best_play_of_both_draws_and_cannot_be_exploited() -> None:
    assert minimax(START) == 0
    strategy = {}
    for state in reachable_states():
        player = GAME.player(state)
        assert player is not None
        best = [
            cell
            for cell in GAME.legal_actions(state)
            if minimax(GAME.play(state, cell)) == minimax(state)
        ]
        strategy[player, GAME.observe(state)] = {cell: 1 / len(best) for cell in best}
    assert expected_payoff(GAME, strategy) == pytest.approx(0)
    assert exploitability(GAME, strategy) == pytest.approx(0)


def reachable_states() -> set[str]:
    """Return all boards at which a player moves."""
    states: set[str] = set()
    newest = {START}
    while newest:
        running = {state for state in newest if GAME.player(state) is not None}
        states |= running
        newest = {GAME.play(state, cell) for state in running for cell in GAME.legal_actions(state)}
    return states


def test_random_games_have_their_known_outcome_and_are_lost_to_the_best_opponents() -> None:
    strategy = uniform_strategy(GAME)
    # 5,478 boards are possible; 958 of them end the game.
    assert len(strategy) == len(information_sets(GAME)) == 5478 - 958
    # X wins 737/1260 of all random games and O 363/1260; the others are drawn.
    assert expected_payoff(GAME, strategy) == pytest.approx((737 - 363) / 1260)

    @cache
    def against_random(state: str, player: str) -> float:
        """Return what the best play of one player is worth if the other one chooses at random."""
        mover = GAME.player(state)
        if mover is None:
            return GAME.payoff(state) * (1 if player == "first" else -1)
        values = [
            against_random(GAME.play(state, cell), player) for cell in GAME.legal_actions(state)
        ]
        return max(values) if mover == player else sum(values) / len(values)

    for player in ("first", "second"):
        expected = against_random(START, player)
        assert best_response_value(GAME, strategy, player) == pytest.approx(expected)
