"""Ratings from games, with numbers that are computed by hand."""

from __future__ import annotations

import math

import pytest

from mcore_mas.reports.ratings import Games, bradley_terry


def test_two_players_differ_by_the_logarithm_of_their_odds() -> None:
    """With the drawn game, a has 75 of 100 points whoever moves first: odds of 3 to 1."""
    ratings = bradley_terry(
        {("a", "b"): Games(score=74.5, count=99), ("b", "a"): Games(score=24.5, count=99)}
    )
    difference = 400 * math.log10(3)  # 191
    assert ratings.players["a"].value == pytest.approx(difference / 2)
    assert ratings.players["b"].value == pytest.approx(-difference / 2)
    assert ratings.first_move.value == pytest.approx(0, abs=1e-6)
    # The information of 200 games about the difference is 200 · 3/4 · 1/4 = 37.5; each rating is half
    # of the difference: 1.96 · 400 / ln 10 / √37.5 / 2 = 27.8.
    assert ratings.players["a"].margin == pytest.approx(27.8, abs=0.05)
    assert str(ratings.players["a"]) == "+95 ± 28"


def test_the_first_move_is_no_merit_of_a_player() -> None:
    """Whoever moves first has 75 of 100 points, also in self-play."""
    half = Games(score=74.5, count=99)
    ratings = bradley_terry({("a", "b"): half, ("b", "a"): half, ("a", "a"): half})
    assert ratings.players["a"].value == pytest.approx(0, abs=1e-6)
    assert ratings.players["b"].value == pytest.approx(0, abs=1e-6)
    assert ratings.first_move.value == pytest.approx(400 * math.log10(3))


def test_a_chain_of_games_rates_players_that_have_never_met() -> None:
    """a beats b with odds of 3 to 1, and b beats c likewise, so a beats c with odds of 9 to 1."""
    wins = Games(score=74.5, count=99)
    losses = Games(score=24.5, count=99)
    ratings = bradley_terry(
        {("a", "b"): wins, ("b", "a"): losses, ("b", "c"): wins, ("c", "b"): losses}
    )
    difference = ratings.players["a"].value - ratings.players["c"].value
    assert difference == pytest.approx(400 * math.log10(9))
    assert ratings.players["b"].value == pytest.approx(0, abs=1e-6)


def test_a_player_who_has_won_all_games_has_a_finite_rating() -> None:
    ratings = bradley_terry(
        {("a", "b"): Games(score=10, count=10), ("b", "a"): Games(score=0, count=10)}
    )
    # 10.5 of 11 points: odds of 21 to 1.
    difference = ratings.players["a"].value - ratings.players["b"].value
    assert difference == pytest.approx(400 * math.log10(21))


def test_pairs_with_few_games_beside_pairs_with_many() -> None:
    """a wins all games, and c loses all of them: 1,000 of each pair, and a single game with c first."""
    games = {
        ("a", "c"): Games(score=1000, count=1000),
        ("b", "a"): Games(score=0, count=1000),
        ("b", "c"): Games(score=1000, count=1000),
        ("c", "b"): Games(score=0, count=1),
    }
    ratings = bradley_terry(games)

    def expected_points(first: str, second: str) -> float:
        """Return the points of the first player by the ratings, with the drawn game."""
        points = ratings.first_move.value
        points += ratings.players[first].value - ratings.players[second].value
        return (games[first, second].count + 1) / (1 + 10 ** (-points / 400))

    # At the maximum likelihood, each player's expected points equal the points in the games.
    a_points = expected_points("a", "c") + 1001 - expected_points("b", "a")
    assert a_points == pytest.approx(1000.5 + 1000.5)
    c_points = 1001 - expected_points("a", "c") + 1001 - expected_points("b", "c")
    c_points += expected_points("c", "b")
    assert c_points == pytest.approx(0.5 + 0.5 + 0.5)
    # So do those of the players who move first.
    assert sum(expected_points(*pair) for pair in games) == pytest.approx(
        1000.5 + 0.5 + 1000.5 + 0.5
    )


def test_games_without_a_pair_in_both_orders_have_no_ratings() -> None:
    """a, who always moves first, may win because it is better or because it moves first."""
    wins = Games(score=74.5, count=99)
    for games in ({("a", "b"): wins}, {("a", "b"): wins, ("b", "c"): wins}):
        with pytest.raises(ValueError, match="may only have moved first; evaluate a pair with"):
            bradley_terry(games)


def test_players_that_no_games_connect_have_no_ratings() -> None:
    draw = Games(score=1, count=2)
    with pytest.raises(ValueError, match="no ratings: a, b, c, d are not connected by games"):
        bradley_terry({("a", "b"): draw, ("c", "d"): draw})
