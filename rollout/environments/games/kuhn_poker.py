"""Kuhn poker, the smallest poker: each player gets one of three cards, and there is one bet.

Source: H. W. Kuhn, A simplified two-person poker, 1950. If both play their best, the first player
loses 1/18 of a point per game on average.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from rollout.environments.games.game import RULES, BadPuzzle
from rollout.environments.games.zero_sum import FIRST, SECOND, ZeroSumGame

CARDS = "JQK"  # from the lowest to the highest
ACTIONS = ("pass", "bet")
# Histories at which the game ends.
_ENDS = {
    ("pass", "pass"),
    ("bet", "pass"),
    ("bet", "bet"),
    ("pass", "bet", "pass"),
    ("pass", "bet", "bet"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """State of a game.

    Attributes:
        cards: card of the first player, then of the second, such as "KJ".
        history: actions so far; the first player begins, and the players take turns.
    """

    cards: str
    history: tuple[str, ...] = ()


class KuhnPoker(ZeroSumGame[Hand]):
    """Rules of Kuhn poker. A deal is the first player's card, then the second's: "K J"."""

    about = RULES["kuhn_poker"]
    forfeit = 2.0  # as much as a player can lose: the ante and the bet

    def deals(self) -> Mapping[str, float]:
        return {" ".join(cards): 1 / 6 for cards in permutations(CARDS, 2)}

    def read(self, deal: str) -> Hand:
        if deal not in self.deals():
            raise BadPuzzle(
                f"'{deal[:80]}' is no deal of Kuhn poker; expected two of J, Q, K, such as K J"
            )
        return Hand(cards=deal.replace(" ", ""))

    def player(self, state: Hand) -> str | None:
        if state.history in _ENDS:
            return None
        return (FIRST, SECOND)[len(state.history) % 2]

    def observe(self, state: Hand) -> str:
        history = " ".join(state.history) or "nothing"
        player = len(state.history) % 2
        return f"Your card: {state.cards[player]}. Actions so far: {history}."

    def legal_actions(self, state: Hand) -> Sequence[str]:
        return ACTIONS

    def play(self, state: Hand, action: str) -> Hand:
        return replace(state, history=(*state.history, action))

    def payoff(self, state: Hand) -> float:
        if state.history[-2:] == ("bet", "pass"):
            # The player who passed after the bet loses the ante.
            return 1.0 if len(state.history) == 2 else -1.0
        stake = 2.0 if state.history[-1] == "bet" else 1.0
        first_card, second_card = map(CARDS.index, state.cards)
        return stake if first_card > second_card else -stake
