"""Exact values of strategies in a zero-sum game: expected payoff, best response, exploitability.

A behaviour strategy is a table: the probability of each legal action in every information set. An
information set is all that a player has seen, in the words of `ZeroSumGame.observe`.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import TypeVar

from rollout.environments.games.zero_sum import FIRST, PLAYERS, ZeroSumGame

_State = TypeVar("_State", bound=Hashable)

# Player and observation.
InformationSet = tuple[str, str]
# Probability of each legal action, by information set.
Strategy = Mapping[InformationSet, Mapping[str, float]]
# Probability of each state that the game may be in.
_Distribution = dict[_State, float]


def information_sets(game: ZeroSumGame[_State]) -> dict[InformationSet, tuple[str, ...]]:
    """Return the legal actions in every information set of both players."""
    actions: dict[InformationSet, tuple[str, ...]] = {}
    visited: set[_State] = set()

    def visit(state: _State) -> None:
        player = game.player(state)
        if player is None or state in visited:
            return
        visited.add(state)
        legal = tuple(game.legal_actions(state))
        actions[player, game.observe(state)] = legal
        for action in legal:
            visit(game.play(state, action))

    for deal in game.deals():
        visit(game.read(deal))
    return actions


def uniform_strategy(game: ZeroSumGame[_State]) -> dict[InformationSet, dict[str, float]]:
    """Return the strategy in which both players choose every legal action with equal probability."""
    return {
        information_set: dict.fromkeys(actions, 1 / len(actions))
        for information_set, actions in information_sets(game).items()
    }


def expected_payoff(game: ZeroSumGame[_State], strategy: Strategy) -> float:
    """Return the expected payoff of the first player if both players follow a strategy."""

    @cache
    def value(state: _State) -> float:
        player = game.player(state)
        if player is None:
            return game.payoff(state)
        probabilities = strategy[player, game.observe(state)]
        return sum(
            probability * value(game.play(state, action))
            for action, probability in probabilities.items()
        )

    return sum(probability * value(game.read(deal)) for deal, probability in game.deals().items())


def best_response_value(game: ZeroSumGame[_State], strategy: Strategy, player: str) -> float:
    """Return the largest expected payoff of `player` against an opponent who follows `strategy`."""
    sign = 1 if player == FIRST else -1

    def follow_opponent(state: _State, probability: float) -> Iterator[tuple[_State, float]]:
        """Yield (state, probability) for each next state in which the player moves or the game has ended.

        It is `state` itself if that holds for it already.
        """
        mover = game.player(state)
        if mover is None or mover == player:
            yield state, probability
            return
        for action, action_probability in strategy[mover, game.observe(state)].items():
            yield from follow_opponent(game.play(state, action), probability * action_probability)

    def next_states(states: Iterable[tuple[_State, float]]) -> _Distribution[_State]:
        """Return the probability of each next state in which the player moves or the game has ended."""
        reached: _Distribution[_State] = {}
        for start, start_probability in states:
            for state, probability in follow_opponent(start, start_probability):
                reached[state] = reached.get(state, 0.0) + probability
        return reached

    def value(states: Iterable[tuple[_State, float]]) -> float:
        """Return the player's largest expected payoff if the game is in one of several states.

        Args:
            states: (state, probability) of each; the probabilities sum to 1.
        """
        total = 0.0
        by_information_set: dict[str, _Distribution[_State]] = {}
        for state, probability in next_states(states).items():
            if game.player(state) is None:
                total += sign * probability * game.payoff(state)
            else:
                by_information_set.setdefault(game.observe(state), {})[state] = probability

        for group in by_information_set.values():
            group_probability = sum(group.values())
            if group_probability:
                beliefs = tuple(
                    (state, probability / group_probability) for state, probability in group.items()
                )
                total += group_probability * information_set_value(beliefs)
        return total

    @cache
    def information_set_value(beliefs: tuple[tuple[_State, float], ...]) -> float:
        """Return the expected payoff of the best action in an information set.

        The player cannot tell its states apart, so the same action is taken in all of them. Values
        are cached, because many histories of a game without hidden information lead to one state.

        Args:
            beliefs: (state, probability) of each state of the information set. The probabilities sum
                to 1, so the cache has one entry however likely the information set is.
        """
        return max(
            value([(game.play(state, action), belief) for state, belief in beliefs])
            for action in game.legal_actions(beliefs[0][0])
        )

    return value((game.read(deal), probability) for deal, probability in game.deals().items())


def exploitability(game: ZeroSumGame[_State], strategy: Strategy) -> float:
    """Return half of what both players together could gain by best responses to a strategy.

    It is 0 for an equilibrium, and else positive. A team that follows the strategy, as the first
    player in half of its games and as the second in the others, loses this many points per game to
    the best opponents.
    """
    return sum(best_response_value(game, strategy, player) for player in PLAYERS) / 2
