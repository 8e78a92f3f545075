"""Puzzle environments (games) with exact rewards: rules over immutable states, and generators."""

from typing import Any

from rollout.environments.games.blocksworld import Blocksworld, BlocksworldSource
from rollout.environments.games.game import Game, PuzzleSource
from rollout.environments.games.grids import PlanPath, PlanPathSource, Sokoban, SokobanSource
from rollout.environments.games.sudoku import Sudoku, SudokuSource

# Rules by name; their keyword arguments are the rewards.
GAMES: dict[str, type[Game[Any]]] = {
    "plan_path": PlanPath,
    "sokoban": Sokoban,
    "sudoku": Sudoku,
    "blocksworld": Blocksworld,
}

# Generators by the name of their game; their keyword arguments are options.
PUZZLES: dict[str, type[PuzzleSource]] = {
    source.game: source
    for source in (PlanPathSource, SokobanSource, SudokuSource, BlocksworldSource)
}
