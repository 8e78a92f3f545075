"""Exact values of strategies in a zero-sum game: expected payoff, best response, exploitability.

A behaviour strategy is a table: the probability of each legal action in every information set. An
information set is all that a player has seen, in the words of `ZeroSumGame.observe`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from rollout.environments.games.zero_sum import FIRST, PLAYERS, ZeroSumGame

_State = TypeVar("_State")

# Player and observation.
InformationSet = tuple[str, str]
# Probability of each legal action, by information set.
Strategy = Mapping[InformationSet, Mapping[str, float]]
# State, and the probability that chance and the opponent play towards it.
_Weighted = tuple[_State, float]


def information_sets(game: ZeroSumGame[_State]) -> dict[InformationSet, tuple[str, ...]]:
    """Return the legal actions in every information set of both players."""
    actions: dict[InformationSet, tuple[str, ...]] = {}

    def visit(state: _State) -> None:
        player = game.player(state)
        if player is None:
            return
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

    def until_turn(states: Iterable[_Weighted[_State]]) -> Iterator[_Weighted[_State]]:
        """Follow the opponent's strategy up to the next turn of the player, or to the end."""
        for state, weight in states:
            mover = game.player(state)
            if mover is None or mover == player:
                yield state, weight
                continue
            for action, probability in strategy[mover, game.observe(state)].items():
                yield from until_turn([(game.play(state, action), weight * probability)])

    def value(states: Iterable[_Weighted[_State]]) -> float:
        total = 0.0
        by_information_set: dict[str, list[_Weighted[_State]]] = {}
        for state, weight in until_turn(states):
            if game.player(state) is None:
                total += sign * weight * game.payoff(state)
            else:
                by_information_set.setdefault(game.observe(state), []).append((state, weight))

        # The player cannot tell the states of an information set apart, so one action is best in all.
        for group in by_information_set.values():
            total += max(
                value([(game.play(state, action), weight) for state, weight in group])
                for action in game.legal_actions(group[0][0])
            )
        return total

    return value((game.read(deal), probability) for deal, probability in game.deals().items())


def exploitability(game: ZeroSumGame[_State], strategy: Strategy) -> float:
    """Return half of what both players together could gain by best responses to a strategy.

    It is 0 for an equilibrium, and else positive: the mean loss per game of someone who plays both
    seats by this strategy against the best opponents.
    """
    return sum(best_response_value(game, strategy, player) for player in PLAYERS) / 2
