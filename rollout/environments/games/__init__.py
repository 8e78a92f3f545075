"""Puzzle environments (games) with exact rewards: pure rules over immutable states, one file a game."""

from typing import Any

from rollout.environments.games.blocksworld import Blocksworld, BlocksworldSource
from rollout.environments.games.game import Game, PuzzleSource
from rollout.environments.games.grids import PlanPath, PlanPathSource, Sokoban, SokobanSource
from rollout.environments.games.sudoku import Sudoku, SudokuSource

GAMES: dict[str, type[Game[Any]]] = {  # keyword arguments are the rewards
    "plan_path": PlanPath,
    "sokoban": Sokoban,
    "sudoku": Sudoku,
    "blocksworld": Blocksworld,
}

PUZZLES: dict[str, type[PuzzleSource]] = {  # by game; keyword arguments are a generator's options
    source.game: source
    for source in (PlanPathSource, SokobanSource, SudokuSource, BlocksworldSource)
}
