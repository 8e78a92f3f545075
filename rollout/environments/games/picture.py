"""A trajectory of a game as one SVG image: a board for the first state, and one after each list of actions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rollout.environments.games import GAMES
from rollout.records.trajectory import Task

_CELL, _GAP = 24, 16  # pixels
_COLOURS = {  # of the signs that are not a plain label
    "#": "#4a4a4a",
    "_": "#f2efe9",
    ".": "#f2efe9",
    "S": "#4c78a8",
    "@": "#4c78a8",
    "+": "#4c78a8",
    "G": "#54a24b",
    "*": "#54a24b",
    "$": "#c98b3a",
}
_LABEL = "#ffffff"  # square of a digit or a block
_UNWRITTEN = "#_"  # signs that their colour says


def picture(task: Task, actions: Sequence[str]) -> str:
    """The boards of `task` from left to right, each after one more of the lists of `actions`, as SVG.

    A text that is no list of actions repeats the board.

    Raises:
        BadPuzzle: the task's prompt is no puzzle of its game.
    """
    game = GAMES[task.env]()
    states = [game.read(task.prompt)]
    for text in actions:
        played = game.play(states[-1], text)
        states.append(states[-1] if played is None else played.state)
    boards = [game.board(state) for state in states]
    parts, left = [], _GAP
    for board in boards:
        parts += _squares(board, left)
        left += _CELL * max(map(len, board)) + _GAP
    height = _CELL * max(map(len, boards)) + 2 * _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left}" height="{height}" font-family="monospace" '
        f'font-size="14" text-anchor="middle">{"".join(parts)}</svg>'
    )


def _squares(board: Sequence[Sequence[str]], left: int) -> list[str]:
    parts = []
    for r, row in enumerate(board):
        for c, sign in enumerate(row):
            x, y = left + c * _CELL, _GAP + r * _CELL
            colour = _COLOURS.get(sign, _LABEL)
            parts.append(f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{colour}" stroke="#999"/>')
            if sign not in _UNWRITTEN:
                parts.append(f'<text x="{x + _CELL // 2}" y="{y + 17}">{escape(sign)}</text>')
    return parts
