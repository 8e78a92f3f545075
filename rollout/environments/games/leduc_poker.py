"""Leduc poker: each player gets one of six cards, and a third is opened between two rounds of bets.

Source: F. Southey et al., Bayes' bluff: opponent modelling in poker, UAI 2005.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from rollout.environments.games.game import RULES, BadPuzzle
from rollout.environments.games.zero_sum import FIRST, SECOND, ZeroSumGame

RANKS = "JQK"  # from the lowest to the highest
_CARDS = tuple(rank + suit for rank in RANKS for suit in "sh")
_DEALS = tuple(" ".join(cards) for cards in permutations(_CARDS, 3))
_ANTE = 1
_RAISES = (2, 4)  # points that a raise adds, by round
_MOST_RAISES = 2  # of a round


@dataclass(frozen=True, slots=True, kw_only=True)
class LeducHand:
    """State of a game.

    Attributes:
        ranks: rank of the first player's card, of the second player's, and of the open card,
            such as "JQK".
        rounds: actions of each round so far; the first player begins every round.
    """

    ranks: str
    rounds: tuple[tuple[str, ...], ...] = ((),)


class LeducPoker(ZeroSumGame[LeducHand]):
    """Rules of Leduc poker.

    A deal is the first player's card, the second player's, and the card that is opened after the
    first round: "Js Qh Kh". The suits s and h make all 120 deals equally likely, and mean nothing else.
    """

    about = RULES["leduc_poker"]
    forfeit = 13.0  # as much as a player can lose: the ante and two raises in both rounds

    def deals(self) -> Mapping[str, float]:
        return dict.fromkeys(_DEALS, 1 / len(_DEALS))

    def read(self, deal: str) -> LeducHand:
        if deal not in _DEALS:
            raise BadPuzzle(
                f"'{deal[:80]}' is no deal of Leduc poker; expected three of "
                f"{', '.join(_CARDS)}, such as Js Qh Kh"
            )
        return LeducHand(ranks="".join(card[0] for card in deal.split()))

    def player(self, state: LeducHand) -> str | None:
        actions = state.rounds[-1]
        # If a call ends the first round, `play` begins the second one at once. So a latest round that
        # is over ends the game.
        if _round_is_over(actions):
            return None
        return (FIRST, SECOND)[len(actions) % 2]

    def observe(self, state: LeducHand) -> str:
        player = len(state.rounds[-1]) % 2
        rounds = [" ".join(actions) or "nothing" for actions in state.rounds]
        text = f"Your card: {state.ranks[player]}. First round: {rounds[0]}."
        if len(rounds) == 2:
            text += f" Open card: {state.ranks[2]}. Second round: {rounds[1]}."
        return f"{text} Legal: {', '.join(self.legal_actions(state))}."

    def legal_actions(self, state: LeducHand) -> Sequence[str]:
        actions = state.rounds[-1]
        legal = ["call"]  # without a raise it costs nothing, as poker's check
        if actions and actions[-1] == "raise":
            legal.insert(0, "fold")
        if actions.count("raise") < _MOST_RAISES:
            legal.append("raise")
        return legal

    def play(self, state: LeducHand, action: str) -> LeducHand:
        actions = (*state.rounds[-1], action)
        rounds = (*state.rounds[:-1], actions)
        if len(rounds) == 1 and _round_is_over(actions) and action != "fold":
            rounds = (*rounds, ())
        return replace(state, rounds=rounds)

    def payoff(self, state: LeducHand) -> float:
        if state.rounds[-1][-1] == "fold":
            loser = (len(state.rounds[-1]) - 1) % 2  # 0: the first player; 1: the second
            lost_points = float(_stakes(state)[loser])
            return -lost_points if loser == 0 else lost_points
        # A pair with the open card beats everything. At most one player has one, because the open
        # card leaves only one other card of its rank.
        strengths = [(rank == state.ranks[2], RANKS.index(rank)) for rank in state.ranks[:2]]
        if strengths[0] == strengths[1]:
            return 0.0
        stake = float(_stakes(state)[0])  # a call has made both stakes equal
        return stake if strengths[0] > strengths[1] else -stake


def _round_is_over(actions: Sequence[str]) -> bool:
    """Return True if a round is over: someone has folded, or has called after another action."""
    return bool(actions) and (actions[-1] == "fold" or (actions[-1] == "call" and len(actions) > 1))


def _stakes(state: LeducHand) -> tuple[int, int]:
    """Return the points that the first and the second player have put into the pot."""
    stakes = [_ANTE, _ANTE]
    # The second round may not have begun.
    for actions, points in zip(state.rounds, _RAISES, strict=False):
        for turn, action in enumerate(actions):
            player = turn % 2
            if action == "call":
                stakes[player] = stakes[1 - player]
            elif action == "raise":
                stakes[player] = stakes[1 - player] + points
    return stakes[0], stakes[1]
