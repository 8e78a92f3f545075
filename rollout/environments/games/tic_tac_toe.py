"""Tic-tac-toe: three marks in a row win. With the best play of both, the game is drawn."""

from collections.abc import Mapping, Sequence

from rollout.environments.games.game import RULES, BadPuzzle
from rollout.environments.games.zero_sum import FIRST, SECOND, ZeroSumGame

_EMPTY = "123456789"  # a free cell is written as its number
_MARKS = "XO"  # of the first and of the second player
_LINES = (
    (0, 1, 2),
    (3, 4, 5),
    (6, 7, 8),
    (0, 3, 6),
    (1, 4, 7),
    (2, 5, 8),
    (0, 4, 8),
    (2, 4, 6),
)


class TicTacToe(ZeroSumGame[str]):
    """Rules of tic-tac-toe. A state is the board: nine cells, row by row.

    Nothing is hidden or left to chance, so there is one deal: the empty board.
    """

    about = RULES["tic_tac_toe"]
    forfeit = 1.0

    def deals(self) -> Mapping[str, float]:
        return {_EMPTY: 1.0}

    def read(self, deal: str) -> str:
        if deal != _EMPTY:
            raise BadPuzzle(f"'{deal[:80]}' is no start of tic-tac-toe; expected {_EMPTY}")
        return deal

    def player(self, state: str) -> str | None:
        free = self.legal_actions(state)
        if not free or _winner(state):
            return None
        return SECOND if len(free) % 2 == 0 else FIRST

    def observe(self, state: str) -> str:
        mark = _MARKS[len(self.legal_actions(state)) % 2 == 0]
        rows = "\n".join(" ".join(state[start : start + 3]) for start in (0, 3, 6))
        return f"You play {mark}.\n{rows}"

    def legal_actions(self, state: str) -> Sequence[str]:
        return [cell for cell in state if cell.isdigit()]

    def play(self, state: str, action: str) -> str:
        mark = _MARKS[self.player(state) == SECOND]
        return state.replace(action, mark)

    def payoff(self, state: str) -> float:
        return {"X": 1.0, "O": -1.0, "": 0.0}[_winner(state)]


def _winner(board: str) -> str:
    """Return the mark that has three in a row, or ""."""
    for first, second, third in _LINES:
        if board[first] == board[second] == board[third]:
            return board[first]
    return ""
