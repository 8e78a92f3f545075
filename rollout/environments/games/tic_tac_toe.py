"""Tic-tac-toe: three marks in a row win. With the best play of both, the game is drawn."""

from collections.abc import Mapping, Sequence

from rollout.environments.games.game import RULES, BadPuzzle
from rollout.environments.games.zero_sum import FIRST, SECOND, ZeroSumGame

_EMPTY_BOARD = "123456789"  # a free cell is written as its number
_MARKS = {FIRST: "X", SECOND: "O"}
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
    """Rules of tic-tac-toe. A state is the board: its nine cells row by row, such as "12X4O6789".

    Nothing is hidden or left to chance, so there is one deal: the empty board.
    """

    about = RULES["tic_tac_toe"]
    forfeit = 1.0

    def deals(self) -> Mapping[str, float]:
        return {_EMPTY_BOARD: 1.0}

    def read(self, deal: str) -> str:
        if deal != _EMPTY_BOARD:
            raise BadPuzzle(f"'{deal[:80]}' is no start of tic-tac-toe; expected {_EMPTY_BOARD}")
        return deal

    def player(self, state: str) -> str | None:
        if not self.legal_actions(state) or _winner(state):
            return None
        return _player_to_move(state)

    def observe(self, state: str) -> str:
        mark = _MARKS[_player_to_move(state)]
        rows = "\n".join(" ".join(state[start : start + 3]) for start in (0, 3, 6))
        return f"You play {mark}.\n{rows}"

    def legal_actions(self, state: str) -> Sequence[str]:
        return [cell for cell in state if cell.isdigit()]

    def play(self, state: str, action: str) -> str:
        mark = _MARKS[_player_to_move(state)]
        return state.replace(action, mark)

    def payoff(self, state: str) -> float:
        return {"X": 1.0, "O": -1.0, "": 0.0}[_winner(state)]


def _player_to_move(board: str) -> str:
    """Return the player who puts the next mark; the first player begins with nine free cells."""
    free_cells = sum(cell.isdigit() for cell in board)
    return FIRST if free_cells % 2 == 1 else SECOND


def _winner(board: str) -> str:
    """Return the mark that has three in a row, or ""."""
    # Free cells have different numbers, so only marks can be equal.
    for first, second, third in _LINES:
        if board[first] == board[second] == board[third]:
            return board[first]
    return ""
