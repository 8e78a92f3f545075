"""Ratings of the models that have played a zero-sum game against each other, with 95 % intervals.

The model is Bradley and Terry's, in the units of Elo, with an advantage of the player who moves first.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# Elo's unit: a difference of 400 points means expected scores of 10 to 1.
_POINTS = 400 / math.log(10)
_Z95 = 1.959964  # 97.5 % quantile of the standard normal distribution
_MAX_UPDATES = 1000  # of Newton's method


@dataclass(frozen=True, slots=True, kw_only=True)
class Games:
    """Games of two players in which the same one always moves first.

    Attributes:
        score: sum of the points of the player who moves first: 1 for a win, 0.5 for a draw.
        count: number of games.
    """

    score: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """Estimated number of Elo points and its 95 % interval, `value` ± `margin`."""

    value: float
    margin: float

    def __str__(self) -> str:
        return f"{round(self.value):+d} ± {self.margin:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratings:
    """Ratings of all players.

    Attributes:
        players: rating by player, relative to the mean of all players, which is 0.
        first_move: points that the advantage of the first move is worth.
    """

    players: Mapping[str, Rating]
    first_move: Rating


def bradley_terry(games: Mapping[tuple[str, str], Games]) -> Ratings:
    """Fit ratings by maximum likelihood.

    The log-odds that the player who moves first wins are first_move + its rating − the other's rating.
    One drawn game is added to every pair, so that a player who has won all games has a finite rating.
    Intervals are those of independent games, from the inverse of the Fisher information.

    Args:
        games: games by the player who moves first and the other one; a player may play itself.

    Raises:
        ValueError: there are players without any chain of games between them, or the games do not
            separate the ratings from the advantage of the first move.
    """
    players = sorted({player for pair in games for player in pair})
    # Row per pair, column per player, and a last one for the first move.
    design = np.zeros((len(games), len(players) + 1))
    scores = np.zeros(len(games))
    counts = np.zeros(len(games))
    for row, ((first, second), pair_games) in enumerate(games.items()):
        design[row, players.index(first)] += 1
        design[row, players.index(second)] -= 1
        design[row, -1] = 1
        scores[row] = pair_games.score + 0.5
        counts[row] = pair_games.count + 1
    if np.linalg.matrix_rank(design[:, :-1]) < len(players) - 1:
        raise ValueError(
            f"no ratings: {', '.join(players)} are not connected by games; evaluate more pairs"
        )
    if np.linalg.matrix_rank(design) < len(players):
        raise ValueError(
            "no ratings: the players who won may be the better ones or may only have moved first; "
            "evaluate a pair with the other player first too"
        )

    values, covariance = _maximize_likelihood(design, scores, counts)
    margins = _Z95 * np.sqrt(np.diag(covariance))
    ratings = [
        Rating(value=_POINTS * float(value), margin=_POINTS * float(margin))
        for value, margin in zip(values, margins, strict=True)
    ]
    return Ratings(players=dict(zip(players, ratings[:-1], strict=True)), first_move=ratings[-1])


def _maximize_likelihood(
    design: np.ndarray, scores: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fit a logistic regression with Newton's method.

    Args:
        design: factor of each coefficient in the log-odds of each pair [pairs, coefficients].
        scores: points of the player who moves first [pairs].
        counts: number of games [pairs].

    Returns:
        The coefficients and their covariance.
    """
    # Ratings are known up to a constant; the pseudo-inverse chooses those with mean 0.
    values = np.zeros(design.shape[1])
    for _ in range(_MAX_UPDATES):
        expected = 1 / (1 + np.exp(-design @ values))
        information = design.T @ (design * (counts * expected * (1 - expected))[:, None])
        covariance = np.linalg.pinv(information, hermitian=True)
        update = covariance @ (design.T @ (scores - counts * expected))
        # Full steps may diverge if some pairs have far more games than others. A step that changes no
        # log-odds by more than 1 always increases the likelihood.
        update /= max(1.0, np.abs(design @ update).max())
        values += update
        if np.abs(update).max() < 1e-10:
            break
    return values, covariance
